//! What is asked by many tasks at once travels in one transaction: the first leaves at once, and those that come while it
//! is under way leave together, each with an answer of its own.
//!
//! Those that are expected to happen (a lock that is thought to be free, a hold that is given back) are put into it as they
//! are: all of them happen or none. If none does, they go again, each as a transaction of its own inside, as the others always
//! do. That costs etcd more.

use std::collections::{HashSet, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lockkeeper_host::Gather;
use tokio::sync::{mpsc, oneshot};

use crate::fault::Failure;
use crate::order::{Answer, Form, Order, Topic, hand_out, put_together};
use crate::proto::{Compare, RequestOp, TxnRequest};
use crate::script::txn;
use crate::store::Shared;

/// How many transactions are under way at once: one that the cluster works on, and one on its way to it.
const FLIGHTS: usize = 2;
/// How many operations are in one of them, and how many bytes: etcd takes 128 and 1.5 MiB.
const BATCH: usize = 100;
const BYTES: usize = 512 << 10;

/// Where transactions are handed in.
pub struct Lane(mpsc::UnboundedSender<Order>);

/// The other end of it.
pub struct Depot(mpsc::UnboundedReceiver<Order>);

pub fn lane() -> (Lane, Depot) {
    let (orders, depot) = mpsc::unbounded_channel();
    (Lane(orders), Depot(depot))
}

impl Lane {
    /// Hands a transaction in, at once; what this returns has the answer.
    pub fn send(&self, txn: TxnRequest, about: Vec<Topic>) -> Posted {
        self.hand_in(txn, None, false, about)
    }

    /// The same for what is expected to happen. `base`: only if the base of the fences is still this one.
    pub fn hope(
        &self,
        compare: Vec<Compare>,
        then: Vec<RequestOp>,
        base: Option<u64>,
        about: Vec<Topic>,
    ) -> Posted {
        self.hand_in(txn(compare, then, Vec::new()), base, true, about)
    }

    fn hand_in(&self, txn: TxnRequest, base: Option<u64>, hopes: bool, about: Vec<Topic>) -> Posted {
        let (answer, answered) = oneshot::channel();
        // If the store is closed, so is the answer.
        _ = self.0.send(Order::new(&txn, base, hopes, about, answer));
        Posted(answered)
    }
}

/// A transaction that was handed in. It is not sent if this is dropped before.
#[must_use = "nobody else hears the answer"]
pub struct Posted(oneshot::Receiver<Result<Answer, Failure>>);

impl Future for Posted {
    type Output = Result<Answer, Failure>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(Pin::new(&mut self.0).poll(cx));
        Poll::Ready(answer.unwrap_or_else(|_| Err(Failure::Away("the store is closed".into()))))
    }
}

/// Sends what is handed in, for as long as the store is open.
pub async fn attend(shared: Arc<Shared>, Depot(mut orders): Depot) {
    let mut flights = FuturesUnordered::new();
    let mut waiting: VecDeque<Order> = VecDeque::new();
    let mut under_way: HashSet<Topic> = HashSet::new();
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
            let batch = load(&mut waiting, &mut under_way);
            if batch.is_empty() {
                break;
            }
            in_the_air += batch.len();
            flights.push(fly(&shared, batch));
        }
        tokio::select! {
            Some(landed) = flights.next(), if !flights.is_empty() => {
                in_the_air -= landed.count;
                gather = Gather::after(landed.count + waiting.len(), landed.took);
                for one in landed.about {
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
fn load(waiting: &mut VecDeque<Order>, under_way: &mut HashSet<Topic>) -> Vec<Order> {
    let (mut batch, mut bytes, mut operations) = (Vec::new(), 0, 0);
    let mut held_up: HashSet<Topic> = HashSet::new();
    let mut rest = VecDeque::new();
    while let Some(order) = waiting.pop_front() {
        if order.is_given_up() {
            // Whoever lost interest before it was sent has not asked.
            continue;
        }
        let (size, weight) = (order.size(), order.weight());
        let full = !batch.is_empty() && (operations + weight > BATCH || bytes + size > BYTES);
        let blocked = order.about.iter().any(|one| under_way.contains(one) || held_up.contains(one));
        if full || blocked {
            // Those behind it that are about the same stay behind it.
            held_up.extend(&order.about);
            rest.push_back(order);
            if full {
                break;
            }
            continue;
        }
        (bytes, operations) = (bytes + size, operations + weight);
        under_way.extend(&order.about);
        batch.push(order);
    }
    rest.append(waiting);
    *waiting = rest;
    batch
}

/// What is over: how many they were, what they were about, and how long it took.
struct Landed {
    count: usize,
    about: Vec<Topic>,
    took: Duration,
}

async fn fly(shared: &Shared, mut batch: Vec<Order>) -> Landed {
    let (count, left_at) = (batch.len(), Instant::now());
    let about = batch.iter_mut().flat_map(|order| std::mem::take(&mut order.about)).collect();
    if let Some(batch) = together(shared, batch).await {
        // Nothing happened, because of one of them.
        if let Some(batch) = side_by_side(shared, batch).await {
            // Not even that is allowed: each for itself, then.
            for order in batch {
                alone(shared, order).await;
            }
        }
    }
    Landed { count, about, took: left_at.elapsed() }
}

/// Sends what is expected to happen as one. `Some`: nothing happened.
async fn together(shared: &Shared, mut batch: Vec<Order>) -> Option<Vec<Order>> {
    if batch.len() == 1 {
        alone(shared, batch.remove(0)).await;
        return None;
    }
    if batch.iter().all(|order| !order.hopes()) {
        return Some(batch);
    }
    let sent_at = shared.clock.now();
    match shared.link.txn(put_together(&shared.layout, &batch, Form::Hoping)).await {
        Ok(answer) if answer.succeeded => hand_out(sent_at, answer, batch, Form::Hoping),
        Ok(_) => return Some(batch),
        Err(failure @ Failure::Refused(..)) => return without_room(&failure, batch),
        Err(failure) => tell_all(&failure, batch),
    }
    None
}

/// Sends each as a transaction of its own inside of one. `Some`: that was refused, and nothing happened.
async fn side_by_side(shared: &Shared, batch: Vec<Order>) -> Option<Vec<Order>> {
    let sent_at = shared.clock.now();
    match shared.link.txn(put_together(&shared.layout, &batch, Form::Apart)).await {
        Ok(answer) => hand_out(sent_at, answer, batch, Form::Apart),
        Err(failure @ Failure::Refused(..)) => return without_room(&failure, batch),
        Err(failure) => tell_all(&failure, batch),
    }
    None
}

/// What may be sent again after a refusal. If that was for want of room, what needs room may have happened; the rest finds enough alone.
fn without_room(failure: &Failure, batch: Vec<Order>) -> Option<Vec<Order>> {
    let doubted = |order: &Order| order.puts() && failure.may_have_happened();
    let (doubted, rest): (Vec<Order>, Vec<Order>) = batch.into_iter().partition(doubted);
    tell_all(failure, doubted);
    Some(rest).filter(|rest| !rest.is_empty())
}

async fn alone(shared: &Shared, order: Order) {
    let sent_at = shared.clock.now();
    let answer = shared.link.txn(order.alone(&shared.layout)).await;
    order.tell(answer.map(|txn| Answer { sent_at, revision: txn.revision(), txn }));
}

fn tell_all(failure: &Failure, batch: Vec<Order>) {
    batch.into_iter().for_each(|order| order.tell(Err(failure.clone())));
}
