//! What is asked by many tasks at once travels in one script: the first leaves at once, and those that come while it is
//! under way leave together. Each has an answer of its own.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::{join_all, try_join_all};
use futures_util::stream::FuturesUnordered;
use redis::{Pipeline, Value, cmd};
use tokio::sync::{mpsc, oneshot};

use crate::fault::Failure;
use crate::fleet::{Fleet, Split};
use crate::hold::{millis, release_flags};
use crate::layout::Group;
use crate::script::{ACQUIRE, Call, RELEASE, RENEW};
use crate::store::Shared;

/// How many scripts of a group are in flight at once: one that the server works on, and one on its way to it.
const FLIGHTS: usize = 2;
/// How many requests one script answers: few enough not to keep the server from everybody else for long.
const BATCH: usize = 64;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Errand {
    /// A lock.
    Acquire,
    /// To give one back.
    Release,
    /// To confirm that a waiter that was let in is there.
    Confirm,
}

/// One request: the names' keys and the arguments. Of an ask: the attempt, how long its key lives, its head, its terms; of a
/// release: what names it.
struct Order {
    group: Group,
    keys: Vec<String>,
    args: Vec<Vec<u8>>,
    answer: oneshot::Sender<Result<Value, Failure>>,
    kept: Kept,
}

impl Order {
    /// What those who travel together have in common: the group; of asks also how long they hold, and what they are
    /// ready to do.
    fn kind(&self) -> (Group, &[Vec<u8>]) {
        (self.group, if self.args.len() > 1 { &self.args[1..3] } else { &[] })
    }
}

/// Whether what is asked for is somebody's already, also if nobody waits for this answer any more.
pub type Kept = Arc<AtomicBool>;

/// Requests of one group that wait for their turn, and how many of the group's scripts are in flight.
#[derive(Default)]
struct Queue {
    waiting: VecDeque<Order>,
    in_flight: usize,
}

/// Where requests of one kind are handed in.
pub struct Lane(mpsc::UnboundedSender<Order>);

/// The other end of it.
pub struct Depot(Errand, mpsc::UnboundedReceiver<Order>);

pub fn lane(errand: Errand) -> (Lane, Depot) {
    let (orders, depot) = mpsc::unbounded_channel();
    (Lane(orders), Depot(errand, depot))
}

impl Lane {
    pub async fn send(
        &self,
        group: Group,
        keys: Vec<String>,
        args: Vec<Vec<u8>>,
        kept: Kept,
    ) -> Result<Value, Failure> {
        let (answer, answered) = oneshot::channel();
        let closed = || Failure::Away("the store is closed".into());
        self.0.send(Order { group, keys, args, answer, kept }).map_err(|_| closed())?;
        answered.await.unwrap_or_else(|_| Err(closed()))
    }
}

/// Sends what is handed in, for as long as the store is open. Each group has scripts in flight of its own, so a node that is
/// silent holds up its own groups and no others.
pub async fn attend(shared: Arc<Shared>, Depot(errand, mut orders): Depot) {
    let mut flights = FuturesUnordered::new();
    let mut queues: HashMap<Group, Queue> = HashMap::new();
    let (mut received, mut touched) = (Vec::new(), Vec::new());
    loop {
        // With one group for all, the channel is the queue, and no sender wakes us for what cannot leave yet.
        let full = !shared.fleet.is_cluster() && flights.len() >= FLIGHTS;
        tokio::select! {
            Some(group) = flights.next(), if !flights.is_empty() => {
                queues.entry(group).or_default().in_flight -= 1;
                touched.push(group);
            }
            count = orders.recv_many(&mut received, BATCH), if !full => {
                if count == 0 {
                    return;
                }
                for order in received.drain(..) {
                    touched.push(order.group);
                    queues.entry(order.group).or_default().waiting.push_back(order);
                }
            }
        }
        for group in touched.drain(..) {
            let queue = queues.entry(group).or_default();
            if queue.in_flight < FLIGHTS && !queue.waiting.is_empty() {
                let count = queue.waiting.len().min(BATCH);
                queue.in_flight += 1;
                flights.push(fly(&shared, errand, group, queue.waiting.drain(..count).collect()));
            }
            if queue.in_flight == 0 {
                queues.remove(&group);
            }
        }
    }
}

/// One script for each kind of request of a group.
async fn fly(shared: &Arc<Shared>, errand: Errand, group: Group, mut orders: Vec<Order>) -> Group {
    // Whoever lost interest before it was sent has not asked.
    orders.retain(|order| !order.answer.is_closed());
    orders.sort_by(|a, b| a.kind().cmp(&b.kind()));
    let mut batches: Vec<Vec<Order>> = Vec::new();
    for order in orders {
        match batches.last_mut() {
            Some(batch) if batch[0].kind() == order.kind() => batch.push(order),
            _ => batches.push(vec![order]),
        }
    }
    join_all(batches.into_iter().map(|batch| deliver(shared, errand, batch))).await;
    group
}

async fn deliver(shared: &Arc<Shared>, errand: Errand, batch: Vec<Order>) {
    let group = batch[0].group;
    let call = call(shared, errand, group, &batch);
    let (answer, replicated) = match &shared.grants {
        Some(grants) if errand == Errand::Acquire => {
            match run_replicated(shared, grants, group, &call, Split::SendAgain).await {
                Ok((answer, replicated)) => (Ok(answer), replicated),
                Err(failure) => (Err(failure), Ok(())),
            }
        }
        _ if errand == Errand::Release => {
            (call.run_when(&shared.fleet, group.slot(), Split::Report).await, Ok(()))
        }
        _ => (call.run(&shared.fleet, group.slot()).await, Ok(())),
    };
    let mut answers = match answer {
        Err(failure) if errand == Errand::Release && failure.keys_are_split() => {
            join_all(batch.iter().map(|order| shared.release_split(group, &order.keys, &order.args[0]))).await
        }
        Ok(Value::Array(answers)) if answers.len() == batch.len() => answers.into_iter().map(Ok).collect(),
        Ok(_) => vec![Err(Failure::Unheard("Redis gave an answer that makes no sense".into())); batch.len()],
        Err(failure) => vec![Err(failure); batch.len()],
    };
    if let Err(failure) = replicated {
        take_back(shared, group, &batch, &mut answers, failure).await;
    }
    let mut late = Vec::new();
    for (order, answer) in batch.into_iter().zip(answers) {
        let unknown = answer.as_ref().is_err_and(Failure::may_have_happened);
        let happened = answer.is_ok() || unknown;
        if unknown && errand == Errand::Acquire {
            shared.unknown.note(&String::from_utf8_lossy(&order.args[0]), shared.tombstone());
        }
        let Order { keys, args, answer: told, kept, .. } = order;
        let gone = told.send(answer).is_err() && errand == Errand::Acquire;
        if gone && happened && !kept.load(Ordering::SeqCst) {
            late.push((keys, args));
        }
    }
    if !late.is_empty() {
        shared.fleet.reactor().spawn(give_back_late(shared.clone(), group, late));
    }
}

/// The callers are gone: what was granted to them, or their queue entries, would be held for nobody. The callers release
/// what they know of by themselves; this is for what arrived after that.
async fn give_back_late(shared: Arc<Shared>, group: Group, late: Vec<Granted>) {
    let lives = late.iter().filter_map(|(_, args)| String::from_utf8_lossy(&args[1]).parse().ok()).max();
    let until = Instant::now() + Duration::from_millis(lives.unwrap_or(0));
    let mut pause = Duration::from_millis(10);
    while let Err(failure) = give_back(&shared, group, &late).await {
        if Instant::now() >= until {
            tracing::warn!(?failure, "a grant without a caller could not be released; its ttl ends it");
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

/// Gives back what too few replicas have: no caller has been told of it. The answers to requests that were not granted
/// stay as they are.
async fn take_back(
    shared: &Shared,
    group: Group,
    batch: &[Order],
    answers: &mut [Result<Value, Failure>],
    why: Failure,
) {
    let granted = |answer: &Result<Value, Failure>| matches!(answer, Ok(Value::Int(_)));
    let orders = batch.iter().zip(answers.iter()).filter(|(_, answer)| granted(answer));
    let orders: Vec<Granted> = orders.map(|(order, _)| (order.keys.clone(), order.args.clone())).collect();
    if orders.is_empty() {
        return;
    }
    let outcome = match give_back(shared, group, &orders).await {
        Ok(()) => why,
        Err(failure) => {
            Failure::Unheard(format!("{why:?}, and the grant could not be given back: {failure:?}"))
        }
    };
    for answer in answers.iter_mut().filter(|answer| granted(answer)) {
        *answer = Err(outcome.clone());
    }
}

/// The keys and the arguments of a lock request.
type Granted = (Vec<String>, Vec<Vec<u8>>);

fn call(shared: &Shared, errand: Errand, group: Group, batch: &[Order]) -> Call {
    let keys = shared.keys(group, batch.iter().flat_map(|order| &order.keys));
    let us = |call: Call| call.arg(&shared.client).arg(shared.layout.base(group)).arg(shared.claim_ms());
    match errand {
        Errand::Acquire => {
            let common = batch[0].kind().1.iter();
            let call = us(Call::new(&ACQUIRE, &keys).arg(shared.floor()));
            let call = common.fold(call, |call, part| call.arg(&part[..]));
            // Most have the same terms: those of the first are said once.
            let terms = &batch[0].args[3];
            batch.iter().fold(call.arg(&terms[..]), |call, Order { args, .. }| match args[3] == *terms {
                true => call.arg(&args[0][..]),
                false => call.arg([&args[0][..], &args[3][..]].concat()),
            })
        }
        Errand::Confirm => {
            let call = Call::new(&RENEW, &keys).arg(shared.layout.base(group)).arg(shared.claim_ms());
            let each = |call: Call, order: &Order| call.arg(&order.args[0][..]).arg(order.keys.len());
            batch.iter().fold(call.arg(&shared.client), each)
        }
        Errand::Release => {
            let call = us(Call::new(&RELEASE, &keys)).arg(millis(shared.tombstone()));
            batch.iter().fold(call, |call, order| call.arg(&order.args[0][..]))
        }
    }
}

/// Runs a script on a connection of its own and waits there until enough replicas have what it wrote. The second part of
/// the answer says whether they have.
pub(crate) async fn run_replicated(
    shared: &Shared,
    grants: &Fleet,
    group: Group,
    call: &Call,
    split: Split,
) -> Result<(Value, Result<(), Failure>), Failure> {
    let wanted = shared.options.wait_replicas;
    let patience = shared.options.access.timeout / 2;
    let mut script = call.by_hash.clone();
    for _ in 0..2 {
        let mut both = Pipeline::with_capacity(2);
        both.add_command(script).add_command(cmd("WAIT").arg(wanted).arg(millis(patience)).to_owned());
        let mut answers = grants.calls(group.slot(), &both, split).await?.into_iter();
        let (Some(answer), Some(count)) = (answers.next(), answers.next()) else { break };
        let answer = match answer {
            Err(failure) if failure.is("NOSCRIPT") => {
                script = call.in_full();
                continue;
            }
            answer => answer?,
        };
        let replicated = match count {
            Ok(Value::Int(count)) if count >= i64::from(wanted) => Ok(()),
            Ok(Value::Int(count)) => Err(Failure::Away(format!(
                "{count} of {wanted} replicas had the grant after {patience:?}: it was given back"
            ))),
            Ok(_) => Err(Failure::Away("WAIT had no number for an answer: the grant was given back".into())),
            Err(failure) => Err(failure),
        };
        return Ok((answer, replicated));
    }
    Err(Failure::Unheard("Redis gave an answer that makes no sense".into()))
}

async fn give_back(shared: &Shared, group: Group, what: &[Granted]) -> Result<(), Failure> {
    let keys = what.iter().flat_map(|(keys, _)| keys);
    let call = Call::new(&RELEASE, &shared.keys(group, keys));
    let call = call.arg(&shared.client).arg(shared.layout.base(group)).arg(shared.claim_ms());
    let releases: Vec<Vec<u8>> = what
        .iter()
        .map(|(keys, args)| {
            let attempt = String::from_utf8_lossy(&args[0]).into_owned();
            shared.release_arg(attempt, keys.len(), release_flags::UNREPORTED, 0)
        })
        .collect();
    let call = releases.iter().fold(call.arg(millis(shared.tombstone())), |call, one| call.arg(&one[..]));
    match call.run_when(&shared.fleet, group.slot(), Split::Report).await {
        Err(failure) if failure.keys_are_split() => {
            let each = what.iter().zip(&releases);
            try_join_all(each.map(|((keys, _), one)| shared.release_split(group, keys, one)))
                .await
                .map(|_| ())
        }
        answer => answer.map(|_| ()),
    }
}
