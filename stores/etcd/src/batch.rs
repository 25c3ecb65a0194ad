//! Sends the transactions of many tasks in batches. The first transaction is sent at once; the ones that arrive while
//! it is in flight are sent together as one, and each task gets its own reply.
//!
//! A transaction that is expected to succeed (acquire a lock that seems free, release a hold) is *merged*: its
//! comparisons and operations become part of the batch, which is applied as a whole or not at all. If a batch is not
//! applied, all of its transactions are sent again *nested*, each as a transaction inside the batch. Other
//! transactions are always nested. Nesting costs etcd more.

use std::collections::{HashSet, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use lockkeeper_host::Clock;
use lockkeeper_store_kit::{BatchRule, run_batches};
use tokio::sync::{mpsc, oneshot};

use crate::connection::Connection;
use crate::error::Failure;
use crate::keys::Keys;
use crate::proto::{Compare, RequestOp, TxnRequest};
use crate::statements::txn;
use crate::txn_batch::{BatchForm, ConflictKey, QueuedTxn, TxnReply, distribute_replies, encode_batch};

/// The limits of one batch. etcd allows 128 operations and 1.5 MiB.
const MAX_OPERATIONS: usize = 100;
const MAX_BYTES: usize = 512 << 10;

/// Where tasks enqueue transactions.
pub struct BatchSender(mpsc::UnboundedSender<QueuedTxn>);

/// The receiving end, for [`BatchRunner::run`].
pub struct BatchReceiver(mpsc::UnboundedReceiver<QueuedTxn>);

pub fn channel() -> (BatchSender, BatchReceiver) {
    let (queue, receiver) = mpsc::unbounded_channel();
    (BatchSender(queue), BatchReceiver(receiver))
}

impl BatchSender {
    /// Enqueues a transaction now. The returned future has its reply.
    pub fn send(&self, txn: TxnRequest, conflicts: Vec<ConflictKey>) -> PendingTxn {
        self.enqueue(txn, None, false, conflicts)
    }

    /// Enqueues a transaction that is expected to succeed. `base`: only if the fence base still has this value.
    pub fn send_optimistic(
        &self,
        compare: Vec<Compare>,
        then: Vec<RequestOp>,
        base: Option<u64>,
        conflicts: Vec<ConflictKey>,
    ) -> PendingTxn {
        self.enqueue(txn(compare, then, Vec::new()), base, true, conflicts)
    }

    fn enqueue(
        &self,
        txn: TxnRequest,
        base: Option<u64>,
        optimistic: bool,
        conflicts: Vec<ConflictKey>,
    ) -> PendingTxn {
        let (reply, receiver) = oneshot::channel();
        // If the store is closed, the reply channel is closed too.
        _ = self.0.send(QueuedTxn::new(&txn, base, optimistic, conflicts, reply));
        PendingTxn(receiver)
    }
}

/// A transaction that was enqueued. If the task drops this before the transaction is sent, it is not sent.
#[must_use = "the reply is lost without it"]
pub struct PendingTxn(oneshot::Receiver<Result<TxnReply, Failure>>);

impl Future for PendingTxn {
    type Output = Result<TxnReply, Failure>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let reply = ready!(Pin::new(&mut self.0).poll(cx));
        Poll::Ready(reply.unwrap_or_else(|_| Err(Failure::NotSent("the store is closed".into()))))
    }
}

/// Sends the batches.
pub struct BatchRunner {
    pub keys: Keys,
    pub clock: Arc<dyn Clock>,
    pub connection: Arc<Connection>,
}

impl BatchRunner {
    /// Sends the enqueued transactions while the store is open.
    pub async fn run(self, BatchReceiver(queue): BatchReceiver) {
        run_batches(queue, DistinctKeys::default(), |batch| self.send_batch(batch)).await;
    }

    /// Returns the keys of the batch when it has all its replies.
    async fn send_batch(&self, mut batch: Vec<QueuedTxn>) -> Vec<ConflictKey> {
        let conflicts = batch.iter_mut().flat_map(|queued| std::mem::take(&mut queued.conflicts)).collect();
        if let Some(batch) = self.send_merged(batch).await {
            // Not applied, because the comparison of one of them failed.
            if let Some(batch) = self.send_nested(batch).await {
                // etcd rejected the whole batch: send each transaction alone.
                for queued in batch {
                    self.send_alone(queued).await;
                }
            }
        }
        conflicts
    }

    /// Merges the transactions that are expected to succeed. `Some`: the batch was not applied.
    async fn send_merged(&self, mut batch: Vec<QueuedTxn>) -> Option<Vec<QueuedTxn>> {
        if batch.len() == 1 {
            self.send_alone(batch.remove(0)).await;
            return None;
        }
        if batch.iter().all(|queued| !queued.optimistic) {
            return Some(batch);
        }
        let sent_at = self.clock.now();
        match self.connection.txn(encode_batch(&self.keys, &batch, BatchForm::Merged)).await {
            Ok(reply) if reply.succeeded => distribute_replies(sent_at, reply, batch, BatchForm::Merged),
            Ok(_) => return Some(batch),
            Err(failure @ Failure::Rejected(..)) => return keep_retryable(&failure, batch),
            Err(failure) => fail_all(&failure, batch),
        }
        None
    }

    /// Sends each as a transaction nested in one. `Some`: etcd rejected the batch and did not apply it.
    async fn send_nested(&self, batch: Vec<QueuedTxn>) -> Option<Vec<QueuedTxn>> {
        let sent_at = self.clock.now();
        match self.connection.txn(encode_batch(&self.keys, &batch, BatchForm::Nested)).await {
            Ok(reply) => distribute_replies(sent_at, reply, batch, BatchForm::Nested),
            Err(failure @ Failure::Rejected(..)) => return keep_retryable(&failure, batch),
            Err(failure) => fail_all(&failure, batch),
        }
        None
    }

    async fn send_alone(&self, queued: QueuedTxn) {
        let sent_at = self.clock.now();
        let reply = self.connection.txn(queued.encode_alone(&self.keys)).await;
        queued.complete(reply.map(|txn| TxnReply { sent_at, revision: txn.revision(), txn }));
    }
}

/// No two transactions about one key are in flight. A later one stays behind the earlier one.
#[derive(Default)]
struct DistinctKeys {
    busy: HashSet<ConflictKey>,
}

impl BatchRule for DistinctKeys {
    type Request = QueuedTxn;
    type Sent = Vec<ConflictKey>;

    fn next_batch(&mut self, waiting: &mut VecDeque<QueuedTxn>) -> Vec<QueuedTxn> {
        let (mut batch, mut bytes, mut operations) = (Vec::new(), 0, 0);
        let mut blocked_keys: HashSet<ConflictKey> = HashSet::new();
        let mut rest = VecDeque::new();
        while let Some(queued) = waiting.pop_front() {
            if queued.is_abandoned() {
                // The task dropped it before it was sent.
                continue;
            }
            let (size, batch_operations) = (queued.size(), queued.batch_operations);
            let full = !batch.is_empty()
                && (operations + batch_operations > MAX_OPERATIONS || bytes + size > MAX_BYTES);
            let blocked = queued
                .conflicts
                .iter()
                .any(|conflict| self.busy.contains(conflict) || blocked_keys.contains(conflict));
            if full || blocked {
                // Later transactions about the same keys stay behind this one.
                blocked_keys.extend(&queued.conflicts);
                rest.push_back(queued);
                if full {
                    break;
                }
                continue;
            }
            (bytes, operations) = (bytes + size, operations + batch_operations);
            self.busy.extend(&queued.conflicts);
            batch.push(queued);
        }
        rest.append(waiting);
        *waiting = rest;
        batch
    }

    fn finished(&mut self, conflicts: Vec<ConflictKey>) {
        for conflict in conflicts {
            self.busy.remove(&conflict);
        }
    }
}

/// Keeps the transactions that may be sent again after a rejection. If the database is full, a transaction with puts
/// may have been applied, so its outcome is unknown. The others need no space.
fn keep_retryable(failure: &Failure, batch: Vec<QueuedTxn>) -> Option<Vec<QueuedTxn>> {
    let unknown = |queued: &QueuedTxn| queued.has_puts && failure.may_be_applied();
    let (unknown, rest): (Vec<QueuedTxn>, Vec<QueuedTxn>) = batch.into_iter().partition(unknown);
    fail_all(failure, unknown);
    Some(rest).filter(|rest| !rest.is_empty())
}

fn fail_all(failure: &Failure, batch: Vec<QueuedTxn>) {
    batch.into_iter().for_each(|queued| queued.complete(Err(failure.clone())));
}
