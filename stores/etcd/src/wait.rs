//! Standing in line: what is worth waiting for, and the lease that keeps the place.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::select_all;
use lockkeeper_core::Mode;

use crate::acquire::Asking;
use crate::config::CLAIM_MIN;
use crate::entry::{Line, State};
use crate::fault::Failure;
use crate::judge;
use crate::lease::Lease;
use crate::proto::WatchCreate;
use crate::script::end_of;
use crate::store::Shared;

impl Asking<'_> {
    /// Waits until something happened that may let this one in: as a rule the end of the one before it.
    pub async fn news(&self, lines: &[Line], revision: i64) {
        let watches = self.worth_watching(lines, revision);
        if watches.is_empty() {
            // Nobody is in the way any more.
            return;
        }
        let mut watching: Vec<_> = watches.into_iter().map(|create| self.shared.spy.watch(create)).collect();
        let any = watching.iter_mut().map(|one| {
            // Whatever it is: the line is looked at again.
            Box::pin(one.next())
        });
        select_all(any).await;
    }

    fn worth_watching(&self, lines: &[Line], revision: i64) -> Vec<WatchCreate> {
        const NO_PUTS: i32 = 0;
        let from = |key: Vec<u8>, range_end, filters| WatchCreate {
            key,
            range_end,
            start_revision: revision + 1,
            filters,
            ..WatchCreate::default()
        };
        let mut watches = Vec::new();
        let base = self.shared.base();
        let blocks = |line| judge::in_the_way(self.ask, &self.mark, line, base);
        let blocked = lines.iter().find_map(|line| Some((line, blocks(line)?)));
        // Where each for itself would let it in, all together do not: what its owner has of some of them is not what it asks for. Or it
        // is what this very attempt gave back, and must stay for a while.
        let blocked = blocked.or_else(|| lines.iter().find_map(|line| Some((line, line.holders().last()?))));
        if let Some((line, before)) = blocked {
            let counted = matches!(self.ask.mode, Mode::Permit(_));
            watches.push(if counted && line.holds(before) {
                // The first in line for a permit: any of those who hold one may be the next to let go.
                let prefix = self.shared.layout.queue(&line.name);
                from(prefix.clone(), end_of(&prefix), vec![NO_PUTS])
            } else {
                let filters = if judge::may_share(self.ask.mode, before) { vec![] } else { vec![NO_PUTS] };
                from(before.key.clone(), Vec::new(), filters)
            });
        }
        // An ask of the same owner that is served lets this one in, past the line.
        if let Some(owner) = self.ask.owner.as_ref().map(crate::layout::owner_mark) {
            let siblings = lines.iter().flat_map(|line| &line.all).filter(|one| one.owner() == Some(owner));
            let siblings = siblings.filter(|one| one.is(State::Waiting) && one.mark != Some(self.mark));
            watches.extend(siblings.take(8).map(|one| from(one.key.clone(), Vec::new(), Vec::new())));
        }
        watches
    }
}

impl Shared {
    /// The lease of the queue entries of requests with this ttl. A request that must not be silent for long as a holder need not be
    /// waited for any longer as a waiter.
    pub async fn line_lease(&self, ttl: Duration) -> Result<Arc<Lease>, Failure> {
        let claim = self.options.claim.min(ttl.max(CLAIM_MIN));
        let lease = self.lease(claim).await?;
        let mut lines = self.lines();
        lines.retain(|other| !other.is_dead());
        if lines.iter().all(|other| other.id != lease.id) {
            lines.push(lease.clone());
        }
        Ok(lease)
    }

    fn lines(&self) -> MutexGuard<'_, Vec<Arc<Lease>>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The leases of the queue entries, if anybody waits.
    pub fn lines_in_use(&self) -> Vec<i64> {
        if !self.book.open().holds.values().any(|hold| hold.caller.is_some()) {
            return Vec::new();
        }
        self.lines().iter().map(|lease| lease.id).collect()
    }

    /// Something named a lease that is gone: which one?
    pub async fn check_leases(&self, lease: &Lease) -> Result<(), Failure> {
        let lines = self.lines().clone();
        for one in lines.iter().map(|line| &**line).chain([lease]) {
            if self.link.look_at_lease(one.id, false).await?.is_none() {
                self.bury(one);
            }
        }
        Ok(())
    }
}
