use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use lockkeeper_core::{Event, EventKind, EventStream, Result};
use tokio::sync::mpsc;

/// How many events a watcher may be behind before some are dropped and it is told so.
const BACKLOG: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct Watchers(Vec<Watcher>);

#[derive(Debug)]
struct Watcher {
    prefix: String,
    events: mpsc::Sender<Event>,
    missed: bool,
}

impl Watchers {
    pub fn any(&self) -> bool {
        !self.0.is_empty()
    }

    pub fn add(&mut self, prefix: &str) -> EventStream {
        let (events, stream) = mpsc::channel(BACKLOG);
        self.0.push(Watcher { prefix: prefix.to_owned(), events, missed: false });
        Box::pin(Events(stream))
    }

    pub fn tell(&mut self, event: &Event) {
        self.0.retain_mut(|watcher| {
            if event.name.as_str().starts_with(&watcher.prefix) {
                watcher.tell(event);
            }
            !watcher.events.is_closed()
        });
    }
}

impl Watcher {
    fn tell(&mut self, event: &Event) {
        // Room for the notice that some were missed, and then for the event itself.
        if self.missed && self.events.capacity() >= 2 {
            let notice = Event { kind: EventKind::Missed, holder: None, ..event.clone() };
            self.missed = self.events.try_send(notice).is_err();
        }
        if self.missed || self.events.try_send(event.clone()).is_err() {
            self.missed = true;
        }
    }
}

struct Events(mpsc::Receiver<Event>);

impl Stream for Events {
    type Item = Result<Event>;
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|event| event.map(Ok))
    }
}
