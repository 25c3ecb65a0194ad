//! Acquiring. On a free lock one transaction writes the request's key as granted. On a contended lock the same
//! transaction writes it as waiting instead, and reads the queue.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{
    AcquireOutcome, Busy, Error, Grant, LockName, LockRequest, ReleaseOutcome, Result, Wait,
};
use lockkeeper_host::sleep_until;
use lockkeeper_store_kit::admission::{AdmissionEntry, QueueVerdict, evaluate_request};
use lockkeeper_store_kit::{CancelSignal, RecentSet, hash_attempt, hash_owner};

use crate::admission::{self, RequestView};
use crate::client::EtcdClient;
use crate::codec::EntryState;
use crate::error::Failure;
use crate::fence_base::{FenceBase, fence_at};
use crate::hold_registry::EtcdHolds;
use crate::key_slots::SlotPool;
use crate::keys::KeyId;
use crate::lease::EtcdLease;
use crate::lease_pool::LeasePool;
use crate::queue::QueueSnapshot;
use crate::release::{Releaser, SearchScope};
use crate::txn_batch::TxnReply;
use crate::waiters::WaitingRequest;
use crate::watcher::KeyWatcher;

/// How long a queued request waits after a failure before it reads the queue again.
pub const RETRY_DELAY: Duration = Duration::from_millis(100);

/// How many times a request reads the queue again at least when others change it between a read and a write. Without a
/// wait time there is no other limit.
const MAX_RETRIES: u32 = 8;

/// Acquires locks.
pub struct Acquirer {
    pub client: Arc<EtcdClient>,
    pub base: Arc<FenceBase>,
    pub registry: Arc<EtcdHolds>,
    pub leases: Arc<LeasePool>,
    pub releaser: Arc<Releaser>,
    pub key_watcher: Arc<KeyWatcher>,
    pub slots: SlotPool,
    /// Names that were contended a short time ago. A request for one of them enqueues in its first transaction, which
    /// costs etcd twice as much as the plain attempt that all other requests make.
    pub recently_contended: RecentSet<LockName>,
    /// How often a waiter reads the queue without a notification.
    pub poll: Duration,
}

/// One call of `acquire`, from its first transaction to its outcome.
pub struct AcquireCall<'a> {
    pub acquirer: &'a Acquirer,
    pub request: &'a LockRequest,
    pub attempt: KeyId,
    /// The request has a queue entry, as far as this process knows.
    pub queued: bool,
    /// Whether the request may wait. If so, its first contended transaction also writes a queue entry.
    pub enqueues: bool,
    /// The revision that created its queue entry.
    pub created: i64,
    /// The queue is long, and its two ends did not decide the request.
    pub read_all: bool,
    /// etcd rejected a transaction because its database is full, and may have applied it.
    pub out_of_space: bool,
    /// The outcome of an earlier call with this attempt is unknown: the request may be queued although the read did
    /// not show it.
    pub outcome_unknown: bool,
}

/// The result of one read of the queues.
pub enum AcquireStep {
    Granted(Grant),
    Blocked {
        queues: Vec<QueueSnapshot>,
        revision: i64,
    },
    /// Another client changed a queue meanwhile: read it again.
    Retry,
}

impl Acquirer {
    pub async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        let attempt = hash_attempt(&request.key.attempt);
        let mut guard = self.registry.begin(&*self.client.clock, attempt, &request.key.names, request.ttl);
        let enqueues = request.wait != Wait::No;
        // If this attempt already holds a grant, re-read the grant instead of enqueuing again.
        let (queued, outcome_unknown) = {
            let table = self.registry.table();
            let hold = table.holds.get(&attempt);
            (hold.is_some_and(|hold| hold.grant.is_some()), hold.is_some_and(|hold| hold.outcome_unknown))
        };
        let mut call = AcquireCall {
            acquirer: self,
            request,
            attempt,
            queued,
            enqueues,
            created: 0,
            read_all: false,
            out_of_space: false,
            outcome_unknown,
        };
        // Nearly every call ends here. The rest is a future many times as large, so it is created only when it is
        // needed.
        let reply = match call.try_uncontended().await {
            Ok(AcquireStep::Granted(grant)) => Ok(AcquireOutcome::Granted(grant)),
            Ok(_) => Box::pin(call.run(&guard.caller)).await,
            Err(error) => Err(error),
        };
        let granted = matches!(reply, Ok(AcquireOutcome::Granted(_)));
        if granted && (guard.caller.is_cancelled() || !self.registry.has_grant(&attempt)) {
            // Another call has released this request before this one had the reply. It may have looked for keys before the grant was written: so
            // whatever exists is removed, once more.
            self.registry.table().holds.remove(&attempt);
            return Err(Error::Unavailable("another call has released this request".into()));
        }
        if matches!(reply, Err(Error::Lost(_))) {
            // The grant was revoked: asking again does not extend its lease.
            guard.restore_expiry();
        }
        let open = call.queued || matches!(reply, Ok(AcquireOutcome::Granted(_)) | Err(Error::Unknown(_)));
        guard.left_nothing = !open;
        if call.out_of_space && !matches!(reply, Ok(_) | Err(Error::Unknown(_))) {
            // etcd has replied, so no transaction of this call is in flight: remove what it may have written now.
            guard.left_nothing = Box::pin(call.end(SearchScope::WithSlots)).await.is_ok();
        }
        match reply {
            // The request is queued, whatever the outcome of the last transaction.
            Err(Error::Unavailable(why)) if call.queued => Err(Error::Unknown(why)),
            reply => reply,
        }
    }
}

impl AcquireCall<'_> {
    async fn run(&mut self, caller: &CancelSignal) -> Result<AcquireOutcome> {
        let Acquirer { client, base, key_watcher, .. } = self.acquirer;
        let clock = &client.clock;
        let wait_until = self.request.wait.deadline(clock.now());
        let (mut failing_since, mut retries) = (None, 0);
        loop {
            if caller.is_cancelled() {
                // The cancelling call may have read the queue before this request was in it.
                if self.queued {
                    caller.note_left_queue();
                }
                self.leave_queue().await?;
                return Err(Error::Unavailable("another call has released this request".into()));
            }
            let run_step = self.run_step().await;
            let (queues, revision) = match run_step {
                Ok(AcquireStep::Granted(grant)) => return Ok(AcquireOutcome::Granted(grant)),
                Ok(AcquireStep::Retry) => {
                    retries += 1;
                    if retries < MAX_RETRIES || clock.now() < wait_until + client.connection.timeout() {
                        continue;
                    }
                    // The wait is over, and other clients have written between every read and write.
                    self.queued |= self.outcome_unknown;
                    self.leave_queue().await?;
                    let name = self.request.key.names.first().clone();
                    return Ok(AcquireOutcome::Busy(Busy { name, held: Vec::new(), waiting: 0 }));
                }
                Ok(AcquireStep::Blocked { queues, revision }) => (queues, revision),
                // Already queued: keep the position while the server is unreachable for a short time.
                Err(Error::Unknown(_) | Error::Unavailable(_))
                    if self.queued
                        && clock.now() < wait_until
                        && clock.now() < *failing_since.get_or_insert(clock.now()) + self.request.ttl =>
                {
                    tokio::select! {
                        () = tokio::time::sleep(RETRY_DELAY) => {}
                        () = caller.cancelled() => {}
                    }
                    continue;
                }
                Err(error) => return Err(error),
            };
            (failing_since, retries) = (None, 0);
            if clock.now() >= wait_until {
                self.queued |= self.outcome_unknown;
                self.leave_queue().await?;
                let busy = admission::busy(self.request, &self.attempt, &queues, base.get());
                return Ok(AcquireOutcome::Busy(busy));
            }
            let (request, attempt, base) = (self.request, self.attempt, base.get());
            let waiting = WaitingRequest { request, attempt, base };
            tokio::select! {
                () = waiting.wait_for_change(&client.keys, key_watcher, &queues, revision) => {}
                () = tokio::time::sleep(self.acquirer.poll) => {}
                () = sleep_until(&**clock, wait_until) => {}
                () = caller.cancelled() => {}
            }
        }
    }

    async fn lease(&self) -> Result<Arc<EtcdLease>, Failure> {
        self.acquirer.leases.lease(self.request.ttl + self.request.lock_delay).await
    }

    /// Converts a failure, and remembers whether it may have left a key behind.
    pub fn note_failure(&mut self, failure: Failure) -> Error {
        self.out_of_space |= matches!(failure, Failure::Rejected(..)) && failure.may_be_applied();
        failure.into()
    }

    /// Acquires a lock that is expected to be free, and does nothing else. Skipped for names that were contended a
    /// short time ago.
    async fn try_uncontended(&mut self) -> Result<AcquireStep> {
        if self.queued || self.acquirer.recently_contended.has(&self.request.key.names) {
            return Ok(AcquireStep::Retry);
        }
        let lease = self.lease().await?;
        let (highest_fence_seen, base) = (self.acquirer.base.highest_fence_seen(), self.acquirer.base.get());
        match self.try_slot(&lease, base).await {
            Ok((reply, Some(slot))) => {
                let fence = fence_at(base, reply.revision)?;
                self.record_grant(&lease, slot.into(), &reply, fence, highest_fence_seen, None).await
            }
            Ok((_, None)) => {
                self.acquirer.recently_contended.add(&self.request.key.names);
                Ok(AcquireStep::Retry)
            }
            Err(failure) if failure.lease_is_gone() => {
                Box::pin(self.acquirer.leases.check_leases(&lease)).await?;
                Ok(AcquireStep::Retry)
            }
            Err(failure) => Err(self.note_failure(failure)),
        }
    }

    /// Tries the lock or enqueues, or reads the queues, and takes the lock if admission allows it.
    async fn run_step(&mut self) -> Result<AcquireStep> {
        let request = self.request;
        let lease = self.lease().await?;
        let (highest_fence_seen, base) = (self.acquirer.base.highest_fence_seen(), self.acquirer.base.get());
        let reply = match self.queued {
            true => self.read_queues().await?,
            false => match self.try_or_enqueue(&lease, base).await {
                Ok((reply, Some(slot))) => {
                    _ = self.acquirer.recently_contended.remove(&request.key.names);
                    let fence = fence_at(base, reply.revision)?;
                    return self
                        .record_grant(&lease, slot.into(), &reply, fence, highest_fence_seen, None)
                        .await;
                }
                Ok((reply, None)) => reply,
                Err(failure) if failure.lease_is_gone() => {
                    self.acquirer.leases.check_leases(&lease).await?;
                    return Ok(AcquireStep::Retry);
                }
                Err(failure) => return Err(self.note_failure(failure)),
            },
        };
        let revision = reply.revision;
        let mut ranges = reply.txn.clone().into_ranges().into_iter();
        let found = ranges.next().and_then(|range| range.kvs.into_iter().next());
        let learned = self.acquirer.base.update(found.as_ref(), revision, highest_fence_seen).await;
        // The request is queued by now, whatever happens next.
        self.queued |= self.enqueues && learned.is_err();
        learned?;
        if base != self.acquirer.base.get() {
            return Ok(AcquireStep::Retry);
        }
        let (keys, mut queues) = (&self.acquirer.client.keys, Vec::new());
        for name in &request.key.names {
            let mut queue = QueueSnapshot::read(keys, name, ranges.next().unwrap_or_default());
            queue.add(keys, ranges.next().unwrap_or_default());
            if admission::reads_ends(request) {
                queue.add_oldest(keys, ranges.next().unwrap_or_default());
                queue.add_found(keys, ranges.next().unwrap_or_default());
            }
            queues.push(queue);
        }
        if !self.read_all && self.views(&queues).any(|view| !view.is_sufficient(request)) {
            self.read_all = true;
            self.queued |= queues.iter().all(|queue| queue.entry_of(&self.attempt).is_some());
            return Ok(AcquireStep::Retry);
        }
        // The next read of a long queue needs only a part of it again.
        self.read_all &= request.owner.is_some();
        self.decide(&lease, &reply, queues, highest_fence_seen).await
    }

    async fn decide(
        &mut self,
        lease: &Arc<EtcdLease>,
        reply: &TxnReply,
        queues: Vec<QueueSnapshot>,
        highest_fence_seen: u64,
    ) -> Result<AcquireStep> {
        let revision = reply.revision;
        let own: Vec<_> = queues.iter().filter_map(|queue| queue.entry_of(&self.attempt)).collect();
        if own.iter().any(|entry| entry.is(EntryState::Lingering) || entry.is(EntryState::Delayed)) {
            // A hold that this same attempt has released still lingers, or delays the lock.
            self.queued = false;
            return Ok(AcquireStep::Blocked { queues, revision });
        }
        let record_grant = own.iter().filter(|entry| entry.is(EntryState::Granted)).count();
        // A grant writes all of its keys with one key id.
        let apart = own.iter().any(|entry| entry.key_id != own[0].key_id);
        if record_grant == queues.len() && !apart {
            let fence = own[0].fence(self.acquirer.base.get());
            return self.resume_grant(lease, reply, &queues, fence).await;
        }
        if record_grant > 0 || apart || (!own.is_empty() && own.len() < queues.len()) {
            // Another client deleted a part of the grant: the rest of it is worthless.
            self.queued = false;
            self.end(SearchScope::WithSlots).await?;
            return Ok(AcquireStep::Retry);
        }
        let was_joined = std::mem::replace(&mut self.queued, !own.is_empty());
        self.created = queues
            .iter()
            .filter_map(|queue| queue.entry_of(&self.attempt))
            .map(|entry| entry.created)
            .max()
            .unwrap_or(0);
        if was_joined && !self.queued {
            // The queue entry is gone, with its lease or by an administrator. A request without an entry is granted
            // nothing.
            return Ok(AcquireStep::Retry);
        }
        let base = self.acquirer.base.get();
        let owner = self.request.owner.as_ref().map(hash_owner);
        let views: Vec<_> = self.views(&queues).collect();
        match evaluate_request(self.request, owner, &views, base, self.queued) {
            Ok(QueueVerdict::Grant(fence)) => {
                self.take_lock(lease, &queues, revision, fence, highest_fence_seen).await
            }
            Ok(QueueVerdict::Wait) => Ok(AcquireStep::Blocked { queues, revision }),
            Err(error) => {
                self.leave_queue().await?;
                Err(error)
            }
        }
    }

    /// The queues, as they were read for this request.
    pub fn views<'q>(&'q self, queues: &'q [QueueSnapshot]) -> impl Iterator<Item = RequestView<'q>> {
        queues.iter().map(|queue| RequestView { queue, attempt: &self.attempt })
    }

    /// Ends what this attempt has stored.
    pub async fn end(&self, scope: SearchScope) -> Result<ReleaseOutcome, Failure> {
        self.acquirer.releaser.end_attempt(&self.request.key.names, &self.attempt, scope).await
    }

    /// Gives the queue position up.
    async fn leave_queue(&mut self) -> Result<(), Failure> {
        if self.queued {
            self.end(SearchScope::OwnKey).await?;
            self.queued = false;
        }
        Ok(())
    }
}
