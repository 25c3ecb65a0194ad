//! What many tasks write at once travels in one transaction: the first leaves at once, and those that come while it is under
//! way leave together. What a request costs the servers, and the wait for their disks, is shared that way.
//!
//! A transaction happens as a whole or not at all. If one of those in it cannot happen, nothing did, and each is sent for
//! itself.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use lockkeeper_core::LockName;
use lockkeeper_host::Gather;
use tokio::sync::{mpsc, oneshot};

use crate::fault::Failure;
use crate::link::{Done, Session};
use crate::script::Op;

/// How many transactions are under way at once: one that the servers work on, and one on its way to them.
const FLIGHTS: usize = 2;
/// How many are in one of them, and how many bytes: ZooKeeper takes a little less than one MiB in one request.
const BATCH: usize = 64;
const BYTES: usize = 256 << 10;

/// Steps that belong together.
struct Order {
    session: Arc<Session>,
    ops: Vec<Op>,
    grants: Vec<LockName>,
    /// How many of its first steps those that it travels with say as well.
    said: usize,
    answer: oneshot::Sender<Result<Done, Failure>>,
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
    /// All of these steps, or none. `grants`: the names that it grants with a fence of its own. Two grants of one name never
    /// travel together, because what travels together has one zxid.
    pub async fn send(
        &self,
        session: &Arc<Session>,
        ops: Vec<Op>,
        grants: &[LockName],
    ) -> Result<Done, Failure> {
        let (answer, answered) = oneshot::channel();
        let closed = || Failure::Away("the store is closed".into());
        let order = Order { session: session.clone(), ops, grants: grants.to_vec(), said: 0, answer };
        self.0.send(order).map_err(|_| closed())?;
        answered.await.unwrap_or_else(|_| Err(closed()))
    }
}

/// Sends what is handed in, for as long as the store is open.
pub async fn attend(Depot(mut orders): Depot) {
    let mut flights = FuturesUnordered::new();
    let mut waiting: VecDeque<Order> = VecDeque::new();
    let mut in_the_air = 0;
    let mut fresh = Vec::new();
    let mut gather = Gather::default();
    loop {
        if flights.is_empty() && !waiting.is_empty() {
            gather.wait(&mut orders, &mut waiting).await;
        }
        // A second leaves only if it is no smaller than the first: so those that are answered together ask together again,
        // instead of one by one, and nobody waits for longer than one of them takes.
        while flights.len() < FLIGHTS && waiting.len() >= in_the_air {
            let batch = load(&mut waiting);
            if batch.is_empty() {
                break;
            }
            in_the_air += batch.len();
            flights.push(timed(batch));
        }
        tokio::select! {
            Some((count, took)) = flights.next(), if !flights.is_empty() => {
                in_the_air -= count;
                gather = Gather::after(count + waiting.len(), took);
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

/// Takes out what may leave together.
fn load(waiting: &mut VecDeque<Order>) -> Vec<Order> {
    let (mut batch, mut later) = (Vec::<Order>::new(), VecDeque::new());
    let (mut bytes, mut granted) = (0, HashSet::new());
    while let Some(mut order) = waiting.pop_front() {
        if order.answer.is_closed() {
            // Whoever lost interest before it was sent has not asked.
            continue;
        }
        let size: usize = order.ops.iter().map(Op::size).sum();
        if batch.len() == BATCH || (bytes + size > BYTES && !batch.is_empty()) {
            waiting.push_front(order);
            break;
        }
        let other = batch.first().is_some_and(|first| !Arc::ptr_eq(&first.session, &order.session));
        if other || order.grants.iter().any(|name| granted.contains(name)) {
            later.push_back(order);
            continue;
        }
        order.said = batch.first().map_or(0, |first| in_common(first, &order));
        bytes += size;
        granted.extend(order.grants.iter().cloned());
        batch.push(order);
    }
    later.append(waiting);
    *waiting = later;
    batch
}

/// The checks of the base and of the gate, if they are the same. Nothing that travels here writes these, so once is enough.
fn in_common(first: &Order, order: &Order) -> usize {
    first.ops.iter().zip(&order.ops).take_while(|(one, other)| one.is_same_check(other)).count()
}

/// How many they were, and how long it took.
async fn timed(batch: Vec<Order>) -> (usize, Duration) {
    let (count, left_at) = (batch.len(), Instant::now());
    fly(batch).await;
    (count, left_at.elapsed())
}

async fn fly(batch: Vec<Order>) {
    let session = batch[0].session.clone();
    if !session.is_connected() {
        // What is handed over without a connection cannot be taken back. Nothing was sent.
        let away = Failure::Away("the connection to ZooKeeper is gone".into());
        return batch.into_iter().for_each(|order| _ = order.answer.send(Err(away.clone())));
    }
    match session.multi(batch.iter().flat_map(|order| &order.ops[order.said..])).await {
        Ok(done) => hand_out(done, batch),
        Err(Failure::Refused(..)) if batch.len() > 1 => _ = join_all(batch.into_iter().map(alone)).await,
        Err(failure) => batch.into_iter().for_each(|order| _ = order.answer.send(Err(failure.clone()))),
    }
}

async fn alone(order: Order) {
    let done = order.session.multi(&order.ops).await;
    _ = order.answer.send(done);
}

fn hand_out(done: Done, batch: Vec<Order>) {
    let mut answers = done.answers.into_iter();
    for order in batch {
        let own = answers.by_ref().take(order.ops.len() - order.said).collect();
        _ = order.answer.send(Ok(Done { sent_at: done.sent_at, answers: own }));
    }
}
