//! Release: give a grant back, leave a queue, and end a hold that was not renewed.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{BootInstant, Fence, Names, ReleaseOutcome, Result};
use lockkeeper_store_kit::AttemptHash;
use lockkeeper_store_kit::admission::AdmissionEntry;
use zookeeper_client as zk;

use crate::client::ZooKeeperClient;
use crate::codec::{EventTag, HoldBackKind, HoldBackNode, RequestState, millis};
use crate::error::Failure;
use crate::event_log::EventLog;
use crate::fence_base::FenceBase;
use crate::hold_back::HoldBacks;
use crate::hold_registry::{SessionGrant, SessionHold, ZooKeeperHolds};
use crate::queue::QueueEntry;
use crate::read_queue::QueueReader;
use crate::request_barrier::RequestBarriers;
use crate::session::Session;
use crate::statements::{ANY, TxnOp, create, delete};

/// Which task removes the nodes of an attempt.
#[derive(Clone, Copy, PartialEq)]
pub enum RemovedBy {
    Caller,
    /// The registry, for as long as the attempt is in its set `ending`.
    Registry,
}

/// Ends what an attempt has stored.
pub struct Releaser {
    pub client: Arc<ZooKeeperClient>,
    pub base: Arc<FenceBase>,
    pub registry: Arc<ZooKeeperHolds>,
    pub events: Arc<EventLog>,
    pub hold_backs: Arc<HoldBacks>,
    pub queues: Arc<QueueReader>,
    pub barriers: Arc<RequestBarriers>,
}

impl Releaser {
    /// Releases a grant, or removes a request from its queue.
    pub async fn release_attempt(&self, names: &Names, hash: AttemptHash) -> Result<ReleaseOutcome, Failure> {
        self.registry.table().ending.remove(&hash);
        let mut release = self.registry.begin_release(&*self.client.clock, hash, names);
        let done = match &release.hold {
            Some(SessionHold { grant: Some(known), since, .. }) if !known.session.is_over() => {
                self.release_grant(names, &hash, known, *since).await
            }
            // The call of `acquire` is still running, and knows which replies it has missed.
            Some(hold) if hold.caller.is_some() => self.remove_attempt(names, &hash).await,
            _ => self.remove_late_attempt(names, &hash, RemovedBy::Caller).await,
        };
        release.finish(done)
    }

    async fn release_grant(
        &self,
        names: &Names,
        hash: &AttemptHash,
        known: &SessionGrant,
        since: Option<BootInstant>,
    ) -> Result<ReleaseOutcome, Failure> {
        let session = self.client.connection.session().await?;
        let held = since.map_or(Duration::ZERO, |since| self.client.clock.now().since(since));
        let rest = Duration::from_millis(known.stored.min_hold_ms).saturating_sub(held);
        let hold_back = (!rest.is_zero()).then_some((HoldBackKind::Lingering, rest));
        match self.end_grant(&session, names, hash, known, hold_back, EventTag::Released).await {
            Ok(()) => Ok(ReleaseOutcome::Released),
            // The lock was broken, or another client deleted some of the nodes.
            Err(Failure::Rejected(..) | Failure::SessionEnded) => self.remove_attempt(names, hash).await,
            Err(failure) => Err(failure),
        }
    }

    /// Ends a hold that was not renewed in time.
    pub async fn expire(
        &self,
        hash: &AttemptHash,
        hold: &SessionHold,
        known: &SessionGrant,
    ) -> Result<(), Failure> {
        let session = self.client.connection.session().await?;
        if session.id == known.session.id {
            let delay = Duration::from_millis(known.stored.lock_delay_ms);
            let hold_back = (!delay.is_zero()).then_some((HoldBackKind::Delayed, delay));
            match self.end_grant(&session, &hold.names, hash, known, hold_back, EventTag::Expired).await {
                Ok(()) => return Ok(()),
                Err(Failure::Rejected(..) | Failure::SessionEnded) => {}
                Err(failure) => return Err(failure),
            }
        }
        // The session ended, or another client deleted the nodes, and the hold-back node remains for as long as
        // necessary; or the nodes still exist.
        self.remove_entries(&hold.names, hash, EventTag::Expired, RemovedBy::Registry).await.map(|_| ())
    }

    /// Ends a grant in one transaction: deletes its nodes, and creates a hold-back node if the lock is to be held
    /// back.
    async fn end_grant(
        &self,
        session: &Arc<Session>,
        names: &Names,
        hash: &AttemptHash,
        known: &SessionGrant,
        hold_back: Option<(HoldBackKind, Duration)>,
        tag: EventTag,
    ) -> Result<(), Failure> {
        loop {
            // The check of the base rejects a transaction without an event if a client has begun to watch.
            let base = self.base.get();
            let mut ops = vec![self.base.check(base)];
            let mut paths = Vec::new();
            for (name, own) in names.iter().zip(&known.paths) {
                let path = self.client.keys.hold_back(name, hash);
                ops.push(delete(own, known.version));
                if known.has_hold_back || known.writing_hold_back {
                    ops.push(delete(&path, ANY));
                }
                if let Some((kind, time)) = hold_back {
                    let node = HoldBackNode::of(&known.stored, kind, millis(time), Some(known.fence));
                    ops.push(create(&path, node));
                    paths.push(path);
                }
                ops.extend(self.events.event(name, tag, Some(known.fence), Some(&known.stored.holder)));
            }
            match self.client.write_batched(session, ops, &[]).await {
                Err(Failure::Rejected(0, zk::Error::NoNode | zk::Error::BadVersion))
                    if self.base.changed_since(session, base).await? => {}
                Ok(_) => {
                    if let Some((_, time)) = hold_back {
                        self.hold_backs.remove_later(paths, time + Duration::from_millis(5));
                    }
                    return Ok(());
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Finds and removes all nodes of an attempt, in one transaction.
    pub async fn remove_attempt(&self, names: &Names, hash: &AttemptHash) -> Result<ReleaseOutcome, Failure> {
        self.remove_entries(names, hash, EventTag::Released, RemovedBy::Caller).await
    }

    /// The same, as a release or as the unclean end of a grant.
    pub async fn remove_entries(
        &self,
        names: &Names,
        hash: &AttemptHash,
        tag: EventTag,
        by: RemovedBy,
    ) -> Result<ReleaseOutcome, Failure> {
        loop {
            let session = self.client.connection.session().await?;
            let own = match self.queues.find_own(&session, names, hash).await {
                Err(Failure::SessionEnded) => continue,
                own => own?,
            };
            if by == RemovedBy::Registry && !self.registry.table().ending.contains(hash) {
                // A release came meanwhile, and the nodes may be those of a later grant. No call enqueues while the
                // attempt is ending, so otherwise they are not.
                return Ok(ReleaseOutcome::AlreadyGone);
            }
            let hold_back = match tag {
                EventTag::Expired => self.lock_delay_after(&own.entries),
                _ => self.min_hold_rest(&own.entries),
            };
            let mut ops: Vec<TxnOp> = own.entries.iter().map(|entry| delete(&entry.path, ANY)).collect();
            for name in names.iter().filter(|_| own.has_hold_back || hold_back.is_some()) {
                let path = self.client.keys.hold_back(name, hash);
                let node = Failure::if_exists(session.get(&path).await)?;
                let stored_node =
                    node.as_ref().and_then(|(data, _)| serde_json::from_slice::<HoldBackNode>(data).ok());
                let ended_uncleanly = |node: &HoldBackNode| own.entries.is_empty() && node.lock_delay;
                if stored_node
                    .is_some_and(|node| node.kind == HoldBackKind::Lingering || ended_uncleanly(&node))
                {
                    // The lock was released already, or its hold ended uncleanly, and a late release does not change
                    // that.
                    continue;
                }
                ops.extend(node.map(|_| delete(&path, ANY)));
                ops.extend(hold_back.as_ref().map(|(node, _)| create(&path, node.clone())));
            }
            if ops.is_empty() {
                return Ok(ReleaseOutcome::AlreadyGone);
            }
            for (name, entry) in names.iter().zip(&own.entries) {
                if let Some(stored) = entry.stored().filter(|stored| stored.state == RequestState::Granted) {
                    let fence: Fence = entry.fence(self.base.get().number);
                    ops.extend(self.events.event(name, tag, Some(fence), Some(&stored.holder)));
                }
            }
            match self.client.write(&session, &ops).await {
                Ok(_) if own.entries.is_empty() => return Ok(ReleaseOutcome::AlreadyGone),
                Ok(_) => {
                    if let Some((_, time)) = hold_back {
                        let paths = names.iter().map(|name| self.client.keys.hold_back(name, hash)).collect();
                        self.hold_backs.remove_later(paths, time + Duration::from_millis(5));
                    }
                    return Ok(ReleaseOutcome::Released);
                }
                // A node or the session disappeared meanwhile: look again.
                Err(Failure::Rejected(_, zk::Error::NodeExists) | Failure::SessionEnded) => {}
                Err(Failure::Rejected(_, zk::Error::NoNode)) => {
                    self.events.ensure_events_node(&session).await?
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Removes an attempt whose request may still be on its way to a server.
    pub async fn remove_late_attempt(
        &self,
        names: &Names,
        hash: &AttemptHash,
        by: RemovedBy,
    ) -> Result<ReleaseOutcome, Failure> {
        match self.barriers.replace(&*self.client.connection.session().await?).await {
            // Servers reject requests of a session that has ended.
            Ok(()) | Err(Failure::SessionEnded) => {
                self.remove_entries(names, hash, EventTag::Released, by).await
            }
            Err(failure) => Err(failure),
        }
    }

    /// The hold-back node after an unclean end, and its duration.
    fn lock_delay_after(&self, entries: &[QueueEntry]) -> Option<(Vec<u8>, Duration)> {
        let entry = entries.first()?;
        let stored = entry.stored().filter(|stored| stored.lock_delay_ms > 0)?;
        let (ms, fence) = (stored.lock_delay_ms, entry.fence(self.base.get().number));
        Some((HoldBackNode::of(stored, HoldBackKind::Delayed, ms, Some(fence)), Duration::from_millis(ms)))
    }

    /// The hold-back node for the rest of a minimum hold, and its duration.
    fn min_hold_rest(&self, entries: &[QueueEntry]) -> Option<(Vec<u8>, Duration)> {
        let entry = entries.first()?;
        let stored = entry
            .stored()
            .filter(|stored| stored.state == RequestState::Granted && stored.min_hold_ms > 0)?;
        if stored.revoked.is_some() {
            // A revoked lock becomes free at its release.
            return None;
        }
        let since = entry.content.as_ref()?.stat.mtime.unsigned_abs();
        let left = (since + stored.min_hold_ms)
            .checked_sub(self.client.connection.known_ensemble_time()?)?
            .min(stored.min_hold_ms);
        let node = HoldBackNode::of(
            stored,
            HoldBackKind::Lingering,
            left,
            Some(entry.fence(self.base.get().number)),
        );
        (left > 0).then_some((node, Duration::from_millis(left)))
    }
}
