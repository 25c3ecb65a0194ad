//! Inspect and list: locks as other clients may see them, without the attempt, which is a secret.

use lockkeeper_core::{LockName, LockPage, LockView, Names, Page, Result};

use crate::codec::{self, millis};
use crate::statements;
use crate::transaction::Tx;
use crate::wake_pipe::{Peer, PeerState};

/// How many waiters of a queue a view has.
const QUEUE_SHOWN: u32 = LockView::QUEUE_SHOWN as u32;

impl Tx<'_> {
    /// One lock as it is now. A reading transaction leaves out a hold whose lease or process has ended, and sets
    /// [`Tx::needs_write`]: only a writing transaction can end the hold, and start its lock-delay.
    pub fn inspect(&mut self, name: &LockName) -> Result<Option<LockView>> {
        self.remove_dead_holders(&Names::from(name.clone()))?;
        for peer in self.all(statements::QUEUE_PEERS, [name.as_str()], |row| row.get::<_, Peer>(0))? {
            if self.peer_state(&peer) == PeerState::Gone {
                self.remove_dead_peer(&peer)?;
            }
        }
        let now = self.now.moment;
        let held = self.live(name)?;
        let view = LockView {
            name: name.clone(),
            held: self.holder_views(&held)?,
            queue: self.all(statements::QUEUE_SHOWN, (name.as_str(), QUEUE_SHOWN), codec::waiter_view)?,
            waiting: self.queue_length(name)?,
            delayed_ms: self.delayed(name)?.map(|until| millis(until.since(now))),
        };
        let any = !view.held.is_empty() || view.waiting > 0 || view.delayed_ms.is_some();
        Ok(any.then_some(view))
    }

    /// The locks whose names begin with `prefix`, in order, a page at a time.
    pub fn list(&mut self, prefix: &str, page: &Page) -> Result<LockPage> {
        let mut locks = Vec::new();
        let mut name = match &page.after {
            Some(after) if after.as_str() >= prefix => {
                self.next_name(statements::NAME_AFTER, after.as_str())?
            }
            _ => self.next_name(statements::NAME_FROM, prefix)?,
        };
        while let Some(found) = name.filter(|name| name.as_str().starts_with(prefix)) {
            let view = self.inspect(&found)?;
            if view.is_some() && locks.len() == page.size() {
                let next = locks.last().map(|last: &LockView| last.name.clone());
                return Ok(LockPage { locks, next });
            }
            locks.extend(view);
            name = self.next_name(statements::NAME_AFTER, found.as_str())?;
        }
        Ok(LockPage { locks, next: None })
    }

    fn next_name(&self, text: &str, from: &str) -> Result<Option<LockName>> {
        let read = |row: &rusqlite::Row<'_>| match row.get_ref(0)? {
            rusqlite::types::ValueRef::Null => Ok(None),
            _ => codec::name(row, 0).map(Some),
        };
        Ok(self.one(text, [from], read)?.flatten())
    }
}
