//! What is asked by many tasks at once travels in one script: the first leaves at once, and those that come while it is
//! under way leave together. Each has an answer of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use redis::{Pipeline, Value, cmd};
use tokio::sync::{mpsc, oneshot};

use crate::fault::Failure;
use crate::hold::{millis, release_arg};
use crate::layout::Group;
use crate::script::{ACQUIRE, Call, RELEASE};
use crate::store::Shared;

/// How many scripts of a lane are under way at once: one that the server works on, and one on its way to it.
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

/// Sends what is handed in, for as long as the store is open.
pub async fn attend(shared: Arc<Shared>, Depot(errand, mut orders): Depot) {
    let mut flights = FuturesUnordered::new();
    let mut waiting = Vec::new();
    loop {
        tokio::select! {
            Some(()) = flights.next(), if !flights.is_empty() => {}
            count = orders.recv_many(&mut waiting, BATCH), if flights.len() < FLIGHTS => {
                if count == 0 {
                    return;
                }
                flights.push(fly(&shared, errand, std::mem::take(&mut waiting)));
            }
        }
    }
}

/// One script for each kind.
async fn fly(shared: &Shared, errand: Errand, mut orders: Vec<Order>) {
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
}

async fn deliver(shared: &Shared, errand: Errand, batch: Vec<Order>) {
    let group = batch[0].group;
    let call = call(shared, errand, group, &batch);
    let answer = match &shared.grants {
        Some(_) if errand == Errand::Acquire => replicated(shared, group, &call, &batch).await,
        _ => call.run(&shared.fleet, group.slot()).await,
    };
    let answers = match answer {
        Ok(Value::Array(answers)) if answers.len() == batch.len() => Ok(answers),
        Ok(_) => Err(Failure::Unheard("Redis gave an answer that makes no sense".into())),
        Err(failure) => Err(failure),
    };
    let answers = match answers {
        Ok(answers) => answers.into_iter().map(Ok).collect(),
        Err(failure) => vec![Err(failure); batch.len()],
    };
    let mut late = Vec::new();
    for (Order { keys, args, answer: told, kept, .. }, answer) in batch.into_iter().zip(answers) {
        if told.send(answer).is_err() && errand == Errand::Acquire && !kept.load(Ordering::SeqCst) {
            late.push((keys, args));
        }
    }
    // Whoever asked is gone: what it was given meanwhile, or its place in line, is nobody's. What is not known it will
    // take back by itself; this is for what was sent after that.
    if !late.is_empty()
        && let Err(failure) = give_back(shared, group, &late).await
    {
        tracing::debug!(?failure, "what came too late could not be given back; its ttl ends it");
    }
}

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
        Errand::Release => {
            batch.iter().fold(us(Call::new(&RELEASE, &keys)), |call, order| call.arg(&order.args[0][..]))
        }
    }
}

/// Runs a call on a connection of its own and waits there until enough replicas have it. If they have not in time, what was
/// granted is given back: nobody has been told of it.
async fn replicated(shared: &Shared, group: Group, call: &Call, batch: &[Order]) -> Result<Value, Failure> {
    let grants = shared.grants.as_ref().unwrap_or(&shared.fleet);
    let wanted = shared.options.wait_replicas;
    let patience = shared.options.access.timeout / 2;
    let mut script = call.by_hash.clone();
    for _ in 0..2 {
        let mut both = Pipeline::with_capacity(2);
        both.add_command(script).add_command(cmd("WAIT").arg(wanted).arg(millis(patience)).to_owned());
        let mut answers = grants.calls(group.slot(), &both).await?.into_iter();
        let (Some(answer), Some(count)) = (answers.next(), answers.next()) else { break };
        let answer = match answer {
            Err(failure) if failure.is("NOSCRIPT") => {
                script = call.in_full();
                continue;
            }
            answer => answer?,
        };
        let Value::Array(each) = &answer else { break };
        let granted = batch.iter().zip(each).filter(|(_, one)| matches!(one, Value::Int(_)));
        let granted: Vec<_> = granted.map(|(order, _)| (order.keys.clone(), order.args.clone())).collect();
        let count = if let Value::Int(count) = count? { count } else { 0 };
        if granted.is_empty() || count >= i64::from(wanted) {
            return Ok(answer);
        }
        give_back(shared, group, &granted).await?;
        return Err(Failure::Away(format!(
            "{count} of {wanted} replicas had the grant after {patience:?}: it was given back"
        )));
    }
    Err(Failure::Unheard("Redis gave an answer that makes no sense".into()))
}

async fn give_back(
    shared: &Shared,
    group: Group,
    what: &[(Vec<String>, Vec<Vec<u8>>)],
) -> Result<(), Failure> {
    let keys = what.iter().flat_map(|(keys, _)| keys);
    let call = Call::new(&RELEASE, &shared.keys(group, keys));
    let call = call.arg(&shared.client).arg(shared.layout.base(group)).arg(shared.claim_ms());
    let each = |call: Call, (keys, args): &(Vec<String>, Vec<Vec<u8>>)| {
        call.arg(release_arg(String::from_utf8_lossy(&args[0]).into_owned(), keys.len()))
    };
    what.iter().fold(call, each).run(&shared.fleet, group.slot()).await.map(|_| ())
}
