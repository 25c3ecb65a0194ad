//! The transactions of an acquire: create the queue entry, write the grant, and register what was granted.

use std::sync::Arc;

use futures_util::future::join_all;
use lockkeeper_core::{BootInstant, Error, Fence, Grant, LockName};
use lockkeeper_store_kit::admission::{AdmissionEntry, revoked_error};
use zookeeper_client as zk;

use crate::acquire::{AcquireStep, EnqueueOutcome, PendingAcquire, RETRY_DELAY};
use crate::codec::{EventTag, RequestState, StoredRequest};
use crate::error::{Failure, StepError};
use crate::fence_base::fence_at;
use crate::hold_back::hold_back_for;
use crate::hold_registry::{SessionGrant, SessionHold};
use crate::queue::{QueueEntry, QueueSnapshot};
use crate::session::Session;
use crate::statements::{ANY, TxnOp, check, create, create_ephemeral, set};

fn unexpected_reply() -> Error {
    Error::Unknown("ZooKeeper sent an unexpected reply".into())
}

impl PendingAcquire<'_> {
    fn names(&self) -> &[LockName] {
        self.request.key.names.as_slice()
    }

    /// Whether the position in the queue alone decides about this request: then the first entry holds the lock without
    /// a second write. Watchers need an event and a minimum hold needs the time of the grant, so both need a second
    /// write.
    fn is_plain(&self) -> bool {
        let (request, watched) = (self.request, self.acquirer.events.is_watched());
        self.names().len() == 1 && request.owner.is_none() && request.min_hold.is_zero() && !watched
    }

    fn new_stored(&self, state: RequestState, fence: Option<Fence>) -> StoredRequest {
        StoredRequest::new(self.request, state, fence, self.acquirer.client.clock.wall())
    }

    /// The hold-back node of a grant, which outlives the session. A lock-delay needs one from the start. A long ttl
    /// does not: the first lease ends no later than the session, and the first renewal writes the node. Most holds end
    /// before that.
    fn new_hold_back(&self, session: &Session, stored: &StoredRequest) -> Option<Vec<u8>> {
        if self.request.lock_delay.is_zero() { None } else { hold_back_for(session, stored) }
    }

    /// Creates the request's nodes. The reply contains the number of children of the queue node, so a request that is
    /// alone needs no second read.
    pub async fn enqueue(&mut self, session: &Arc<Session>) -> Result<EnqueueOutcome, StepError> {
        let (acquirer, names, base) =
            (self.acquirer, self.request.key.names.as_slice(), self.acquirer.base.get());
        self.highest_fence_before = acquirer.base.highest_fence_seen();
        let plain = self.is_plain();
        let stored = self.new_stored(if plain { RequestState::Queued } else { RequestState::Waiting }, None);
        let barrier = acquirer.barriers.check(session).await?;
        let mut ops = vec![acquirer.base.check(base), barrier.clone()];
        for name in names {
            ops.push(create_ephemeral(
                acquirer.client.keys.entry_prefix(name, &self.hash, self.request.owner.is_some()),
                stored.under(name, names),
            ));
        }
        let node = if plain { self.new_hold_back(session, &stored) } else { None };
        if let Some(node) = &node {
            ops.push(create(acquirer.client.keys.hold_back(&names[0], &self.hash), node.clone()));
        }
        // Only a set operation returns the zxid of its transaction (ZOOKEEPER-4026).
        ops.push(set(acquirer.client.keys.queue(&names[0]), Vec::new(), ANY));
        // A name that is used for the first time needs its queue node first. Most queue nodes exist.
        let parents = names.iter().filter(|name| !acquirer.known_queues.has([*name]));
        let parents = join_all(parents.map(|name| async move {
            session
                .create_container(&acquirer.client.keys.queue(name), acquirer.client.connection.acls())
                .await
        }));
        let (parents, done) = tokio::join!(parents, acquirer.client.write_batched(session, ops, &[]));
        if let Err(Failure::NoReply(_)) = &done {
            // The transaction may have been applied.
            self.may_exist = true;
        }
        let done = match done {
            Ok(done) => done,
            Err(failure) => {
                _ = acquirer.known_queues.remove(names);
                self.repair(session, failure, &barrier, parents).await?;
                return Ok(EnqueueOutcome::Repaired);
            }
        };
        acquirer.known_queues.add(names);
        self.own_nodes = done.created().take(names.len()).map(str::to_owned).collect();
        (self.version, self.has_hold_back) = (0, node.is_some());
        let stat = done.stat().ok_or_else(unexpected_reply)?;
        // This transaction created every child of the queue node, so there is no other request and no hold-back node.
        let alone = plain && usize::try_from(stat.num_children) == Ok(done.created().count());
        Ok(if alone {
            EnqueueOutcome::Alone { sent_at: done.sent_at, zxid: stat.mzxid }
        } else {
            EnqueueOutcome::Queued
        })
    }

    /// Creates the node that was missing.
    async fn repair(
        &self,
        session: &Arc<Session>,
        failure: Failure,
        barrier: &TxnOp,
        parents: Vec<Result<(), Failure>>,
    ) -> Result<(), StepError> {
        match failure {
            Failure::Rejected(0, zk::Error::NoNode | zk::Error::BadVersion) => {
                Ok(self.acquirer.base.refresh(session, false).await?)
            }
            Failure::Rejected(1, zk::Error::NoNode) => {
                Ok(self.acquirer.barriers.replace_if_current(session, barrier).await?)
            }
            Failure::Rejected(_, zk::Error::NoNode) => {
                // The servers have just removed the empty queue node, or an administrator has deleted everything.
                let rejected =
                    parents.into_iter().filter_map(Result::err).find(|entry| !entry.is(&zk::Error::NoNode));
                if let Some(failure) = rejected {
                    return Err(failure.into());
                }
                self.acquirer.client.create_root(session).await?;
                self.acquirer.events.ensure_events_node(session).await?;
                Ok(self.acquirer.base.refresh(session, false).await?)
            }
            Failure::Rejected(_, zk::Error::NodeExists) => {
                // A hold-back node of the same attempt, left by a session that has ended.
                for name in self.names() {
                    session.delete(&self.acquirer.client.keys.hold_back(name, &self.hash)).await?;
                }
                Ok(())
            }
            failure => Err(failure.into()),
        }
    }

    /// Registers a request that was alone in its queue: the transaction that created its node granted it.
    pub async fn grant_if_alone(
        &mut self,
        session: &Arc<Session>,
        sent_at: BootInstant,
        zxid: i64,
    ) -> Result<AcquireStep, StepError> {
        let fence = fence_at(self.acquirer.base.get().number, zxid)?;
        let stored = self.new_stored(RequestState::Queued, None);
        self.register_grant(session, sent_at, fence, stored).await
    }

    /// Writes the grant: one transaction that fails if a node of the request is gone.
    pub async fn write_grant(
        &mut self,
        session: &Arc<Session>,
        queues: &[QueueSnapshot],
        fence: Option<Fence>,
    ) -> Result<AcquireStep, StepError> {
        let (acquirer, names, base) =
            (self.acquirer, self.request.key.names.as_slice(), self.acquirer.base.get());
        self.highest_fence_before = acquirer.base.highest_fence_seen();
        let stored = self.new_stored(RequestState::Granted, fence);
        let node = self.new_hold_back(session, &stored);
        let mut ops = vec![acquirer.base.check(base)];
        for (queue, own) in queues.iter().zip(&self.own_nodes) {
            if let Some(fence) = fence {
                // The hold that is re-entered must exist when the transaction is applied. Otherwise another request
                // may hold the lock by then.
                let outer =
                    queue.holders().find(|entry| entry.path != *own && entry.fence(base.number) == fence);
                let Some((path, read)) = outer.and_then(|entry| Some((&entry.path, entry.content.as_ref()?)))
                else {
                    return Ok(AcquireStep::Again);
                };
                ops.push(check(path, read.stat.version));
            }
            ops.push(set(own, stored.under(&queue.name, names), self.version));
            if let (Some(node), false) = (&node, self.has_hold_back) {
                ops.push(create(acquirer.client.keys.hold_back(&queue.name, &self.hash), node.clone()));
            }
            ops.extend(acquirer.events.event(&queue.name, EventTag::Granted, fence, Some(&stored.holder)));
        }
        let done = match acquirer.client.write_batched(session, ops, names).await {
            Ok(done) => done,
            Err(Failure::Rejected(0, zk::Error::NoNode | zk::Error::BadVersion)) => {
                acquirer.base.refresh(session, false).await?;
                return Ok(AcquireStep::Again);
            }
            Err(Failure::Rejected(_, zk::Error::NodeExists)) => {
                self.has_hold_back = true;
                self.delete_hold_backs().await?;
                return Ok(AcquireStep::Again);
            }
            Err(Failure::Rejected(_, zk::Error::NoNode | zk::Error::BadVersion)) => {
                self.read_version(session).await?;
                acquirer.events.ensure_events_node(session).await?;
                return Ok(AcquireStep::Again);
            }
            // The grant may have been written. Its node says so, so the next step begins by reading it.
            Err(failure @ Failure::NoReply(_)) => {
                self.own_nodes.clear();
                self.may_exist = true;
                return Err(failure.into());
            }
            Err(failure) => return Err(failure.into()),
        };
        self.version += 1;
        self.has_hold_back = node.is_some();
        let stat = done.stat().copied().ok_or_else(unexpected_reply)?;
        let fence_granted = match fence {
            Some(fence) => fence,
            None => fence_at(base.number, stat.mzxid)?,
        };
        self.register_grant(session, done.sent_at, fence_granted, stored).await
    }

    /// Reads the version of the request's node again. A plain request at the head of the queue looks like a holder, so
    /// a revocation may have rewritten its node. The request was not granted then, so its grant is newer than the
    /// revocation.
    async fn read_version(&mut self, session: &Session) -> Result<(), Failure> {
        if let [own] = &self.own_nodes[..]
            && let Some((_, stat)) = Failure::if_exists(session.get(own).await)?
        {
            self.version = stat.version;
        }
        Ok(())
    }

    /// Looks for the nodes of an earlier call with the same attempt, which was cancelled or got no reply. Nodes of
    /// another session do not count. `None`: the attempt has no queue entry.
    pub async fn resume_earlier(&mut self, session: &Arc<Session>) -> Result<Option<AcquireStep>, StepError> {
        if self.acquirer.registry.table().ending.contains(&self.hash) {
            // The lease ended before the caller tried again, and the registry is still removing its nodes.
            tokio::time::sleep(RETRY_DELAY).await;
            return Ok(Some(AcquireStep::Again));
        }
        self.acquirer.barriers.replace(session).await?;
        let sent_at = self.acquirer.client.clock.now();
        let found = self.acquirer.queues.find_own(session, &self.request.key.names, &self.hash).await?;
        let (alive, dead): (Vec<_>, Vec<_>) = found.entries.into_iter().partition(|entry| {
            entry.content.as_ref().is_some_and(|read| read.stat.ephemeral_owner == session.id)
        });
        let version = alive.first().and_then(|entry| Some(entry.content.as_ref()?.stat.version)).unwrap_or(0);
        let is_complete = alive.len() == self.names().len()
            && alive
                .iter()
                .all(|entry| entry.content.as_ref().is_some_and(|read| read.stat.version == version));
        if !is_complete || !dead.is_empty() {
            // An incomplete grant is no grant.
            self.acquirer.registry.table().holds.entry(self.hash).and_modify(|hold| hold.grant = None);
            self.acquirer.releaser.remove_attempt(&self.request.key.names, &self.hash).await?;
            return Ok(None);
        }
        if let Some(reason) = alive.iter().find_map(QueueEntry::revoked) {
            return Err(StepError::Final(revoked_error(reason)));
        }
        self.own_nodes = alive.iter().map(|entry| entry.path.clone()).collect();
        (self.version, self.has_hold_back, self.may_exist) = (version, found.has_hold_back, false);
        let known = self.acquirer.registry.table().holds.get(&self.hash).and_then(|hold| hold.grant.clone());
        let base = self.acquirer.base.get().number;
        let fence = match known {
            // Other nodes of the same attempt belong to another call.
            Some(known) if known.session.id == session.id && known.paths == self.own_nodes => known.fence,
            _ if alive[0].stored().is_some_and(|stored| stored.state == RequestState::Granted) => {
                alive[0].fence(base)
            }
            // A request that was not granted waits for its turn.
            _ => return Ok(None),
        };
        // The attempt holds the lock already. A write proves that the session is alive.
        let still: Vec<_> = self.own_nodes.iter().map(|path| check(path, version)).collect();
        match session.multi(&still).await {
            Ok(_) => {}
            Err(Failure::Rejected(..)) => return Ok(Some(AcquireStep::Again)),
            Err(failure) => return Err(failure.into()),
        }
        let stored =
            alive[0].stored().cloned().unwrap_or_else(|| self.new_stored(RequestState::Granted, None));
        self.resume(session, sent_at, fence, stored).map(Some)
    }

    /// Registers a grant of an earlier call. Its fence does not change.
    fn resume(
        &mut self,
        session: &Arc<Session>,
        sent_at: BootInstant,
        fence: Fence,
        stored: StoredRequest,
    ) -> Result<AcquireStep, StepError> {
        self.register_hold(session, sent_at, fence, stored);
        Ok(self.granted_step(session, sent_at, fence))
    }

    async fn register_grant(
        &mut self,
        session: &Arc<Session>,
        sent_at: BootInstant,
        fence: Fence,
        stored: StoredRequest,
    ) -> Result<AcquireStep, StepError> {
        let explicit = stored.fence.is_some();
        self.register_hold(session, sent_at, fence, stored);
        if !explicit && fence.get() <= self.highest_fence_before {
            // The ensemble was restored from an older state. Raise the fence base, and do not report this grant.
            self.acquirer.releaser.release_attempt(&self.request.key.names, self.hash).await?;
            self.acquirer.base.refresh(session, true).await?;
            self.forget_nodes();
            return Ok(AcquireStep::Again);
        }
        self.acquirer.base.observe_fence(fence);
        Ok(self.granted_step(session, sent_at, fence))
    }

    fn forget_nodes(&mut self) {
        self.own_nodes.clear();
        (self.version, self.has_hold_back) = (0, false);
    }

    fn register_hold(
        &self,
        session: &Arc<Session>,
        sent_at: BootInstant,
        fence: Fence,
        stored: StoredRequest,
    ) {
        let known = SessionGrant {
            session: session.clone(),
            paths: self.own_nodes.clone(),
            version: self.version,
            fence,
            stored,
            has_hold_back: self.has_hold_back,
            writing_hold_back: false,
        };
        let hold = SessionHold::granted(&self.request.key.names, self.request.ttl, sent_at, known);
        self.acquirer.registry.insert(self.hash, hold);
    }

    fn granted_step(&self, session: &Session, sent_at: BootInstant, fence: Fence) -> AcquireStep {
        let (key, mode, ttl) = (self.request.key.clone(), self.request.mode, self.request.ttl);
        let lease = if self.has_hold_back { ttl } else { ttl.min(session.trusted_for()) };
        AcquireStep::Granted(Grant { key, fence, mode, ttl, sent_at, lease })
    }

    /// Deletes the hold-back nodes of a request that waits: its death must not delay the next holder.
    pub async fn delete_hold_backs(&mut self) -> Result<(), Failure> {
        let Some(session) = self.session.clone().filter(|_| self.has_hold_back) else { return Ok(()) };
        for name in self.names() {
            session.delete(&self.acquirer.client.keys.hold_back(name, &self.hash)).await?;
        }
        self.has_hold_back = false;
        Ok(())
    }
}
