//! The leases of this process: one for each length, shared by all locks and all queue entries of that length.
//! All are kept alive over one stream.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lockkeeper_core::Moment;
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt;
use tonic::Streaming;

use crate::fault::Failure;
use crate::link::Link;
use crate::proto::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeysRequest, LeaseRequest, LeaseResponse, LeaseRevokeResponse,
};
use crate::store::Shared;
use crate::turns::Turns;

/// How long a lease that nobody needs is kept for the next who does: with it, a free lock costs one round trip.
const IDLE: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(200);
const PAUSE: Duration = Duration::from_millis(50);

/// A lease of this process.
#[derive(Debug)]
pub struct Lease {
    pub id: i64,
    ttl: Duration,
    /// How much longer it lasts than what its locks need.
    slack: Duration,
    /// It lasts until then, whatever happens: counted from the moment at which the keep-alive was sent.
    until: watch::Sender<Moment>,
    dead: AtomicBool,
    /// When it was needed last, in nanoseconds.
    used: AtomicU64,
}

impl Lease {
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    pub fn touch(&self, now: Moment) {
        self.used.fetch_max(now.as_nanos(), Ordering::Relaxed);
    }

    fn die(&self) {
        self.dead.store(true, Ordering::Relaxed);
        self.until.send_modify(|_| {});
    }
}

pub struct Leases {
    /// One for each length.
    places: Mutex<HashMap<u64, Arc<Turns<Arc<Lease>>>>>,
    /// All that live, to be kept alive.
    living: Mutex<HashMap<i64, Arc<Lease>>>,
    wishes: mpsc::UnboundedSender<i64>,
}

pub struct Wishes(mpsc::UnboundedReceiver<i64>);

pub fn leases() -> (Leases, Wishes) {
    let (wishes, asked) = mpsc::unbounded_channel();
    (Leases { places: Mutex::default(), living: Mutex::default(), wishes }, Wishes(asked))
}

/// A little longer than what is needed, so that not every grant needs a keep-alive of its own first.
fn slack(needed: Duration) -> Duration {
    (needed / 8).max(Duration::from_secs(1))
}

impl Shared {
    /// The lease for locks that need `needed`. It lasts at least that long from when it was last kept alive.
    pub async fn lease(&self, needed: Duration) -> Result<Arc<Lease>, Failure> {
        let slack = slack(needed);
        let seconds = (needed + slack).as_millis().div_ceil(1000) as u64;
        let place = {
            let mut places = self.leases.places.lock().unwrap_or_else(PoisonError::into_inner);
            places.entry(seconds).or_default().clone()
        };
        let lease = place.get(|lease| !lease.is_dead(), || Box::pin(self.new_lease(seconds, slack))).await?;
        lease.touch(self.clock.now());
        Ok(lease)
    }

    async fn new_lease(&self, seconds: u64, slack: Duration) -> Result<Arc<Lease>, Failure> {
        let sent_at = self.clock.now();
        let (id, ttl) = self.link.grant_lease(seconds).await?;
        let lease = Arc::new(Lease {
            id,
            ttl,
            slack,
            until: watch::Sender::new(sent_at + ttl),
            dead: AtomicBool::new(false),
            used: AtomicU64::new(sent_at.as_nanos()),
        });
        self.living().insert(id, lease.clone());
        Ok(lease)
    }

    fn living(&self) -> std::sync::MutexGuard<'_, HashMap<i64, Arc<Lease>>> {
        self.leases.living.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is a lease of ours: any other ends without us.
    pub fn keeps_alive(&self, id: i64) -> bool {
        self.living().contains_key(&id)
    }

    /// Makes sure that the lease lasts until then at least. False: it is gone.
    pub async fn cover(&self, lease: &Lease, until: Moment) -> Result<bool, Failure> {
        if !lease.is_dead() && *lease.until.borrow() >= until {
            return Ok(true);
        }
        let mut told = lease.until.subscribe();
        let wait = async {
            loop {
                if lease.is_dead() {
                    return false;
                }
                if *told.borrow_and_update() >= until {
                    return true;
                }
                _ = self.leases.wishes.send(lease.id);
                _ = told.changed().await;
            }
        };
        match Box::pin(tokio::time::timeout(self.link.timeout(), wait)).await {
            Ok(covered) => Ok(covered),
            Err(_) => {
                Err(Failure::Unheard(format!("no keep-alive was answered within {:?}", self.link.timeout())))
            }
        }
    }

    /// A request that named this lease was refused, because it is gone.
    pub fn bury(&self, lease: &Lease) {
        lease.die();
        self.living().remove(&lease.id);
    }
}

impl Link {
    /// A lease of its own: its number, and how long it really lasts.
    pub async fn grant_lease(&self, seconds: u64) -> Result<(i64, Duration), Failure> {
        let ask = LeaseGrantRequest { ttl: i64::try_from(seconds).unwrap_or(i64::MAX) };
        let answer: LeaseGrantResponse = self.call("/etcdserverpb.Lease/LeaseGrant", &ask).await?;
        Ok((answer.id, Duration::from_secs(answer.ttl.max(0) as u64)))
    }

    pub async fn revoke_lease(&self, id: i64) -> Result<(), Failure> {
        let done: Result<LeaseRevokeResponse, _> =
            self.call("/etcdserverpb.Lease/LeaseRevoke", &LeaseRequest { id }).await;
        match done {
            Err(failure) if !failure.lease_is_gone() => Err(failure),
            _ => Ok(()),
        }
    }

    /// How much longer a lease lasts if it is left alone, and what hangs on it. `None`: it is gone.
    pub async fn look_at_lease(
        &self,
        id: i64,
        keys: bool,
    ) -> Result<Option<(Duration, Vec<Vec<u8>>)>, Failure> {
        let ask = LeaseKeysRequest { id, keys };
        let answer: LeaseResponse = self.call("/etcdserverpb.Lease/LeaseTimeToLive", &ask).await?;
        Ok(u64::try_from(answer.ttl).ok().map(|ttl| (Duration::from_secs(ttl), answer.keys)))
    }
}

/// Keeps alive what is needed, for as long as the store is open.
pub async fn attend(shared: Arc<Shared>, Wishes(mut wishes): Wishes) {
    let mut dropped = shared.link.dropped();
    loop {
        let Some(first) = next_wish(&shared, &mut wishes).await else { return };
        // Whatever happens, whoever waits for this one is told: it asks again.
        let (send, asks) = mpsc::unbounded_channel();
        let mut stream = Alive { shared: &shared, send, sent: HashMap::new() };
        stream.ask(first);
        if stream.sent.is_empty() {
            // The lease is gone by now. A stream on which nothing is said would be taken for a server that is silent.
            continue;
        }
        dropped.mark_unchanged();
        if let Ok(session) = shared.link.session().await {
            let asks = tokio_stream::wrappers::UnboundedReceiverStream::new(asks);
            match shared.link.stream(&session, "/etcdserverpb.Lease/LeaseKeepAlive", asks).await {
                Ok(mut answers) => stream.run(&mut wishes, &mut answers, &mut dropped).await,
                Err(failure) => tracing::debug!(?failure, "no stream for keep-alives, will try again"),
            }
            // Whatever ended it: another member, and another login, may do better.
            shared.link.give_up(&session).await;
            shared.link.forget_login();
        }
        tokio::time::sleep(PAUSE).await;
        for lease in shared.living().values() {
            lease.until.send_modify(|_| {});
        }
    }
}

async fn next_wish(shared: &Shared, wishes: &mut mpsc::UnboundedReceiver<i64>) -> Option<i64> {
    loop {
        tokio::select! {
            wish = wishes.recv() => return wish,
            () = tokio::time::sleep(TICK) => {
                if let Some(due) = due(shared).into_iter().next() {
                    return Some(due);
                }
            }
        }
    }
}

/// The leases that are to be kept alive now. Those that nobody needed for a while are left to their end.
fn due(shared: &Shared) -> Vec<i64> {
    let now = shared.clock.now();
    let mut living = shared.living();
    living.retain(|_, lease| {
        if *lease.until.borrow() <= now {
            lease.die();
        }
        !lease.is_dead()
    });
    let lines = shared.lines_in_use();
    let due = living.values().filter(|lease| {
        let fresh = *lease.until.borrow();
        let used = Moment::from_nanos(lease.used.load(Ordering::Relaxed));
        // Before the slack is used up a grant would have to wait for it.
        (lines.contains(&lease.id) && now + lease.ttl * 2 / 3 >= fresh)
            || (now.since(used) < IDLE && now + lease.ttl >= fresh + lease.slack / 2)
    });
    due.map(|lease| lease.id).collect()
}

struct Alive<'a> {
    shared: &'a Shared,
    send: mpsc::UnboundedSender<LeaseRequest>,
    /// When the keep-alive that is not answered yet was sent.
    sent: HashMap<i64, Moment>,
}

impl Alive<'_> {
    fn ask(&mut self, id: i64) {
        if !self.sent.contains_key(&id) && self.shared.living().contains_key(&id) {
            self.sent.insert(id, self.shared.clock.now());
            _ = self.send.send(LeaseRequest { id });
        }
    }

    fn heard(&mut self, answer: &LeaseResponse) {
        let Some(sent_at) = self.sent.remove(&answer.id) else { return };
        let Some(lease) = self.shared.living().get(&answer.id).cloned() else { return };
        match u64::try_from(answer.ttl) {
            Ok(seconds) if seconds > 0 => {
                let until = sent_at + Duration::from_secs(seconds);
                lease.until.send_modify(|now| *now = until.max(*now));
            }
            _ => self.shared.bury(&lease),
        }
    }

    async fn run(
        &mut self,
        wishes: &mut mpsc::UnboundedReceiver<i64>,
        answers: &mut Streaming<LeaseResponse>,
        dropped: &mut watch::Receiver<u64>,
    ) {
        let mut tick = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                wish = wishes.recv() => match wish {
                    Some(id) => self.ask(id),
                    None => return,
                },
                answer = answers.next() => match answer {
                    Some(Ok(answer)) => self.heard(&answer),
                    other => {
                        tracing::debug!(?other, "the stream for keep-alives has ended");
                        return;
                    }
                },
                _ = tick.tick() => {
                    for id in due(self.shared) {
                        self.ask(id);
                    }
                    let now = self.shared.clock.now();
                    if self.sent.values().any(|sent| now.since(*sent) > self.shared.link.timeout()) {
                        return;
                    }
                }
                _ = dropped.changed() => return,
            }
        }
    }
}
