//! Locks whose holders are to give them back: none of their leases is counted anew, and nobody is let in before they have stopped.

use std::collections::BTreeSet;

use lockkeeper_core::lease::Why;
use lockkeeper_core::{Error, EventKind, Fence, Held, LockName, Names, Result};
use rusqlite::params;

use crate::rows::Hold;
use crate::script;
use crate::tx::Tx;

impl Tx<'_> {
    /// Marks everybody who holds the name. A hold that only lingers ends, and a lock that is only held back is freed.
    pub fn revoke(&mut self, name: &LockName, reason: &str) -> Result<Fence> {
        self.change(script::REVOKED_TABLE, [])?;
        self.change(script::REVOKED_TIDY, [])?;
        let holds = self.live(name)?;
        let fence = self.next_fence()?;
        self.change(script::REMOVE_DELAY, [name.as_str()])?;
        let mut others = BTreeSet::new();
        for hold in &holds {
            if hold.lingering {
                self.remove(hold)?;
            } else {
                self.change(script::REVOKE, [hold.attempt.as_bytes()])?;
                self.change(script::ADD_REVOKED, params![hold.attempt.as_bytes(), reason])?;
            }
            others.extend(hold.names.iter().cloned());
        }
        // A grant of several names is revoked as a whole.
        others.remove(name);
        let names: Vec<LockName> = [name.clone()].into_iter().chain(others).collect();
        self.tell(&names, &EventKind::Revoked { fence, reason: reason.to_owned() }, None)?;
        self.touch([name]);
        Ok(fence)
    }

    /// Why a hold is to be given back, if it is.
    pub fn revoked(&self, hold: &Hold) -> Result<Option<String>> {
        if !hold.revoked {
            return Ok(None);
        }
        self.one(script::REVOKED, [hold.attempt.as_bytes()], |row| row.get(0))
    }

    /// An owner that is to give back what it holds cannot enter it again.
    pub fn refuse_revoked(&mut self, names: &Names, fence: Fence) -> Result<()> {
        for name in names {
            for hold in self.live(name)?.iter().filter(|hold| hold.fence == fence) {
                if let Some(reason) = self.revoked(hold)? {
                    return Err(Error::Lost(Why::Revoked(reason.into()).to_string()));
                }
            }
        }
        Ok(())
    }

    /// Holders as others see them.
    pub fn views(&self, holds: &[Hold]) -> Result<Vec<Held>> {
        let view = |hold: &Hold| Ok(Held { revoked: self.revoked(hold)?, ..hold.view(self.now.moment) });
        holds.iter().map(view).collect()
    }
}
