//! How the worker delivers events to the watchers of this process.

use lockkeeper_core::{BootInstant, Result};

use crate::statements;
use crate::worker::Worker;

impl Worker {
    /// Delivers new events. With `poll`, the worker also checks that the file still has the watcher row of this store.
    pub fn poll_events(&mut self, poll: bool) {
        if !self.watchers.hub.any() {
            return;
        }
        self.watchers.hub.sweep();
        if !self.watchers.hub.any() {
            let _ = self.write(|tx| tx.change(statements::REMOVE_WATCHER, [tx.identity.peer]));
            return;
        }
        // A lease may end without a request for its lock: the sweep writes the event that watchers wait for.
        let now = self.now();
        let next = self.next_expiry();
        if next.is_some_and(|next| next <= now) && self.write(|tx| tx.sweep()).is_ok() {
            // More leases may have ended; the worker runs other requests before it continues.
            self.wake_self();
        }
        if poll {
            let _ = self.ensure_watcher_row();
        }
        self.deliver_events();
    }

    /// Writes the watcher row again if another process removed it: a stopped process is taken for dead.
    fn ensure_watcher_row(&mut self) -> Result<()> {
        let peer = self.peer();
        let (known, _) = self.read(|tx| tx.one(statements::IS_WATCHER, [peer], |_| Ok(())))?;
        if known.is_none() {
            self.write(|tx| tx.start_watching().map(drop))?;
        }
        Ok(())
    }

    pub fn deliver_events(&mut self) {
        loop {
            let cursor = self.watchers.cursor;
            let Ok(((missed, events), _)) = self.read(|tx| tx.events_after(cursor)) else { return };
            if missed {
                self.watchers.hub.miss();
            }
            let full = events.len() >= 1000;
            for (number, event) in events {
                self.watchers.hub.emit(&event);
                self.watchers.cursor = number;
            }
            if !full {
                return;
            }
        }
    }

    /// When the next lease ends.
    pub fn next_expiry(&mut self) -> Option<BootInstant> {
        let read = self.read(|tx| tx.one(statements::NEXT_EXPIRY, [], |row| row.get::<_, Option<i64>>(0)));
        let next = read.ok()?.0.flatten()?;
        Some(BootInstant::from_nanos(next.unsigned_abs()))
    }
}
