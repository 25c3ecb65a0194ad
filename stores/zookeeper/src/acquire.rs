//! Acquire: enqueue a request, and wait for its turn.
//!
//! The transaction that creates a request's node also returns the number of nodes in the queue. If there is no other
//! node, the request is granted by that transaction alone. Otherwise the request waits in the queue, and the grant is
//! a second write.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{AcquireOutcome, BootInstant, Busy, Error, Grant, LockName, LockRequest, Result};
use lockkeeper_host::sleep_until;
use lockkeeper_store_kit::admission::{QueueVerdict, evaluate_request};
use lockkeeper_store_kit::{AttemptHash, CancelSignal, RecentSet, hash_attempt, hash_owner};

use crate::admission;
use crate::client::ZooKeeperClient;
use crate::codec::EventTag;
use crate::error::{Failure, StepError};
use crate::event_log::EventLog;
use crate::fence_base::FenceBase;
use crate::hold_registry::ZooKeeperHolds;
use crate::queue::QueueSnapshot;
use crate::read_queue::QueueReader;
use crate::release::Releaser;
use crate::request_barrier::RequestBarriers;
use crate::session::Session;

/// How long a waiting request sleeps after a failure before it reads the queue again.
pub const RETRY_DELAY: Duration = Duration::from_millis(100);

/// The lowest number of retries of a request that finds a change after every read. A request without a wait time has
/// no other limit.
const MIN_RETRIES: u32 = 8;

/// Acquires locks.
pub struct Acquirer {
    pub client: Arc<ZooKeeperClient>,
    pub base: Arc<FenceBase>,
    pub registry: Arc<ZooKeeperHolds>,
    pub events: Arc<EventLog>,
    pub queues: Arc<QueueReader>,
    pub barriers: Arc<RequestBarriers>,
    pub releaser: Arc<Releaser>,
    /// The names whose queue nodes existed at their last use.
    pub known_queues: RecentSet<LockName>,
    /// How often a waiter reads the queue without a notification.
    pub poll: Duration,
    /// How long one request may take.
    pub timeout: Duration,
}

/// One call of `acquire`, from its first request to its outcome.
pub struct PendingAcquire<'a> {
    pub acquirer: &'a Acquirer,
    pub request: &'a LockRequest,
    pub hash: AttemptHash,
    /// The session that owns its nodes.
    pub session: Option<Arc<Session>>,
    /// The paths of its nodes, one for each name. Empty: the request is not in the queue.
    pub own_nodes: Vec<String>,
    /// The data version of its nodes after the last write.
    pub version: i32,
    /// Its hold-back nodes exist.
    pub has_hold_back: bool,
    /// Nodes of an earlier call with the same attempt may exist.
    pub may_exist: bool,
    /// The request was found blocked at least once, and waits.
    pub is_waiting: bool,
    /// The highest fence that this process had seen before it sent the last write.
    pub highest_fence_before: u64,
}

/// The result of one read of the queues.
pub enum AcquireStep {
    Granted(Grant),
    Blocked(Vec<QueueSnapshot>),
    /// The queues changed meanwhile: read them again.
    Again,
}

impl Acquirer {
    pub async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        let hash = hash_attempt(&request.key.attempt);
        let mut call = self.registry.begin(&*self.client.clock, hash, &request.key.names, request.ttl);
        let mut pending = PendingAcquire {
            acquirer: self,
            request,
            hash,
            session: None,
            own_nodes: Vec::new(),
            version: 0,
            has_hold_back: false,
            may_exist: call.known_expiry.is_some(),
            is_waiting: false,
            highest_fence_before: 0,
        };
        let answer = pending.run(&call.caller).await;
        let granted = matches!(answer, Ok(AcquireOutcome::Granted(_)));
        if granted && (call.caller.is_cancelled() || !self.registry.has_grant(&hash)) {
            // Another call has released this request before this one had the reply. It may have looked for nodes before
            // the grant was written: so whatever exists is removed, once more.
            self.registry.table().holds.remove(&hash);
            return Err(Error::Unavailable("a release has cancelled the request".into()));
        }
        if matches!(answer, Err(Error::Lost(_))) {
            // The grant was revoked. The attempt keeps its hold until the earlier lease ends: this call does not extend it.
            call.restore_expiry();
        }
        // Nodes of an earlier call may exist, also when this call could not send anything.
        let may_have = pending.may_exist || !pending.own_nodes.is_empty();
        let open = may_have || matches!(answer, Ok(AcquireOutcome::Granted(_)) | Err(Error::Unknown(_)));
        call.left_nothing = !open;
        match answer {
            // This call enqueued the request, and no reply says that its nodes are gone: the outcome is unknown.
            Err(Error::Unavailable(why)) if may_have && pending.session.is_some() => Err(Error::Unknown(why)),
            answer => answer,
        }
    }
}

impl PendingAcquire<'_> {
    async fn run(&mut self, caller: &CancelSignal) -> Result<AcquireOutcome> {
        let clock = &self.acquirer.client.clock;
        let deadline = self.request.wait.deadline(clock.now());
        let (mut since_failure, mut retries) = (None, 0);
        loop {
            if caller.is_cancelled() {
                if !self.own_nodes.is_empty() {
                    caller.note_left_queue();
                }
                self.leave_queue().await?;
                return Err(Error::Unavailable("a release has cancelled the request".into()));
            }
            let mut queues = match self.step().await {
                Ok(AcquireStep::Granted(grant)) => return Ok(AcquireOutcome::Granted(grant)),
                Ok(AcquireStep::Again) => {
                    retries += 1;
                    if retries < MIN_RETRIES || clock.now() < deadline + self.acquirer.timeout {
                        continue;
                    }
                    // The wait time is over, and every read found a change.
                    self.leave_queue().await?;
                    let name = self.request.key.names.first().clone();
                    return Ok(AcquireOutcome::Busy(Busy { name, held: Vec::new(), waiting: 0 }));
                }
                Ok(AcquireStep::Blocked(queues)) => queues,
                // A waiting request keeps its queue entry while the servers are unreachable for a while.
                Err(Error::Unknown(_) | Error::Unavailable(_))
                    if !self.own_nodes.is_empty()
                        && clock.now() < deadline
                        && clock.now() < *since_failure.get_or_insert(clock.now()) + self.request.ttl =>
                {
                    tokio::select! {
                        () = tokio::time::sleep(RETRY_DELAY) => {}
                        () = caller.cancelled() => {}
                    }
                    continue;
                }
                Err(error) => return Err(error),
            };
            (since_failure, retries) = (None, 0);
            if clock.now() >= deadline {
                return self.give_up(&mut queues).await;
            }
            if !self.is_waiting {
                if self.delete_hold_backs().await.is_err() {
                    // The next read of the queue reports the cause.
                    tokio::time::sleep(RETRY_DELAY).await;
                    continue;
                }
                self.is_waiting = true;
                self.acquirer
                    .events
                    .emit_event(&self.request.key.names, EventTag::Waiting, &self.request.holder)
                    .await;
            }
            tokio::select! {
                () = self.wait_for_change(&queues) => {}
                () = tokio::time::sleep(self.acquirer.poll) => {}
                () = sleep_until(&**clock, deadline) => {}
                () = caller.cancelled() => {}
            }
        }
    }

    async fn give_up(&mut self, queues: &mut [QueueSnapshot]) -> Result<AcquireOutcome> {
        if let Some(session) = self.session.clone() {
            for queue in queues.iter_mut() {
                self.acquirer.queues.read_first_entries(&session, queue).await?;
            }
        }
        let busy = admission::busy(&self.own_nodes, queues, self.acquirer.base.get().number);
        self.leave_queue().await?;
        Ok(AcquireOutcome::Busy(busy))
    }

    /// Enqueues the request or reads its queues, and writes the grant if the lock is free.
    async fn step(&mut self) -> Result<AcquireStep> {
        match self.try_step().await {
            // The servers delete the nodes of the old session. Enqueue again in the next session.
            Err(StepError::Backend(Failure::SessionEnded)) => {
                self.forget_session_nodes();
                Ok(AcquireStep::Again)
            }
            Err(StepError::Backend(failure)) => Err(failure.into()),
            Err(StepError::Final(error)) => Err(error),
            Ok(step) => Ok(step),
        }
    }

    /// Forgets the nodes of a session that has ended. They may still exist until the servers delete them.
    fn forget_session_nodes(&mut self) {
        self.own_nodes.clear();
        (self.version, self.has_hold_back, self.may_exist) = (0, false, true);
    }

    async fn try_step(&mut self) -> Result<AcquireStep, StepError> {
        let session = self.acquirer.client.connection.session().await?;
        if self.session.as_ref().is_some_and(|old| old.id != session.id) && !self.own_nodes.is_empty() {
            self.forget_session_nodes();
        }
        self.session = Some(session.clone());
        if self.own_nodes.is_empty() && self.may_exist {
            if let Some(step) = self.resume_earlier(&session).await? {
                return Ok(step);
            }
            self.may_exist = false;
        }
        if self.own_nodes.is_empty() {
            match self.enqueue(&session).await? {
                EnqueueOutcome::Alone { sent_at, zxid } => {
                    return self.grant_if_alone(&session, sent_at, zxid).await;
                }
                EnqueueOutcome::Queued => {}
                EnqueueOutcome::Repaired => return Ok(AcquireStep::Again),
            }
        }
        let queues = self.acquirer.queues.list_queues(&session, self.request.key.names.as_slice()).await?;
        self.evaluate(&session, queues).await
    }

    async fn evaluate(
        &mut self,
        session: &Arc<Session>,
        mut queues: Vec<QueueSnapshot>,
    ) -> Result<AcquireStep, StepError> {
        let again = |(queue, own): (&QueueSnapshot, &String)| {
            queue.entries.iter().any(|entry| entry.hash == Some(self.hash) && entry.path != *own)
        };
        if queues.iter().zip(&self.own_nodes).any(again) {
            // An earlier request of this attempt, for which no reply came, was applied after all. This request would
            // wait for itself.
            self.leave_queue().await?;
            return Ok(AcquireStep::Again);
        }
        let here =
            queues.iter().zip(&self.own_nodes).filter(|(queue, own)| queue.position(own).is_some()).count();
        if here < queues.len() {
            // Another client deleted some or all of the nodes. A request without all of its nodes cannot be granted,
            // so the rest is removed.
            self.leave_queue().await?;
            return Ok(AcquireStep::Again);
        }
        for (queue, own) in queues.iter_mut().zip(&self.own_nodes) {
            queue.orphans.retain(|(_, hash)| *hash != self.hash);
            let listed = queue.entries.len();
            self.acquirer.queues.read_for_request(session, self.request, queue, own).await?;
            if queue.entries.len() < listed {
                // An entry was deleted after the list was read, and the list does not contain the hold-back node that
                // it may have left.
                return Ok(AcquireStep::Again);
            }
        }
        let base = self.acquirer.base.get().number;
        let owner = self.request.owner.as_ref().map(hash_owner);
        let views = admission::views(&queues, &self.own_nodes);
        match evaluate_request(self.request, owner, &views, base, self.is_waiting) {
            Ok(QueueVerdict::Grant(fence)) => self.write_grant(session, &queues, fence).await,
            Ok(QueueVerdict::Wait) => Ok(AcquireStep::Blocked(queues)),
            Err(error) => {
                self.leave_queue().await?;
                Err(StepError::Final(error))
            }
        }
    }

    /// Removes the request from its queues.
    pub async fn leave_queue(&mut self) -> Result<(), Failure> {
        if !self.own_nodes.is_empty() {
            self.acquirer.releaser.remove_attempt(&self.request.key.names, &self.hash).await?;
            if self.is_waiting {
                self.acquirer
                    .events
                    .emit_event(&self.request.key.names, EventTag::Left, &self.request.holder)
                    .await;
            }
            self.own_nodes.clear();
            self.has_hold_back = false;
        }
        Ok(())
    }
}

/// The result of creating the request's nodes.
pub enum EnqueueOutcome {
    /// The queue has no other node: when the transaction was sent, and its zxid.
    Alone { sent_at: BootInstant, zxid: i64 },
    /// Other requests may come first.
    Queued,
    /// A node that the transaction needs was missing, and exists now.
    Repaired,
}
