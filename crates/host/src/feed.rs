use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use lockkeeper_core::{Event, EventKind, EventStream, Result};
use tokio::sync::mpsc;

/// How many events a watcher may be behind before some are dropped and it is told so.
const BACKLOG: usize = 1024;

/// Those who watch a store in this process. A slow one loses events, and hears of it; it holds nobody up.
#[derive(Debug, Default)]
pub struct Feed(Vec<Watcher>);

#[derive(Debug)]
struct Watcher {
    prefix: String,
    events: mpsc::Sender<Event>,
    missed: bool,
}

impl Feed {
    /// Whether anybody watches.
    pub fn any(&self) -> bool {
        !self.0.is_empty()
    }

    /// One more who watches the names that begin with `prefix`, until it drops the stream.
    pub fn add(&mut self, prefix: &str) -> EventStream {
        let (events, stream) = mpsc::channel(BACKLOG);
        self.0.push(Watcher { prefix: prefix.to_owned(), events, missed: false });
        Box::pin(Events(stream))
    }

    /// Forgets those who do not listen any more.
    pub fn tidy(&mut self) {
        self.0.retain(|watcher| !watcher.events.is_closed());
    }

    /// Some events are lost for everybody.
    pub fn miss(&mut self) {
        self.0.iter_mut().for_each(|watcher| watcher.missed = true);
    }

    /// Passes an event on.
    pub fn tell(&mut self, event: &Event) {
        self.tidy();
        for watcher in &mut self.0 {
            if event.name.as_str().starts_with(&watcher.prefix) {
                watcher.tell(event);
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use lockkeeper_core::{LockName, Wall};
    use std::task::Waker;

    #[test]
    fn a_watcher_that_falls_behind_is_told_and_holds_nobody_up() {
        let name = LockName::new("orders/42").unwrap();
        let event = Event { at: Wall::default(), name, kind: EventKind::Waiting, holder: None };
        let mut feed = Feed::default();
        let mut slow = feed.add("orders/");
        let mut next = || match slow.as_mut().poll_next(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Some(Ok(event))) => Some(event.kind),
            _ => None,
        };
        for _ in 0..BACKLOG + 5 {
            feed.tell(&event);
        }
        for _ in 0..BACKLOG {
            assert_eq!(next(), Some(EventKind::Waiting));
        }
        assert_eq!(next(), None);
        feed.tell(&event);
        assert_eq!([next(), next(), next()], [Some(EventKind::Missed), Some(EventKind::Waiting), None]);
        drop(slow);
        feed.tell(&event);
        assert!(!feed.any());
    }
}
