//! Locks as others may see them: never the attempt.

use lockkeeper_core::{LockName, LockPage, LockView, Names, Page, Result};

use crate::post::{Peer, Presence};
use crate::rows::{self, millis};
use crate::script;
use crate::tx::Tx;

/// How much of a line is shown.
const LINE: u32 = LockView::LINE as u32;

impl Tx<'_> {
    /// One lock as it is now. A lease that is over, or whose process is dead, is not shown, and [`Tx::due`] is set:
    /// what comes after it (a delay) is known only when a writer has ended it.
    pub fn inspect(&mut self, name: &LockName) -> Result<Option<LockView>> {
        self.bury_holders(&Names::from(name.clone()))?;
        for peer in self.all(script::LINE_PEERS, [name.as_str()], |row| row.get::<_, Peer>(0))? {
            if self.presence(&peer) == Presence::Gone {
                self.bury_peer(&peer)?;
            }
        }
        let now = self.now.moment;
        let held = self.live(name)?;
        let view = LockView {
            name: name.clone(),
            held: self.views(&held)?,
            line: self.all(script::LINE_SHOWN, (name.as_str(), LINE), rows::queued)?,
            waiting: self.line_length(name)?,
            delayed_ms: self.delayed(name)?.map(|until| millis(until.since(now))),
        };
        let any = !view.held.is_empty() || view.waiting > 0 || view.delayed_ms.is_some();
        Ok(any.then_some(view))
    }

    /// The locks whose names begin with `prefix`, in order, a page at a time.
    pub fn list(&mut self, prefix: &str, page: &Page) -> Result<LockPage> {
        let mut locks = Vec::new();
        let mut name = match &page.after {
            Some(after) if after.as_str() >= prefix => self.next_name(script::NAME_AFTER, after.as_str())?,
            _ => self.next_name(script::NAME_FROM, prefix)?,
        };
        while let Some(found) = name.filter(|name| name.as_str().starts_with(prefix)) {
            let view = self.inspect(&found)?;
            if view.is_some() && locks.len() == page.size() {
                let next = locks.last().map(|last: &LockView| last.name.clone());
                return Ok(LockPage { locks, next });
            }
            locks.extend(view);
            name = self.next_name(script::NAME_AFTER, found.as_str())?;
        }
        Ok(LockPage { locks, next: None })
    }

    fn next_name(&self, text: &str, from: &str) -> Result<Option<LockName>> {
        let read = |row: &rusqlite::Row<'_>| match row.get_ref(0)? {
            rusqlite::types::ValueRef::Null => Ok(None),
            _ => rows::name(row, 0).map(Some),
        };
        Ok(self.one(text, [from], read)?.flatten())
    }
}
