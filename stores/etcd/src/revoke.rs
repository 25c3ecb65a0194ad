//! Asking the holders of a lock to give it back. The reason is written into the keys of every grant, which stay on the lease that they hang on: the
//! next renewal finds the reason instead of the grant that it knows, and the holder's process ends the grant when its time is over.

use std::collections::BTreeSet;

use lockkeeper_core::lease::Why as Loss;
use lockkeeper_core::{Error, Fence, LockName, Names, Result};

use crate::breaking::{Whole, names_of};
use crate::entry::{Entry, One, State};
use crate::fault::Failure;
use crate::layout::Mark;
use crate::proto::RequestOp;
use crate::script::{delete, get, nested, put, txn};
use crate::store::Shared;
use crate::watch::Why;

/// Why a revoked grant cannot be had once more.
pub fn lost(reason: &str) -> Error {
    Error::Lost(Loss::Revoked(reason.into()).to_string())
}

impl One {
    /// Why its holder is to give it back, if it is.
    pub fn revoked(&self) -> Option<&str> {
        self.entry.as_ref().filter(|entry| entry.state == State::Granted)?.revoked.as_deref()
    }
}

impl Shared {
    /// Marks all grants of a lock. A hold that only lingers ends, and a lock that is only held back is freed.
    pub async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let mut touched = BTreeSet::from([name.clone()]);
        loop {
            let mut holds = self.holds_of(name).await?;
            if holds.wholes.iter().flat_map(|whole| &whole.keys).any(One::is_foreign) {
                return Err(Error::Unsupported(format!(
                    "{name} is held by a client that is not Lockkeeper's, which cannot be told to give it back: break it without \
                     waiting for the holder"
                )));
            }
            // Marked before, also by an earlier part of this.
            let is_marked = |whole: &Whole| whole.keys.iter().all(|one| one.revoked() == Some(reason));
            let (marked, rest): (Vec<_>, Vec<_>) = holds.wholes.drain(..).partition(is_marked);
            touched = names_of(&touched, &marked);
            holds.wholes = rest;
            let some = &holds.wholes[..holds.portion()];
            let marks = some.iter().flat_map(|whole| &whole.keys).map(|one| mark(one, holds.base, reason));
            let (names, part) = (names_of(&touched, some), some.len() < holds.wholes.len());
            let told = Why::Revoked { names: names.iter().cloned().collect(), reason: reason.into(), part };
            let done = self.change(&holds, some, marks.collect(), &names, &told).await?;
            if let Some(fence) = done.filter(|_| !part) {
                return Ok(fence);
            }
        }
    }

    /// The keys of a grant that was revoked, if it is still there: which write of each it is, and the reason. `None`: it is not there, or was
    /// not revoked.
    pub async fn find_revoked(
        &self,
        names: &Names,
        place: &Mark,
        attempt: &Mark,
    ) -> Result<Option<(Vec<i64>, String)>, Failure> {
        // Each a transaction of its own, so that many names are not too many operations.
        let each = names
            .iter()
            .map(|name| nested(txn(Vec::new(), vec![get(&self.layout.key(name, place))], Vec::new())));
        let look = txn(Vec::new(), each.collect(), Vec::new());
        let ranges = self.lane.send(look, self.about(names)).await?.txn.ranges();
        let mut found = Vec::new();
        for (name, range) in names.iter().zip(ranges) {
            let one = range.kvs.into_iter().next().and_then(|kv| One::read(&self.layout, name, kv));
            found.extend(one.filter(|one| one.mark.as_ref() == Some(attempt) && one.revoked().is_some()));
        }
        if found.len() != names.count() {
            return Ok(None);
        }
        let reason = found[0].revoked().unwrap_or_default().to_owned();
        Ok(Some((found.iter().map(|one| one.written).collect(), reason)))
    }
}

/// What becomes of one key of a revoked lock.
fn mark(one: &One, base: u64, reason: &str) -> RequestOp {
    match &one.entry {
        Some(entry) if entry.state == State::Granted => {
            let (fence, revoked) = (Some(one.fence(base)), Some(reason.to_owned()));
            put(&one.key, Entry { fence, revoked, ..entry.clone() }.to_bytes(), one.lease)
        }
        _ => delete(&one.key),
    }
}
