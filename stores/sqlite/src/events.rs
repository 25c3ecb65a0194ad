//! Events: rows that a transaction writes together with the change that they report, for watchers of all processes.

use lockkeeper_core::{Event, EventKind, Holder, LockName, Result};
use lockkeeper_store_kit::EventHub;
use rusqlite::params;

use crate::codec::{self, signed};
use crate::statements;
use crate::transaction::Tx;
use crate::wake_pipe::{EVENTS_WRITTEN, Peer};

/// How many events the file keeps for watchers that fall behind.
const KEPT_EVENTS: i64 = 10_000;

impl Tx<'_> {
    /// Writes an event for each name. Without watchers only a break or a revoke is written.
    pub fn record_event(
        &mut self,
        names: &[LockName],
        kind: &EventKind,
        holder: Option<&Holder>,
    ) -> Result<()> {
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
                statements::ADD_EVENT,
                params![
                    signed(self.now.wall.as_micros()),
                    name.as_str(),
                    kind.as_str(),
                    fence,
                    reason,
                    holder.map(|holder| &holder.host),
                    holder.map(|holder| holder.pid),
                    holder.and_then(|holder| holder.label.as_ref()),
                ],
            )?;
            let number = self.sql.last_insert_rowid();
            if number % 64 == 0 {
                self.change(statements::TRIM_EVENTS, [number - KEPT_EVENTS])?;
            }
        }
        self.after.events = true;
        Ok(())
    }

    /// Wakes the stores with watchers if this transaction wrote events.
    pub fn wake_watchers(&mut self) -> Result<()> {
        if self.after.events {
            for peer in self.all(statements::WATCHERS, [], |row| row.get::<_, Peer>(0))? {
                if peer != self.identity.peer {
                    self.after.wakes.entry(peer).or_default().insert(EVENTS_WRITTEN);
                }
            }
        }
        Ok(())
    }

    /// Writes the watcher row of this store, and returns the number of the newest event.
    pub fn start_watching(&mut self) -> Result<i64> {
        self.identity.wake_pipe()?;
        self.change(statements::ADD_WATCHER, [self.identity.peer])?;
        Ok(self.event_range()?.1)
    }

    /// The numbers of the oldest and the newest event.
    fn event_range(&self) -> Result<(i64, i64)> {
        let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
        Ok(self.one(statements::EVENT_RANGE, [], read)?.unwrap_or((1, 0)))
    }

    /// The events after a number, and whether the file has lost events in between.
    pub fn events_after(&self, number: i64) -> Result<(bool, Vec<(i64, Event)>)> {
        let (oldest, newest) = self.event_range()?;
        // A newest number that is smaller than the cursor belongs to another file.
        let missed = newest > 0 && oldest > number + 1 || newest < number;
        let from = if newest < number { 0 } else { number };
        Ok((missed, self.all(statements::EVENTS, [from], codec::event)?))
    }
}

/// The watchers of this process.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    pub hub: EventHub,
    /// The number of the last event that was delivered.
    pub cursor: i64,
}
