//! What is asked by many tasks at once travels in one transaction: the first leaves at once, and those that come while it
//! is under way leave together. Each is a transaction of its own inside, with an answer of its own.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lockkeeper_core::Moment;
use prost::Message;
use tokio::sync::{mpsc, oneshot};

use crate::fault::Failure;
use crate::proto::{Response, TxnRequest, TxnResponse};
use crate::script::{nested, txn};
use crate::store::Shared;

/// How many transactions are under way at once: one that the cluster works on, and one on its way to it.
const FLIGHTS: usize = 2;
/// How many are in one of them, and how many bytes: etcd takes 128 operations and 1.5 MiB.
const BATCH: usize = 32;
const BYTES: usize = 512 << 10;

/// A transaction, and what it is about: two that have something in common are never under way together, so that those of
/// one name happen in the order in which they were handed in.
struct Order {
    txn: TxnRequest,
    about: Vec<Vec<u8>>,
    answer: oneshot::Sender<Result<Answer, Failure>>,
}

/// What became of a transaction.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Before it was sent, and hardly longer ago than that.
    pub sent_at: Moment,
    pub revision: i64,
    pub txn: TxnResponse,
}

/// Where transactions are handed in.
pub struct Lane(mpsc::UnboundedSender<Order>);

/// The other end of it.
pub struct Depot(mpsc::UnboundedReceiver<Order>);

pub fn lane() -> (Lane, Depot) {
    let (orders, depot) = mpsc::unbounded_channel();
    (Lane(orders), Depot(depot))
}

impl Lane {
    pub async fn send(&self, txn: TxnRequest, about: Vec<Vec<u8>>) -> Result<Answer, Failure> {
        let (answer, answered) = oneshot::channel();
        let closed = || Failure::Away("the store is closed".into());
        self.0.send(Order { txn, about, answer }).map_err(|_| closed())?;
        answered.await.unwrap_or_else(|_| Err(closed()))
    }
}

/// Sends what is handed in, for as long as the store is open.
pub async fn attend(shared: Arc<Shared>, Depot(mut orders): Depot) {
    let mut flights = FuturesUnordered::new();
    let mut waiting: VecDeque<Order> = VecDeque::new();
    let mut under_way: HashSet<Vec<u8>> = HashSet::new();
    let mut fresh = Vec::new();
    loop {
        while flights.len() < FLIGHTS {
            let batch = load(&mut waiting, &mut under_way);
            if batch.is_empty() {
                break;
            }
            flights.push(fly(&shared, batch));
        }
        tokio::select! {
            Some(about) = flights.next(), if !flights.is_empty() => {
                for one in about {
                    under_way.remove(&one);
                }
            }
            count = orders.recv_many(&mut fresh, BATCH) => {
                if count == 0 {
                    return;
                }
                waiting.extend(fresh.drain(..));
            }
        }
    }
}

/// Takes out what may leave now.
fn load(waiting: &mut VecDeque<Order>, under_way: &mut HashSet<Vec<u8>>) -> Vec<Order> {
    let (mut batch, mut bytes) = (Vec::new(), 0);
    let mut held_up: HashSet<Vec<u8>> = HashSet::new();
    let mut rest = VecDeque::new();
    while let Some(order) = waiting.pop_front() {
        if order.answer.is_closed() {
            // Whoever lost interest before it was sent has not asked.
            continue;
        }
        let size = order.txn.encoded_len();
        let full = batch.len() == BATCH || (bytes + size > BYTES && !batch.is_empty());
        let blocked = order.about.iter().any(|one| under_way.contains(one) || held_up.contains(one));
        if full || blocked {
            // Those behind it that are about the same stay behind it.
            held_up.extend(order.about.iter().cloned());
            rest.push_back(order);
            if full {
                break;
            }
            continue;
        }
        bytes += size;
        under_way.extend(order.about.iter().cloned());
        batch.push(order);
    }
    rest.append(waiting);
    *waiting = rest;
    batch
}

async fn fly(shared: &Shared, mut batch: Vec<Order>) -> Vec<Vec<u8>> {
    let about = batch.iter_mut().flat_map(|order| std::mem::take(&mut order.about)).collect();
    if batch.len() == 1 {
        alone(shared, batch.remove(0)).await;
        return about;
    }
    let sent_at = shared.clock.now();
    let together = batch.iter().map(|order| nested(order.txn.clone())).collect();
    match shared.link.txn(&txn(Vec::new(), together, Vec::new())).await {
        Ok(answer) => hand_out(sent_at, answer, batch),
        // Refused as a whole because of one of them, and nothing happened: each for itself, then.
        Err(Failure::Refused(..)) => {
            for order in batch {
                alone(shared, order).await;
            }
        }
        Err(failure) => batch.into_iter().for_each(|order| _ = order.answer.send(Err(failure.clone()))),
    }
    about
}

async fn alone(shared: &Shared, order: Order) {
    let sent_at = shared.clock.now();
    let answer = shared.link.txn(&order.txn).await;
    _ = order.answer.send(answer.map(|txn| Answer { sent_at, revision: txn.revision(), txn }));
}

fn hand_out(sent_at: Moment, answer: TxnResponse, batch: Vec<Order>) {
    let revision = answer.revision();
    let mut each = answer.responses.into_iter();
    for order in batch {
        let one = match each.next().and_then(|op| op.response) {
            Some(Response::Txn(txn)) => Ok(Answer { sent_at, revision, txn }),
            _ => Err(Failure::Unheard("etcd gave an answer that makes no sense".into())),
        };
        _ = order.answer.send(one);
    }
}
