//! Passes the events of a store on to the watchers of this process.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use lockkeeper_core::{Event, EventKind, EventStream, Result};
use tokio::sync::mpsc;

/// How many events a watcher may be behind before the hub drops some and reports that it did.
const BACKLOG: usize = 1024;

/// The watchers of a store in this process. A slow watcher loses events, and a report says so; it delays no other watcher.
#[derive(Debug, Default)]
pub struct EventHub(Vec<Watcher>);

#[derive(Debug)]
struct Watcher {
    prefix: String,
    events: mpsc::Sender<Event>,
    missed: bool,
}

impl EventHub {
    /// Whether there is a watcher.
    pub fn any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Adds a watcher of the names that begin with `prefix`. It is removed after the caller drops the stream.
    pub fn add(&mut self, prefix: &str) -> EventStream {
        let (events, stream) = mpsc::channel(BACKLOG);
        self.0.push(Watcher { prefix: prefix.to_owned(), events, missed: false });
        Box::pin(Events(stream))
    }

    /// Removes the watchers whose streams were dropped.
    pub fn sweep(&mut self) {
        self.0.retain(|watcher| !watcher.events.is_closed());
    }

    /// Notes that every watcher has missed events.
    pub fn miss(&mut self) {
        self.0.iter_mut().for_each(|watcher| watcher.missed = true);
    }

    /// Sends an event to the watchers of its name.
    pub fn emit(&mut self, event: &Event) {
        self.sweep();
        for watcher in &mut self.0 {
            if event.name.as_str().starts_with(&watcher.prefix) {
                watcher.send(event);
            }
        }
    }
}

impl Watcher {
    fn send(&mut self, event: &Event) {
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
    use lockkeeper_core::{LockName, WallTime};
    use std::task::Waker;

    #[test]
    fn a_slow_watcher_is_told_and_delays_no_other() {
        let name = LockName::new("orders/42").unwrap();
        let event = Event { at: WallTime::default(), name, kind: EventKind::Waiting, holder: None };
        let mut hub = EventHub::default();
        let mut slow = hub.add("orders/");
        let mut next = || match slow.as_mut().poll_next(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Some(Ok(event))) => Some(event.kind),
            _ => None,
        };
        for _ in 0..BACKLOG + 5 {
            hub.emit(&event);
        }
        for _ in 0..BACKLOG {
            assert_eq!(next(), Some(EventKind::Waiting));
        }
        assert_eq!(next(), None);
        hub.emit(&event);
        assert_eq!([next(), next(), next()], [Some(EventKind::Missed), Some(EventKind::Waiting), None]);
        drop(slow);
        hub.emit(&event);
        assert!(!hub.any());
    }
}
