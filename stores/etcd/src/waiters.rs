//! The waiters of this process: what a queued request watches, and the leases of queue entries.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::select_all;
use lockkeeper_core::Mode;

use crate::acquire::AcquireCall;
use crate::admission;
use crate::codec::EntryState;
use crate::config::CLAIM_MIN;
use crate::error::Failure;
use crate::lease::EtcdLease;
use crate::proto::WatchCreate;
use crate::queue::QueueSnapshot;
use crate::statements::range_end_of;
use crate::store::EtcdShared;

impl AcquireCall<'_> {
    /// Waits for a change that may admit this request: usually the end of its predecessor.
    pub async fn wait_for_change(&self, queues: &[QueueSnapshot], revision: i64) {
        let watches = self.watches_needed(queues, revision);
        if watches.is_empty() {
            // No entry blocks it any more.
            return;
        }
        let mut handles: Vec<_> =
            watches.into_iter().map(|create| self.shared.key_watcher.watch(create)).collect();
        let any = handles.iter_mut().map(|entry| {
            // Whatever the event is: the caller reads the queue again.
            Box::pin(entry.next())
        });
        select_all(any).await;
    }

    fn watches_needed(&self, queues: &[QueueSnapshot], revision: i64) -> Vec<WatchCreate> {
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
        let blocks = |queue| admission::find_blocker(self.request, &self.attempt, queue, base);
        let blocked = queues.iter().find_map(|queue| Some((queue, blocks(queue)?)));
        // Each name alone would admit the request, but not all together: its owner holds some of them in another way.
        // Or a hold that this same attempt released lingers.
        let blocked =
            blocked.or_else(|| queues.iter().find_map(|queue| Some((queue, queue.holders().last()?))));
        if let Some((queue, before)) = blocked {
            let counted = matches!(self.request.mode, Mode::Permit(_));
            watches.push(if counted && queue.holds(before) {
                // The first waiter for a permit: any of the holders may be the next to release.
                let prefix = self.shared.keys.lock_prefix(&queue.name);
                from(prefix.clone(), range_end_of(&prefix), vec![NO_PUTS])
            } else {
                let filters =
                    if admission::may_share(self.request.mode, before) { vec![] } else { vec![NO_PUTS] };
                from(before.key.clone(), Vec::new(), filters)
            });
        }
        // If another request of the same owner is granted, this one may re-enter ahead of the queue.
        if let Some(owner) = self.request.owner.as_ref().map(crate::keys::hash_owner) {
            let siblings =
                queues.iter().flat_map(|queue| &queue.all).filter(|entry| entry.owner() == Some(owner));
            let siblings =
                siblings.filter(|entry| entry.is(EntryState::Waiting) && entry.attempt != Some(self.attempt));
            watches.extend(siblings.take(8).map(|entry| from(entry.key.clone(), Vec::new(), Vec::new())));
        }
        watches
    }
}

impl EtcdShared {
    /// The lease for queue entries of requests with this ttl. A request whose holder may be silent only for a short
    /// time need not be waited for any longer as a waiter.
    pub async fn queue_lease(&self, ttl: Duration) -> Result<Arc<EtcdLease>, Failure> {
        let key = self.options.claim.min(ttl.max(CLAIM_MIN));
        let lease = self.lease(key).await?;
        let mut leases = self.queue_leases();
        leases.retain(|other| !other.is_expired());
        if leases.iter().all(|other| other.id != lease.id) {
            leases.push(lease.clone());
        }
        Ok(lease)
    }

    fn queue_leases(&self) -> MutexGuard<'_, Vec<Arc<EtcdLease>>> {
        self.queue_leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The leases of queue entries, if this process has a waiter.
    pub fn queue_leases_in_use(&self) -> Vec<i64> {
        if !self.registry.lock().holds.values().any(|hold| hold.caller.is_some()) {
            return Vec::new();
        }
        self.queue_leases().iter().map(|lease| lease.id).collect()
    }

    /// etcd rejected a transaction because a lease does not exist: find out which one.
    pub async fn check_leases(&self, lease: &EtcdLease) -> Result<(), Failure> {
        let leases = self.queue_leases().clone();
        for lease in leases.iter().map(|lease| &**lease).chain([lease]) {
            if self.connection.lease_time_left(lease.id, false).await?.is_none() {
                self.mark_expired(lease);
            }
        }
        Ok(())
    }
}
