//! Break a lock: take it away from its holders, or ask them to release it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Fence, LockName, Result};
use zookeeper_client as zk;

use crate::client::ZooKeeperClient;
use crate::codec::EventTag;
use crate::codec::{HoldBackKind, HoldBackNode, RequestState};
use crate::error::Failure;
use crate::error::StepError;
use crate::event_log::EventLog;
use crate::fence_base::FenceBase;
use crate::fence_base::fence_at;
use crate::hold_back::HoldBacks;
use crate::queue::HolderNode;
use crate::queue::{QueueEntry, QueueSnapshot};
use crate::read_queue::QueueReader;
use crate::revoke::revoke_ops;
use crate::session::{MultiReply, Session};
use crate::statements::{ANY, TxnOp, create, delete, set};

/// How many operations one transaction has at most, and how many bytes. The operations for one holder are never split.
const MAX_OPS: usize = 200;
const MAX_BYTES: usize = 256 << 10;

/// How to end the holds of a lock.
#[derive(Clone, Copy)]
struct BreakRequest<'a> {
    /// [`EventTag::Broken`] or [`EventTag::Revoked`].
    tag: EventTag,
    reason: &'a str,
}

/// The operations for one holder. They are applied together or not at all.
#[derive(Default)]
struct HolderPlan {
    ops: Vec<TxnOp>,
    /// Hold-back nodes to delete later: the path, and the delay in milliseconds.
    later: Vec<(String, u64)>,
}

/// Breaks and revokes locks.
pub struct LockBreaker {
    pub client: Arc<ZooKeeperClient>,
    pub base: Arc<FenceBase>,
    pub events: Arc<EventLog>,
    pub hold_backs: Arc<HoldBacks>,
    pub queues: Arc<QueueReader>,
}

impl LockBreaker {
    /// Takes the lock away from all holders. The zxid of the transaction makes the returned fence.
    pub async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        self.apply_break(name, BreakRequest { tag: EventTag::Broken, reason }).await
    }

    /// Asks all holders to release the lock. A minimum hold of a released lock ends, and a lock-delay ends too.
    pub async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        self.apply_break(name, BreakRequest { tag: EventTag::Revoked, reason }).await
    }

    async fn apply_break(&self, name: &LockName, request: BreakRequest<'_>) -> Result<Fence> {
        loop {
            match self.try_apply_break(name, request).await {
                Ok(Some(fence)) => {
                    self.base.observe_fence(fence);
                    return Ok(fence);
                }
                Ok(None) | Err(StepError::Backend(Failure::SessionEnded)) => {}
                Err(StepError::Backend(failure)) => return Err(failure.into()),
                Err(StepError::Final(error)) => return Err(error),
            }
        }
    }

    /// `None`: the queue changed meanwhile.
    async fn try_apply_break(
        &self,
        name: &LockName,
        request: BreakRequest<'_>,
    ) -> Result<Option<Fence>, StepError> {
        let session = self.client.connection.session().await?;
        // After this write the server knows every holder that a majority has accepted.
        self.client.sync_by_write(&session).await?;
        let (highest_fence_seen, base) = (self.base.highest_fence_seen(), self.base.get());
        let mut queue = self.queues.list_queue(&session, name).await?;
        self.queues.read_entries(&session, &mut queue, |i, entry| i == 0 || entry.hash.is_some()).await?;
        self.hold_backs.read(&session, &mut queue).await?;
        let mut plans = self.plan_break(&session, &queue, request).await?;
        let mut last = take_batch(&mut plans);
        while !plans.is_empty() {
            let mut ops = vec![self.base.check(base)];
            ops.append(&mut last.ops);
            if self.write_or_retry(&session, ops).await?.is_none() {
                return Ok(None);
            }
            self.schedule_hold_back_removal(&mut last);
            last = take_batch(&mut plans);
        }
        let mut ops = vec![self.base.check(base), set(self.client.keys.bases(), Vec::new(), ANY)];
        ops.append(&mut last.ops);
        ops.extend(self.events.event_with_reason(name, request.tag, request.reason));
        let Some(done) = self.write_or_retry(&session, ops).await? else { return Ok(None) };
        self.schedule_hold_back_removal(&mut last);
        let Some(stat) = done.stat() else { return Ok(None) };
        let fence = fence_at(base.number, stat.mzxid)?;
        if fence.get() <= highest_fence_seen {
            self.base.refresh(&session, true).await?;
            return Ok(None);
        }
        Ok(Some(fence))
    }

    /// The operations, one plan for each holder. Each other name of a holder gets one event.
    async fn plan_break(
        &self,
        session: &Session,
        queue: &QueueSnapshot,
        request: BreakRequest<'_>,
    ) -> Result<Vec<HolderPlan>, StepError> {
        let (mut plans, mut reported) = (Vec::new(), HashSet::from([queue.name.clone()]));
        for hold_back in &queue.hold_backs {
            // Until the lease ends, a holder without a session may still use the lock.
            if request.tag == EventTag::Broken || !hold_back.is_lease() {
                plans.push(HolderPlan { ops: vec![delete(&hold_back.path, ANY)], later: Vec::new() });
            }
        }
        let mut queues = HashMap::new();
        for entry in queue.holders() {
            let nodes = self.nodes_of(session, queue, entry, &mut queues).await?;
            let mut plan = match request.tag {
                EventTag::Revoked => HolderPlan {
                    ops: revoke_ops(&nodes, self.base.get().number, request.reason)?,
                    later: Vec::new(),
                },
                _ => self.end_ops(&nodes),
            };
            if plan.ops.is_empty() {
                continue;
            }
            let others = nodes.iter().filter(|node| reported.insert(node.name.clone()));
            plan.ops.extend(
                others.filter_map(|node| {
                    self.events.event_with_reason(&node.name, request.tag, request.reason)
                }),
            );
            plans.push(plan);
        }
        Ok(plans)
    }

    async fn write_or_retry(
        &self,
        session: &Session,
        ops: Vec<TxnOp>,
    ) -> Result<Option<MultiReply>, Failure> {
        match self.client.write(session, &ops).await {
            Ok(done) => Ok(Some(done)),
            Err(Failure::Rejected(
                step,
                zk::Error::NoNode | zk::Error::BadVersion | zk::Error::NodeExists,
            )) => {
                if step < 2 {
                    self.base.refresh(session, false).await?;
                }
                self.events.ensure_events_node(session).await?;
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }

    fn schedule_hold_back_removal(&self, plan: &mut HolderPlan) {
        for (path, delay) in plan.later.drain(..) {
            self.hold_backs.remove_later(vec![path], Duration::from_millis(delay + 5));
        }
    }

    /// The operations that end a hold.
    fn end_ops(&self, nodes: &[HolderNode]) -> HolderPlan {
        let mut plan = HolderPlan::default();
        for HolderNode { name, entry, has_hold_back } in nodes {
            plan.ops.push(delete(&entry.path, ANY));
            let Some(hash) = entry.hash else { continue };
            let path = self.client.keys.hold_back(name, &hash);
            plan.ops.extend(has_hold_back.then(|| delete(&path, ANY)));
            if let Some(stored) = nodes[0].entry.stored().filter(|stored| stored.lock_delay_ms > 0) {
                let delay = stored.lock_delay_ms;
                plan.ops.push(create(&path, HoldBackNode::of(stored, HoldBackKind::Delayed, delay, None)));
                plan.later.push((path, delay));
            }
        }
        plan
    }

    /// The nodes of a holder, the one in `queue` first. A grant of several names has a node in each of their queues.
    /// `queues`: the other queues that were read already.
    async fn nodes_of(
        &self,
        session: &Session,
        queue: &QueueSnapshot,
        entry: &QueueEntry,
        queues: &mut HashMap<LockName, QueueSnapshot>,
    ) -> Result<Vec<HolderNode>, Failure> {
        let has_hold_back = entry.hash.is_some_and(|hash| queue.hold_back_hashes.contains(&hash));
        let mut nodes = vec![HolderNode { name: queue.name.clone(), entry: entry.clone(), has_hold_back }];
        let Some(stored) = entry.stored().filter(|stored| stored.state == RequestState::Granted) else {
            return Ok(nodes);
        };
        let mut names = stored.names.clone();
        if let Some(first) = &stored.first {
            let first = self.node_in(session, first, entry, queues).await?;
            names = first.and_then(|node| Some(node.entry.stored()?.names.clone())).unwrap_or_default();
        }
        for name in names.iter().filter(|name| **name != queue.name) {
            nodes.extend(self.node_in(session, name, entry, queues).await?);
        }
        Ok(nodes)
    }

    /// The node of the same attempt in the queue of another name.
    async fn node_in(
        &self,
        session: &Session,
        name: &LockName,
        holder: &QueueEntry,
        queues: &mut HashMap<LockName, QueueSnapshot>,
    ) -> Result<Option<HolderNode>, Failure> {
        if !queues.contains_key(name) {
            queues.insert(name.clone(), self.queues.list_queue(session, name).await?);
        }
        let Some(queue) = queues.get_mut(name) else { return Ok(None) };
        self.queues.read_entries(session, queue, |_, entry| entry.hash == holder.hash).await?;
        let Some(entry) = queue.entries.iter().find(|entry| entry.hash == holder.hash) else {
            return Ok(None);
        };
        let has_hold_back = entry.hash.is_some_and(|hash| queue.hold_back_hashes.contains(&hash));
        Ok(Some(HolderNode { name: name.clone(), entry: entry.clone(), has_hold_back }))
    }
}

/// Removes the plans that fit into one transaction from `plans`, at least one.
fn take_batch(plans: &mut Vec<HolderPlan>) -> HolderPlan {
    let (mut steps, mut bytes) = (0, 0);
    let fits = |plan: &&HolderPlan| {
        steps += plan.ops.len();
        bytes += plan.ops.iter().map(TxnOp::size).sum::<usize>();
        steps <= MAX_OPS && bytes <= MAX_BYTES
    };
    let count = plans.iter().take_while(fits).count().max(1).min(plans.len());
    let mut together = HolderPlan::default();
    for mut plan in plans.drain(..count) {
        together.ops.append(&mut plan.ops);
        together.later.append(&mut plan.later);
    }
    together
}
