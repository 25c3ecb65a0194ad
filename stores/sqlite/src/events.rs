//! What happened, for those who watch: rows written in the same transaction as what they tell of.

use lockkeeper_core::{Event, EventKind, Holder, LockName, Result};
use lockkeeper_host::Feed;
use rusqlite::params;

use crate::post::{NEWS, Peer};
use crate::rows::{self, signed};
use crate::script;
use crate::tx::Tx;

/// How many events are kept for those who come late.
const KEPT: i64 = 10_000;

impl Tx<'_> {
    /// Writes down what happened to these names. Nobody watching, only a break is worth it.
    pub fn tell(&mut self, names: &[LockName], kind: &EventKind, holder: Option<&Holder>) -> Result<()> {
        if !self.watched && !matches!(kind, EventKind::Broken { .. } | EventKind::Revoked { .. }) {
            return Ok(());
        }
        let fence = kind.fence().map(|fence| signed(fence.get()));
        let reason = match kind {
            EventKind::Broken { reason, .. } | EventKind::Revoked { reason, .. } => Some(reason),
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
    pub feed: Feed,
    /// The number of the last event that was passed on.
    pub cursor: i64,
}
