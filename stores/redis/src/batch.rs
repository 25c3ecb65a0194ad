//! Sends the requests of many tasks in one script. The first request is sent at once; requests that arrive while scripts are in
//! flight wait and are sent together. Every request has a reply of its own.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use redis::Value;
use tokio::sync::{mpsc, oneshot};

use crate::buckets::{take_call, take_one_by_one};
use crate::codec::release_flags;
use crate::error::Failure;
use crate::keys::KeyGroup;
use crate::router::OnSplitKeys;
use crate::runner::ScriptRunner;
use crate::slot_migration::SlotMigration;
use crate::statements::{ACQUIRE, RELEASE, RENEW, ScriptCall, millis};
use crate::unknown::UnknownOutcomes;

/// How many scripts of a group are in flight at once: one that the server runs, and one on its way to the server.
const MAX_IN_FLIGHT: usize = 2;
/// How many requests one script has: few enough not to block the server's other clients for long.
const MAX_BATCH: usize = 64;
/// The reply of the release script to a release whose keys it could not read.
const KEYS_ARE_SPLIT: Value = Value::Int(2);
/// The reply of the release script to the release of a hold that another version of Lockkeeper wrote.
const OTHER_FORMAT: Value = Value::Int(3);

/// The first number of the acquire script's reply to an attempt that has a confirmed hold already; its fence follows.
pub const HELD_BEFORE: i64 = 20;

/// The operation of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchKind {
    /// Acquires locks.
    Acquire,
    /// Releases locks.
    Release,
    /// Confirms waiters to which a lock was handed off.
    Confirm,
    /// Takes from the buckets of rate limits.
    Take,
}

/// One request: the lock keys and the arguments. The arguments of a lock request are the attempt, the time to live of its key, its
/// head and its terms; a release, a confirmation and a take have one argument each.
struct BatchItem {
    group: KeyGroup,
    keys: Vec<String>,
    args: Vec<Vec<u8>>,
    reply: oneshot::Sender<Result<Value, Failure>>,
    keep: KeepFlag,
}

impl BatchItem {
    /// The parts that are equal in all requests of one script: the group, and for lock requests the time to live and the head.
    fn kind(&self) -> (KeyGroup, &[Vec<u8>]) {
        (self.group, if self.args.len() > 1 { &self.args[1..3] } else { &[] })
    }
}

/// Whether the grant has a guard already, so that it is kept although no task waits for this reply.
pub type KeepFlag = Arc<AtomicBool>;

/// The requests of one group that are not sent yet, and how many scripts of the group are in flight.
#[derive(Default)]
struct GroupQueue {
    pending: VecDeque<BatchItem>,
    in_flight: usize,
}

/// Hands requests of one kind to the task that sends them.
#[derive(Clone)]
pub struct BatchSender(mpsc::UnboundedSender<BatchItem>);

/// The requests of one kind that were handed in.
pub struct BatchRequests(BatchKind, mpsc::UnboundedReceiver<BatchItem>);

pub fn channel(kind: BatchKind) -> (BatchSender, BatchRequests) {
    let (sender, items) = mpsc::unbounded_channel();
    (BatchSender(sender), BatchRequests(kind, items))
}

impl BatchSender {
    pub async fn send(
        &self,
        group: KeyGroup,
        keys: Vec<String>,
        args: Vec<Vec<u8>>,
        keep: KeepFlag,
    ) -> Result<Value, Failure> {
        let (reply, replied) = oneshot::channel();
        let closed = || Failure::NotSent("the store is closed".into());
        self.0.send(BatchItem { group, keys, args, reply, keep }).map_err(|_| closed())?;
        replied.await.unwrap_or_else(|_| Err(closed()))
    }
}

/// Sends requests in batches. Clones share the store's state.
#[derive(Clone)]
pub(crate) struct BatchWorker {
    pub runner: Arc<ScriptRunner>,
    pub unknown: Arc<UnknownOutcomes>,
}

impl BatchWorker {
    /// Sends the requests of one kind while the store is open. Each group has scripts in flight of its own, so a silent node
    /// delays its own groups only.
    pub async fn run(self, BatchRequests(kind, mut items): BatchRequests) {
        let mut scripts = FuturesUnordered::new();
        let mut queues: HashMap<KeyGroup, GroupQueue> = HashMap::new();
        let (mut received, mut touched) = (Vec::new(), Vec::new());
        loop {
            // With a single group the channel is the queue, and no sender wakes this task for a request that cannot be sent yet.
            let full = !self.runner.router.is_cluster() && scripts.len() >= MAX_IN_FLIGHT;
            tokio::select! {
                Some(group) = scripts.next(), if !scripts.is_empty() => {
                    queues.entry(group).or_default().in_flight -= 1;
                    touched.push(group);
                }
                count = items.recv_many(&mut received, MAX_BATCH), if !full => {
                    if count == 0 {
                        return;
                    }
                    for item in received.drain(..) {
                        touched.push(item.group);
                        queues.entry(item.group).or_default().pending.push_back(item);
                    }
                }
            }
            for group in touched.drain(..) {
                let queue = queues.entry(group).or_default();
                if queue.in_flight < MAX_IN_FLIGHT && !queue.pending.is_empty() {
                    let count = queue.pending.len().min(MAX_BATCH);
                    queue.in_flight += 1;
                    scripts.push(self.send_batches(kind, group, queue.pending.drain(..count).collect()));
                }
                if queue.in_flight == 0 {
                    queues.remove(&group);
                }
            }
        }
    }

    /// Sends one script for each set of requests that can share one.
    async fn send_batches(&self, kind: BatchKind, group: KeyGroup, mut items: Vec<BatchItem>) -> KeyGroup {
        // The request of a caller that was cancelled before is not sent.
        items.retain(|item| !item.reply.is_closed());
        items.sort_by(|a, b| a.kind().cmp(&b.kind()));
        let mut batches: Vec<Vec<BatchItem>> = Vec::new();
        for item in items {
            match batches.last_mut() {
                Some(batch) if batch[0].kind() == item.kind() => batch.push(item),
                _ => batches.push(vec![item]),
            }
        }
        join_all(batches.into_iter().map(|batch| self.send_batch(kind, batch))).await;
        group
    }

    async fn send_batch(&self, kind: BatchKind, batch: Vec<BatchItem>) {
        let (group, runner) = (batch[0].group, &*self.runner);
        let call = self.build_call(kind, group, &batch);
        let (reply, replicated) = match &runner.grant_router {
            Some(grants) if kind == BatchKind::Acquire => {
                match runner.run_replicated(grants, group, &call, OnSplitKeys::Retry).await {
                    Ok((reply, replicated)) => (Ok(reply), replicated),
                    Err(failure) => (Err(failure), Ok(())),
                }
            }
            _ if matches!(kind, BatchKind::Release | BatchKind::Take) => {
                (runner.run_or_report(group, &call).await, Ok(()))
            }
            _ => (runner.run(group, &call).await, Ok(())),
        };
        let mut replies = match reply {
            reply if kind == BatchKind::Release => {
                let releases = batch.iter().map(|item| (&item.keys[..], &item.args[0][..]));
                self.release_split_keys(group, &releases.collect::<Vec<_>>(), reply).await
            }
            Err(failure) if kind == BatchKind::Take && (failure.keys_are_split() || failure.is("NOPERM")) => {
                let takes = batch.iter().map(|item| (&item.keys[..], &item.args[0][..]));
                take_one_by_one(runner, group, &takes.collect::<Vec<_>>()).await
            }
            Ok(Value::Array(replies)) if replies.len() == batch.len() => {
                replies.into_iter().map(Ok).collect()
            }
            Ok(_) => vec![Err(Failure::unexpected_reply()); batch.len()],
            Err(failure) => vec![Err(failure); batch.len()],
        };
        if let Err(failure) = replicated {
            self.revert_unreplicated(group, &batch, &mut replies, failure).await;
        }
        self.deliver(kind, group, batch, replies);
    }

    /// Carries out, a key at a time, the releases whose keys are not all on the node that ran the script: all of the script, or some.
    async fn release_split_keys(
        &self,
        group: KeyGroup,
        releases: &[(&[String], &[u8])],
        reply: Result<Value, Failure>,
    ) -> Vec<Result<Value, Failure>> {
        let replies = match reply {
            Ok(Value::Array(replies)) if replies.len() == releases.len() => replies,
            Err(failure) if failure.keys_are_split() => vec![KEYS_ARE_SPLIT; releases.len()],
            Ok(_) => return vec![Err(Failure::unexpected_reply()); releases.len()],
            Err(failure) => return vec![Err(failure); releases.len()],
        };
        let migration = SlotMigration::new(&self.runner, group);
        let each = releases.iter().zip(replies).map(|(&(keys, release), reply)| async move {
            match reply {
                KEYS_ARE_SPLIT => migration.release(keys, release).await,
                OTHER_FORMAT => Err(Failure::other_format()),
                reply => Ok(reply),
            }
        });
        join_all(each).await
    }

    /// Hands each caller its reply. Releases the grants of callers that were cancelled meanwhile.
    fn deliver(
        &self,
        kind: BatchKind,
        group: KeyGroup,
        batch: Vec<BatchItem>,
        replies: Vec<Result<Value, Failure>>,
    ) {
        let mut abandoned = Vec::new();
        for (item, reply) in batch.into_iter().zip(replies) {
            let unknown = reply.as_ref().is_err_and(Failure::may_have_happened);
            let happened = reply.is_ok() || unknown;
            if unknown && kind == BatchKind::Acquire {
                self.unknown.record_attempt(&String::from_utf8_lossy(&item.args[0]));
            }
            let BatchItem { keys, args, reply: caller, keep, .. } = item;
            let cancelled = caller.send(reply).is_err() && kind == BatchKind::Acquire;
            if cancelled && happened && !keep.load(Ordering::SeqCst) {
                abandoned.push((keys, args));
            }
        }
        if !abandoned.is_empty() {
            self.runner.router.io().spawn(self.clone().release_abandoned(group, abandoned));
        }
    }

    /// Releases the grants and queue entries of callers that were cancelled before the reply. A cancelled caller has sent a release of
    /// its own; this one is for a reply that arrived after that.
    async fn release_abandoned(self, group: KeyGroup, abandoned: Vec<GrantedItem>) {
        let lives = abandoned.iter().filter_map(|(_, args)| String::from_utf8_lossy(&args[1]).parse().ok());
        let until = Instant::now() + Duration::from_millis(lives.max().unwrap_or(0));
        let mut pause = Duration::from_millis(10);
        while let Err(failure) = self.release_granted(group, &abandoned).await {
            if Instant::now() >= until {
                tracing::warn!(
                    ?failure,
                    "the grant of a cancelled caller could not be released; its ttl ends it"
                );
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }

    /// Releases grants that too few replicas have, before any caller learns of them. Replies without a grant stay unchanged. The
    /// hold of an attempt that is sent again stays too, because a caller may rely on it since the first time.
    async fn revert_unreplicated(
        &self,
        group: KeyGroup,
        batch: &[BatchItem],
        replies: &mut [Result<Value, Failure>],
        why: Failure,
    ) {
        for reply in replies.iter_mut().filter(|reply| reply.as_ref().is_ok_and(is_held_before)) {
            *reply = Err(Failure::NoReply(format!("the new lease may be lost in a fail-over: {why}")));
        }
        let granted = batch.iter().zip(replies.iter()).filter(|(_, reply)| is_new_grant(reply));
        let granted: Vec<GrantedItem> =
            granted.map(|(item, _)| (item.keys.clone(), item.args.clone())).collect();
        if granted.is_empty() {
            return;
        }
        let outcome = match (self.release_granted(group, &granted).await, why) {
            (Ok(()), Failure::NotSent(why)) => {
                Failure::NotSent(format!("{why}: the grant was released again"))
            }
            (Ok(()), why) => why,
            (Err(failure), why) => {
                Failure::NoReply(format!("{why}, and the grant could not be released again: {failure}"))
            }
        };
        for reply in replies.iter_mut().filter(|reply| is_new_grant(reply)) {
            *reply = Err(outcome.clone());
        }
    }

    fn build_call(&self, kind: BatchKind, group: KeyGroup, batch: &[BatchItem]) -> ScriptCall {
        let runner = &*self.runner;
        let keys = batch.iter().flat_map(|item| &item.keys);
        let keys = match kind {
            BatchKind::Take => keys.cloned().collect(),
            _ => runner.script_keys(group, keys),
        };
        let prefix = runner.keys.group_prefix(group);
        match kind {
            BatchKind::Acquire => {
                let call =
                    ScriptCall::new(&ACQUIRE, &keys).arg(runner.highest_fence_seen()).arg(&runner.client);
                let call = call.arg(prefix).arg(runner.claim_ms());
                let call = batch[0].kind().1.iter().fold(call, |call, part| call.arg(&part[..]));
                // Most requests have the same terms, so the script gets the terms of the first one once.
                let terms = &batch[0].args[3];
                batch.iter().fold(call.arg(&terms[..]), |call, BatchItem { args, .. }| {
                    match args[3] == *terms {
                        true => call.arg(&args[0][..]),
                        false => call.arg([&args[0][..], &args[3][..]].concat()),
                    }
                })
            }
            BatchKind::Confirm => {
                let call =
                    ScriptCall::new(&RENEW, &keys).arg(prefix).arg(runner.claim_ms()).arg(&runner.client);
                let each =
                    |call: ScriptCall, item: &BatchItem| call.arg(&item.args[0][..]).arg(item.keys.len());
                batch.iter().fold(call, each)
            }
            BatchKind::Take => take_call(&keys, batch.iter().map(|item| &item.args[0][..])),
            BatchKind::Release => self.release_call(group, &keys, batch.iter().map(|item| &item.args[0])),
        }
    }

    fn release_call<'r>(
        &self,
        group: KeyGroup,
        keys: &[String],
        releases: impl Iterator<Item = &'r Vec<u8>>,
    ) -> ScriptCall {
        let runner = &*self.runner;
        let call = ScriptCall::new(&RELEASE, keys).arg(&runner.client).arg(runner.keys.group_prefix(group));
        let call = call.arg(runner.claim_ms()).arg(millis(runner.tombstone_ttl()));
        releases.fold(call, |call, release| call.arg(&release[..]))
    }

    async fn release_granted(&self, group: KeyGroup, granted: &[GrantedItem]) -> Result<(), Failure> {
        let keys = self.runner.script_keys(group, granted.iter().flat_map(|(keys, _)| keys));
        let encode = |(keys, args): &GrantedItem| {
            let attempt = String::from_utf8_lossy(&args[0]).into_owned();
            self.unknown.encode_release(attempt, keys.len(), release_flags::UNREPORTED, 0)
        };
        let releases: Vec<Vec<u8>> = granted.iter().map(encode).collect();
        let call = self.release_call(group, &keys, releases.iter());
        let reply = self.runner.run_or_report(group, &call).await;
        let each = granted.iter().zip(&releases).map(|((keys, _), release)| (&keys[..], &release[..]));
        let replies = self.release_split_keys(group, &each.collect::<Vec<_>>(), reply).await;
        replies.into_iter().collect::<Result<Vec<_>, _>>().map(|_| ())
    }
}

/// The keys and the arguments of a lock request that was granted.
type GrantedItem = (Vec<String>, Vec<Vec<u8>>);

/// Whether a reply of the acquire script is a grant that the attempt did not have before.
fn is_new_grant(reply: &Result<Value, Failure>) -> bool {
    matches!(reply, Ok(Value::Int(_)))
}

/// Whether a reply of the acquire script is a confirmed hold that the attempt had before.
fn is_held_before(reply: &Value) -> bool {
    matches!(reply, Value::Array(parts) if parts.first() == Some(&Value::Int(HELD_BEFORE)))
}
