//! Locks whose holders are to give them back: no lease of theirs is counted anew, and nobody is let in before they have stopped.

use std::collections::BTreeMap;

use lockkeeper_core::lease::Why;
use lockkeeper_core::{Error, Fence, LockName, Names, Result};

use crate::book::{Book, Hold};
use crate::sight::Phase;
use crate::step::{Slot, Step};
use crate::store::Shared;

impl Book {
    /// Why a hold was revoked, if it was.
    pub fn reason(&self, hold: &Hold) -> Option<&str> {
        self.reasons.get(&hold.revoked?).map(String::as_str)
    }

    /// Drops the reasons that belong to no hold any more.
    pub fn drop_reasons(&mut self) {
        let holds = &self.holds;
        self.reasons.retain(|write, _| holds.iter().any(|hold| hold.revoked == Some(*write)));
    }
}

impl Slot {
    /// Marks the holds that `these` is true of. Their leases stay as they are.
    fn mark_revoked(&mut self, reason: &str, these: impl Fn(&Hold) -> bool) {
        let (write, book) = (self.next, &mut self.page.book);
        for hold in book.holds.iter_mut().filter(|hold| these(hold)) {
            hold.revoked = Some(write);
            self.dirty = true;
        }
        book.reasons.insert(write, reason.to_owned());
        book.drop_reasons();
    }
}

/// Why a hold that `these` is true of was revoked, under any of the names.
pub fn why_revoked(slots: &[Slot], these: impl Fn(&Hold) -> bool) -> Option<&str> {
    slots.iter().find_map(|slot| {
        let book = &slot.page.book;
        book.holds.iter().filter(|hold| these(hold)).find_map(|hold| book.reason(hold))
    })
}

/// A holder that is to stop cannot begin anew.
pub fn refuse_revoked(slots: &[Slot], these: impl Fn(&Hold) -> bool) -> Result<()> {
    match why_revoked(slots, these) {
        Some(reason) => Err(Error::Lost(Why::Revoked(reason.into()).to_string())),
        None => Ok(()),
    }
}

impl Shared {
    /// Marks every grant of the lock. A hold that only lingers ends, and a lock that is only held back is freed.
    pub async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let decide = |slots: &mut [Slot]| {
            let fence = self.next_fence(slots)?;
            let slot = &mut slots[0];
            slot.page.fence = Some(fence);
            slot.page.book.delay = None;
            let sight = slot.sight.clone();
            let held = |hold: &Hold| !hold.lingers() && matches!(sight.phase(hold), Phase::Held(_));
            slot.page.book.holds.retain(held);
            slot.mark_revoked(reason, |_| true);
            slot.dirty = true;
            let several = slot.page.book.holds.iter().filter(|hold| !hold.names.is_empty());
            let several: BTreeMap<_, _> =
                several.map(|hold| (hold.mark.clone(), hold.names.clone())).collect();
            Ok(Step::Write((fence, several)))
        };
        let ((fence, several), _) = self.step(&Names::from(name.clone()), decide).await?;
        tracing::info!(%name, reason, %fence, "a lock was revoked");
        self.errands.freed(std::iter::once(name));
        // A grant of several names is revoked as a whole. Its renewal looks at all of its names, so that the holder is told in any case.
        for (mark, names) in several {
            for other in names.into_iter().filter(|other| other != name) {
                self.revoke_elsewhere(&mark, &other, reason).await;
            }
        }
        Ok(fence)
    }

    async fn revoke_elsewhere(&self, mark: &str, name: &LockName, reason: &str) {
        let decide = |slots: &mut [Slot]| {
            slots[0].mark_revoked(reason, |hold| hold.mark == mark);
            Ok(if slots[0].dirty { Step::Write(()) } else { Step::Tell(()) })
        };
        if let Err(error) = self.step(&Names::from(name.clone()), decide).await {
            tracing::warn!(%name, %error, "part of a revoked grant is not marked: its holder is told all the same");
        }
    }
}
