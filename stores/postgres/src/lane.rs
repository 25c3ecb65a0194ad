//! What is asked by many tasks at once travels in one statement: the first leaves at once, and those that come while it is
//! under way leave together. Each has an answer of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{join, join_all};
use futures_util::stream::FuturesUnordered;
use lockkeeper_core::Moment;
use tokio::sync::{mpsc, oneshot};
use tokio_postgres::Row;

use crate::entry::micros;
use crate::fault::Failure;
use crate::link::Live;
use crate::script::{ASK_ALL, GIVE, RELEASE_ALL, STEP, STEPS, TAKE};
use crate::store::Shared;

/// How many statements are under way at once: one that the server works on, and one on its way to it.
const FLIGHTS: usize = 2;
/// How many requests are in one statement: few enough not to keep others from their rows for long.
const BATCH: usize = 64;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A lock, at once or not at all.
    Hasty = 0,
    /// A lock, or a place in line.
    Patient = 1,
    /// To give one back, or to leave the line.
    Release = 2,
    /// A lock, of one that stands in line already.
    Called = 3,
}

/// One request.
#[derive(Clone)]
pub(crate) struct Order {
    pub kind: Kind,
    /// Whether to say only what is usual, if it is sent alone. There is no answer if it is not.
    pub quick: bool,
    pub names: Vec<String>,
    pub attempt: Vec<u8>,
    pub ttl: Option<i64>,
    pub terms: Option<String>,
    pub holder: Option<String>,
}

/// The answer to it, and when it was sent, or a little earlier.
pub(crate) struct Answer {
    pub sent_at: Moment,
    /// Empty: it was quick, and nothing was done. To be sent again, in full.
    pub text: String,
    /// For how long, if that is less than the ttl.
    pub lease: Option<Duration>,
}

struct Parcel {
    order: Order,
    answer: oneshot::Sender<Result<Answer, Failure>>,
    _open: Open,
}

/// Where requests are handed in.
pub(crate) struct Lane {
    parcels: mpsc::UnboundedSender<Parcel>,
    /// How many were handed in and are not answered.
    open: Arc<AtomicUsize>,
}

/// One of those, for as long as it lives.
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The other end of it.
pub(crate) struct Depot(mpsc::UnboundedReceiver<Parcel>);

pub(crate) fn lane() -> (Lane, Depot) {
    let (parcels, depot) = mpsc::unbounded_channel();
    (Lane { parcels, open: Arc::default() }, Depot(depot))
}

impl Lane {
    /// Hands in a request. What is handed in first is sent first.
    pub fn post(&self, order: Order) -> Posted {
        let (answer, answered) = oneshot::channel();
        self.open.fetch_add(1, Ordering::AcqRel);
        // If the store is closed, so is the answer.
        _ = self.parcels.send(Parcel { order, answer, _open: Open(self.open.clone()) });
        Posted(answered)
    }

    /// `Some` if nothing is under way, and then this is.
    fn alone(&self) -> Option<Open> {
        let first = self.open.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        first.then(|| Open(self.open.clone()))
    }
}

/// A request that was handed in. It is not sent if this is dropped before.
pub(crate) struct Posted(oneshot::Receiver<Result<Answer, Failure>>);

impl Posted {
    pub async fn answer(self) -> Result<Answer, Failure> {
        self.0.await.unwrap_or_else(|_| Err(Failure::Away("the store is closed".into())))
    }
}

/// Sends what is handed in, for as long as the store is open. All on one connection, in the order in which it comes: a release
/// never overtakes its ask.
pub(crate) async fn attend(shared: Arc<Shared>, Depot(mut orders): Depot) {
    let mut flights = FuturesUnordered::new();
    let mut waiting = Vec::new();
    loop {
        tokio::select! {
            biased;
            Some(()) = flights.next(), if !flights.is_empty() => {}
            count = orders.recv_many(&mut waiting, BATCH), if flights.len() < FLIGHTS => {
                if count == 0 {
                    return;
                }
                let batch = std::mem::take(&mut waiting);
                // The connection is there before anything is sent, so that what is handed in first is sent first.
                // A batch in flight may be the one that reconnects, and only goes on while it is polled.
                let connecting = shared.link.live();
                tokio::pin!(connecting);
                let connected = loop {
                    tokio::select! {
                        connected = &mut connecting => break connected,
                        Some(()) = flights.next(), if !flights.is_empty() => {}
                    }
                };
                match connected {
                    Ok(live) => flights.push(fly(shared.clone(), live, batch)),
                    Err(failure) => batch.into_iter().for_each(|parcel| _ = parcel.answer.send(Err(failure.clone()))),
                }
            }
        }
    }
}

impl Shared {
    /// One request: from here, if nothing else is under way; else with the others. It is on its way when this was polled once, so
    /// that what is handed in later is sent later.
    pub async fn send(&self, order: Order) -> Result<Answer, Failure> {
        if let Some(live) = self.link.prompt()
            && let Some(_open) = self.lane.alone()
        {
            let sent_at = self.options.clock.now();
            match say(self, &live, &[&order], order.quick).await {
                // The long way makes them again.
                Err(failure) if failure.is_missing() || matches!(failure, Failure::Ended) => {}
                Ok(rows) if order.quick && rows.is_empty() => {
                    return Ok(Answer { sent_at, text: String::new(), lease: None });
                }
                rows => return read(sent_at, rows?.first()),
            }
        }
        self.lane.post(order).answer().await
    }
}

/// A waiter that was handed the lock already gets its fence and how many microseconds of the lease are left.
fn read(sent_at: Moment, row: Option<&Row>) -> Result<Answer, Failure> {
    let text: String = row.and_then(|row| row.try_get(0).ok()).ok_or_else(odd)?;
    let handed_over = text.split_once(' ').and_then(|(fence, left)| {
        fence.parse::<i64>().ok()?;
        Some((fence.to_owned(), Duration::from_micros(left.parse().ok()?)))
    });
    Ok(match handed_over {
        Some((fence, left)) => Answer { sent_at, text: fence, lease: Some(left) },
        None => Answer { sent_at, text, lease: None },
    })
}

/// One statement for all requests of one name, and one for each of several names.
async fn fly(shared: Arc<Shared>, live: Live, mut batch: Vec<Parcel>) {
    // Whoever lost interest before it was sent has not asked.
    batch.retain(|parcel| !parcel.answer.is_closed());
    let (mut single, several): (Vec<Parcel>, Vec<Parcel>) =
        batch.into_iter().partition(|parcel| parcel.order.names.len() == 1);
    // In the order of names, as everybody has it; those of one name in the order in which they came.
    single.sort_by(|a, b| a.order.names.cmp(&b.order.names));
    let (shared, live) = (&shared, &live);
    let alone = several.into_iter().map(|parcel| deliver(shared, live, vec![parcel]));
    let together = async {
        if !single.is_empty() {
            deliver(shared, live, single).await;
        }
    };
    join(together, join_all(alone)).await;
}

async fn deliver(shared: &Shared, live: &Live, mut batch: Vec<Parcel>) {
    let mut sent_at = shared.options.clock.now();
    let mut rows = say_all(shared, live, &batch).await;
    let mut rebuilt = false;
    while let Err(failure) = &rows {
        match failure {
            // It was not sent, and the next connection is another one.
            Failure::Ended => batch.retain(|parcel| !parcel.answer.is_closed()),
            // Somebody dropped our tables. Nothing has happened; a new connection makes them again.
            failure if failure.is_missing() && !std::mem::replace(&mut rebuilt, true) => {
                shared.link.rebuild()
            }
            _ => break,
        }
        if batch.is_empty() {
            return;
        }
        rows = match shared.link.live().await {
            Ok(live) => {
                sent_at = shared.options.clock.now();
                say_all(shared, &live, &batch).await
            }
            Err(failure) => Err(failure),
        };
    }
    let rows = match rows {
        Ok(rows) if rows.len() == batch.len() => Ok(rows),
        Ok(_) => Err(odd()),
        Err(failure) => Err(failure),
    };
    let mut rows = rows.map(Vec::into_iter);
    for Parcel { answer, .. } in batch {
        let one = match &mut rows {
            Ok(rows) => read(sent_at, rows.next().as_ref()),
            Err(failure) => Err(failure.clone()),
        };
        _ = answer.send(one);
    }
}

async fn say_all(shared: &Shared, live: &Live, batch: &[Parcel]) -> Result<Vec<Row>, Failure> {
    let orders: Vec<&Order> = batch.iter().map(|parcel| &parcel.order).collect();
    say(shared, live, &orders, false).await
}

fn odd() -> Failure {
    Failure::Unheard("PostgreSQL gave an answer that makes no sense".into())
}

async fn say(shared: &Shared, live: &Live, batch: &[&Order], quick: bool) -> Result<Vec<Row>, Failure> {
    let (client, epoch, claim) = (&shared.client, &live.epoch(), &micros(shared.options.claim));
    let orders = || batch.iter();
    if let [Order { kind, names, attempt, ttl, terms, holder, .. }] = batch {
        let (number, patient) = (&(*kind as i32), &(*kind != Kind::Hasty));
        return match (&names[..], kind) {
            ([name], _) => {
                let params: [crate::link::Param<'_>; 9] =
                    [client, epoch, claim, number, name, attempt, ttl, terms, holder];
                let sql = match kind {
                    _ if !quick => &STEP,
                    Kind::Release => &GIVE,
                    _ => &TAKE,
                };
                live.rows(sql, &params).await
            }
            (_, Kind::Release) => live.rows(&RELEASE_ALL, &[names, attempt]).await,
            _ => {
                live.rows(&ASK_ALL, &[client, epoch, claim, patient, names, attempt, ttl, terms, holder])
                    .await
            }
        };
    }
    let kinds: Vec<i32> = orders().map(|order| order.kind as i32).collect();
    let names: Vec<&str> = orders().map(|order| order.names[0].as_str()).collect();
    let attempts: Vec<&[u8]> = orders().map(|order| &order.attempt[..]).collect();
    let ttls: Vec<Option<i64>> = orders().map(|order| order.ttl).collect();
    let terms: Vec<Option<&str>> = orders().map(|order| order.terms.as_deref()).collect();
    let holders: Vec<Option<&str>> = orders().map(|order| order.holder.as_deref()).collect();
    live.rows(&STEPS, &[client, epoch, claim, &kinds, &names, &attempts, &ttls, &terms, &holders]).await
}
