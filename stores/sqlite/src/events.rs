//! What happened, for those who watch: rows written in the same transaction as what they tell of.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use lockkeeper_core::{Event, EventKind, EventStream, Holder, LockName, Result};
use rusqlite::params;
use tokio::sync::mpsc;

use crate::post::{NEWS, Peer};
use crate::rows::{self, signed};
use crate::script;
use crate::tx::Tx;

/// How many events are kept for those who come late.
const KEPT: i64 = 10_000;
/// How many events a watcher may be behind before some are dropped and it is told so.
const BACKLOG: usize = 1024;

impl Tx<'_> {
    /// Writes down what happened to these names. Nobody watching, only a break is worth it.
    pub fn tell(&mut self, names: &[LockName], kind: &EventKind, holder: Option<&Holder>) -> Result<()> {
        if !self.watched && !matches!(kind, EventKind::Broken { .. }) {
            return Ok(());
        }
        let fence = kind.fence().map(|fence| signed(fence.get()));
        let reason = match kind {
            EventKind::Broken { reason, .. } => Some(reason),
            _ => None,
        };
        for name in names {
            self.change(
                script::ADD_EVENT,
                params![
                    signed(self.now.wall.as_micros()),
                    name.as_str(),
                    kind.word(),
                    fence,
                    reason,
                    holder.map(|holder| &holder.host),
                    holder.map(|holder| holder.pid),
                    holder.and_then(|holder| holder.label.as_ref()),
                ],
            )?;
            let number = self.sql.last_insert_rowid();
            if number % 64 == 0 {
                self.change(script::TRIM_EVENTS, [number - KEPT])?;
            }
        }
        self.after.events = true;
        Ok(())
    }

    /// Everybody who watches has news.
    pub fn nudge_watchers(&mut self) -> Result<()> {
        if self.after.events {
            for peer in self.all(script::WATCHERS, [], |row| row.get::<_, Peer>(0))? {
                if peer != self.home.peer {
                    self.after.nudges.entry(peer).or_default().insert(NEWS);
                }
            }
        }
        Ok(())
    }

    /// We watch from now on; returns the number of the newest event.
    pub fn start_watching(&mut self) -> Result<i64> {
        self.home.mailbox()?;
        self.change(script::ADD_WATCHER, [self.home.peer])?;
        Ok(self.event_span()?.1)
    }

    /// The numbers of the oldest and the newest event.
    fn event_span(&self) -> Result<(i64, i64)> {
        let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
        Ok(self.one(script::EVENT_SPAN, [], read)?.unwrap_or((1, 0)))
    }

    /// The events after a number, and whether some before them are gone already.
    pub fn events_after(&self, number: i64) -> Result<(bool, Vec<(i64, Event)>)> {
        let (oldest, newest) = self.event_span()?;
        // Numbers that went back are those of another file.
        let missed = newest > 0 && oldest > number + 1 || newest < number;
        let from = if newest < number { 0 } else { number };
        Ok((missed, self.all(script::EVENTS, [from], rows::event)?))
    }
}

/// Those who watch in this process.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    watchers: Vec<Watcher>,
    /// The number of the last event that was passed on.
    pub cursor: i64,
}

#[derive(Debug)]
struct Watcher {
    prefix: String,
    events: mpsc::Sender<Event>,
    missed: bool,
}

impl Watchers {
    pub fn any(&self) -> bool {
        !self.watchers.is_empty()
    }

    pub fn add(&mut self, prefix: &str) -> EventStream {
        let (events, stream) = mpsc::channel(BACKLOG);
        self.watchers.push(Watcher { prefix: prefix.to_owned(), events, missed: false });
        Box::pin(Events(stream))
    }

    /// Forgets those who do not listen any more.
    pub fn tidy(&mut self) {
        self.watchers.retain(|watcher| !watcher.events.is_closed());
    }

    pub fn miss(&mut self) {
        self.watchers.iter_mut().for_each(|watcher| watcher.missed = true);
    }

    pub fn tell(&mut self, event: &Event) {
        for watcher in &mut self.watchers {
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
