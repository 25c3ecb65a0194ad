//! Batches transactions: grants and releases of many tasks are sent in one transaction.
//!
//! The first transaction is sent at once. Transactions that arrive while it is in flight are sent together, so that
//! they share one request and one disk write of the servers. ZooKeeper applies a transaction completely or not at all:
//! if one member of a batch is rejected, nothing was applied, and each member is sent alone.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use futures_util::future::join_all;
use lockkeeper_core::LockName;
use lockkeeper_store_kit::{BatchRule, run_batches};
use tokio::sync::{mpsc, oneshot};

use crate::error::Failure;
use crate::session::{MultiReply, Session};
use crate::statements::TxnOp;

/// How many transactions one batch has at most, and how many bytes. ZooKeeper accepts a little less than 1 MiB in one
/// request (`jute.maxbuffer`).
const BATCH_TXNS: usize = 64;
const BATCH_BYTES: usize = 256 << 10;

/// The operations of one caller.
struct BatchedTxn {
    session: Arc<Session>,
    ops: Vec<TxnOp>,
    grants: Vec<LockName>,
    /// How many of its first operations are checks that the first member of the batch has too.
    shared_checks: usize,
    reply_to: oneshot::Sender<Result<MultiReply, Failure>>,
}

/// Where tasks submit their transactions.
pub struct BatchSender(mpsc::UnboundedSender<BatchedTxn>);

/// The receiving end of [`BatchSender`].
pub struct BatchQueue(mpsc::UnboundedReceiver<BatchedTxn>);

pub fn channel() -> (BatchSender, BatchQueue) {
    let (incoming, receiver) = mpsc::unbounded_channel();
    (BatchSender(incoming), BatchQueue(receiver))
}

impl BatchSender {
    /// Applies all of these operations or none. `grants`: the names that the transaction grants with a new fence. Two
    /// grants of one name are never sent in one batch, because all members of a batch have the same zxid.
    pub async fn send(
        &self,
        session: &Arc<Session>,
        ops: Vec<TxnOp>,
        grants: &[LockName],
    ) -> Result<MultiReply, Failure> {
        let (reply_to, reply) = oneshot::channel();
        let closed = || Failure::NotSent("the store is closed".into());
        let txn =
            BatchedTxn { session: session.clone(), ops, grants: grants.to_vec(), shared_checks: 0, reply_to };
        self.0.send(txn).map_err(|_| closed())?;
        reply.await.unwrap_or_else(|_| Err(closed()))
    }
}

/// Sends submitted transactions for as long as the store is open.
pub async fn run(BatchQueue(incoming): BatchQueue) {
    run_batches(incoming, DistinctGrants, send_batch).await;
}

/// A batch belongs to one session, and grants each name once.
struct DistinctGrants;

impl BatchRule for DistinctGrants {
    type Request = BatchedTxn;
    type Sent = ();

    fn next_batch(&mut self, waiting: &mut VecDeque<BatchedTxn>) -> Vec<BatchedTxn> {
        let (mut batch, mut later) = (Vec::<BatchedTxn>::new(), VecDeque::new());
        let (mut bytes, mut granted) = (0, HashSet::new());
        while let Some(mut txn) = waiting.pop_front() {
            if txn.reply_to.is_closed() {
                // The caller dropped its future before anything was sent.
                continue;
            }
            let size: usize = txn.ops.iter().map(TxnOp::size).sum();
            if batch.len() == BATCH_TXNS || (bytes + size > BATCH_BYTES && !batch.is_empty()) {
                waiting.push_front(txn);
                break;
            }
            let other = batch.first().is_some_and(|first| !Arc::ptr_eq(&first.session, &txn.session));
            if other || txn.grants.iter().any(|name| granted.contains(name)) {
                later.push_back(txn);
                continue;
            }
            txn.shared_checks = batch.first().map_or(0, |first| common_checks(first, &txn));
            bytes += size;
            granted.extend(txn.grants.iter().cloned());
            batch.push(txn);
        }
        later.append(waiting);
        *waiting = later;
        batch
    }
}

/// How many of the first operations are the same checks (of the fence base and the request barrier). No member of a
/// batch writes those nodes, so one check is enough.
fn common_checks(first: &BatchedTxn, txn: &BatchedTxn) -> usize {
    first.ops.iter().zip(&txn.ops).take_while(|(one, other)| one.is_same_check(other)).count()
}

async fn send_batch(batch: Vec<BatchedTxn>) {
    let session = batch[0].session.clone();
    if !session.is_connected() {
        // The client library cannot cancel a request that it has queued without a connection. Nothing was sent.
        let not_sent = Failure::NotSent("the connection to ZooKeeper is lost".into());
        return batch.into_iter().for_each(|txn| _ = txn.reply_to.send(Err(not_sent.clone())));
    }
    match session.multi(batch.iter().flat_map(|txn| &txn.ops[txn.shared_checks..])).await {
        Ok(done) => distribute_replies(done, batch),
        Err(Failure::Rejected(..)) if batch.len() > 1 => {
            _ = join_all(batch.into_iter().map(send_alone)).await
        }
        Err(failure) => batch.into_iter().for_each(|txn| _ = txn.reply_to.send(Err(failure.clone()))),
    }
}

async fn send_alone(txn: BatchedTxn) {
    let done = txn.session.multi(&txn.ops).await;
    _ = txn.reply_to.send(done);
}

fn distribute_replies(done: MultiReply, batch: Vec<BatchedTxn>) {
    let mut answers = done.answers.into_iter();
    for txn in batch {
        let own = answers.by_ref().take(txn.ops.len() - txn.shared_checks).collect();
        _ = txn.reply_to.send(Ok(MultiReply { sent_at: done.sent_at, answers: own }));
    }
}
