//! The thread that keeps promises: it renews all guards of a keeper in batches, tells the ones that are lost, and
//! releases what was dropped. It has its own thread, so that a busy or a finished runtime of the user's loses no lock.

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lockkeeper_core::lease::{Effect, Lease, State, Why};
use lockkeeper_core::{Claim, Grant, Moment, Renewal, Store};
use lockkeeper_host::{Clock, Timer, log_elsewhere, sleep_until};
use tokio::sync::{Notify, mpsc, oneshot};

use crate::guard::Pulse;

/// The handle to the thread. The thread ends when the handle is gone and the releases it was left are done.
pub(crate) struct Driver {
    orders: mpsc::UnboundedSender<Order>,
    ids: AtomicU64,
    pid: u32,
}

impl Drop for Driver {
    fn drop(&mut self) {
        // In a fork the thread does not exist, and whoever woke it might wait for it.
        if self.pid != std::process::id() {
            std::mem::forget(self.orders.clone());
        }
    }
}

enum Order {
    Add(u64, Box<Ward>),
    Progress(u64),
    Remove(u64),
    Release(Giving),
    Settle(oneshot::Sender<()>),
    Quiesce(oneshot::Sender<()>),
}

/// A release that was left to the driver.
struct Giving {
    claim: Claim,
    ttl: Duration,
    /// The request may be queued.
    queued: bool,
}

/// One guard in the driver's care.
struct Ward {
    grant: Grant,
    lease: Lease,
    pulse: Arc<Pulse>,
    /// The key under which it stands in the timetable.
    due: Option<Moment>,
}

impl Drop for Ward {
    /// However the driver ends, also by a panic, and wherever the guard is then, also if its order was never read: nobody goes on
    /// believing in a lock that is not renewed any more.
    fn drop(&mut self) {
        self.pulse.tell(State::Lost(Why::Abandoned));
    }
}

impl Driver {
    /// Starts the thread; nothing that it needs is made later.
    pub fn start(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> std::io::Result<Self> {
        let (orders, inbox) = mpsc::unbounded_channel();
        let care = Care {
            store,
            clock,
            wards: HashMap::new(),
            timetable: BTreeSet::new(),
            renewals: FuturesUnordered::new(),
            releases: FuturesUnordered::new(),
            withdrawals: FuturesUnordered::new(),
            settling: Vec::new(),
            alarm: None,
            ring: Arc::new(Notify::new()),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let run = move || {
            // Also what the store has to say when it renews: a subscriber that blocks must not keep locks from being renewed.
            let _log = log_elsewhere();
            runtime.block_on(care.run(inbox));
        };
        std::thread::Builder::new().name("lockkeeper".into()).spawn(run)?;
        Ok(Driver { orders, ids: AtomicU64::new(0), pid: std::process::id() })
    }

    pub fn add(&self, grant: Grant, lease: Lease, pulse: Arc<Pulse>) -> u64 {
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let ward = Ward { grant, lease, pulse: pulse.clone(), due: None };
        self.order(Order::Add(id, Box::new(ward)));
        // A driver that ends later than this reads the order, or drops it and so loses the guard.
        if self.orders.is_closed() {
            pulse.tell(State::Lost(Why::Abandoned));
        }
        id
    }

    // A driver that is gone has told all its guards already, and cannot release either: the ttl is the last resort.
    fn order(&self, order: Order) {
        let _ = self.orders.send(order);
    }

    pub fn progress(&self, id: u64) {
        self.order(Order::Progress(id));
    }

    pub fn remove(&self, id: u64) {
        self.order(Order::Remove(id));
    }

    /// Releases a grant in the background, for as long as its lease may last.
    pub fn release_later(&self, claim: Claim, ttl: Duration) {
        self.order(Order::Release(Giving { claim, ttl, queued: false }));
    }

    /// Releases a request that may be queued, or granted, in the background. A ttl does not end a queue entry, so the driver tries for
    /// as long as it runs; the store ends the entries of a process that has gone silent.
    pub fn withdraw_later(&self, claim: Claim, ttl: Duration) {
        self.order(Order::Release(Giving { claim, ttl, queued: true }));
    }

    /// Waits until every release that was left to the driver is done, or has failed for a ttl.
    pub async fn settle(&self) {
        let (done, told) = oneshot::channel();
        self.order(Order::Settle(done));
        let _ = told.await;
    }

    /// Waits until the driver has nothing to do before its clock goes on.
    pub async fn quiesce(&self) {
        let (done, told) = oneshot::channel();
        self.order(Order::Quiesce(done));
        let _ = told.await;
    }
}

/// What became of the renewals of these guards, which were sent then.
type Batch = (Vec<u64>, Moment, Result<Vec<Renewal>, Option<Arc<str>>>);

struct Care {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    wards: HashMap<u64, Ward>,
    timetable: BTreeSet<(Moment, u64)>,
    renewals: FuturesUnordered<Pin<Box<dyn Future<Output = Batch> + Send>>>,
    /// Releases that are tried until the ttl is over.
    releases: FuturesUnordered<Pin<Box<dyn Future<Output = Option<Giving>> + Send>>>,
    /// Releases of requests that may be queued, after that. [`Driver::settle`] does not wait for them, nor does the end of the thread.
    withdrawals: FuturesUnordered<Pin<Box<dyn Future<Output = ()> + Send>>>,
    settling: Vec<oneshot::Sender<()>>,
    alarm: Option<(Moment, Timer)>,
    ring: Arc<Notify>,
}

impl Care {
    async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Order>) {
        let mut open = true;
        while open || !self.releases.is_empty() {
            self.set_alarm();
            let ring = self.ring.clone();
            tokio::select! {
                // In this order: answers, then what is due, then new orders. So whoever asks whether anything is left
                // to do at this moment is answered last.
                biased;
                Some(batch) = self.renewals.next() => self.take_answers(batch),
                Some(failed) = self.releases.next() => {
                    let (store, clock) = (self.store.clone(), self.clock.clone());
                    self.withdrawals.extend(failed.map(|giving| Box::pin(withdraw(store, clock, giving)) as _));
                }
                Some(()) = self.withdrawals.next() => {}
                () = ring.notified() => {}
                order = inbox.recv(), if open => match order {
                    Some(order) => self.take_order(order),
                    None => open = false,
                },
            }
            self.do_what_is_due();
            if self.releases.is_empty() {
                self.settling.drain(..).for_each(|told| _ = told.send(()));
            }
        }
    }

    /// The alarm stays set over orders and answers that do not change when something is due next.
    fn set_alarm(&mut self) {
        let next = self.timetable.first().map(|(at, _)| *at);
        if self.alarm.as_ref().map(|(at, _)| *at) != next {
            self.alarm = next.map(|at| {
                let ring = self.ring.clone();
                (at, self.clock.call_at(at, Box::new(move || ring.notify_one())))
            });
        }
    }

    fn take_order(&mut self, order: Order) {
        match order {
            Order::Add(id, ward) => {
                self.wards.insert(id, *ward);
                self.attend(id, |_, _| ());
            }
            Order::Progress(id) => {
                let now = self.clock.now();
                self.attend(id, |lease, _| lease.handle_progress(now));
            }
            Order::Remove(id) => {
                if let Some(ward) = self.wards.remove(&id) {
                    ward.due.map(|due| self.timetable.remove(&(due, id)));
                }
            }
            Order::Release(giving) => {
                let (store, clock) = (self.store.clone(), self.clock.clone());
                self.releases.push(Box::pin(release(store, clock, giving)));
            }
            Order::Settle(told) => self.settling.push(told),
            // Orders come last, so everything that could be done at this moment has been done.
            Order::Quiesce(told) => _ = told.send(()),
        }
    }

    /// Does something to a lease, then passes on what came of it. Returns whether it wants to be renewed now.
    fn attend(&mut self, id: u64, work: impl FnOnce(&mut Lease, Moment)) -> bool {
        let Some(ward) = self.wards.get_mut(&id) else { return false };
        let now = self.clock.now();
        work(&mut ward.lease, now);
        ward.pulse.set(&ward.lease);
        let mut renew = false;
        while let Some(effect) = ward.lease.poll_effect() {
            match effect {
                Effect::SendRenew => renew = true,
                Effect::Tell(state) => ward.pulse.tell(state),
            }
        }
        let due = ward.lease.poll_timeout();
        if due != ward.due {
            ward.due.map(|due| self.timetable.remove(&(due, id)));
            due.map(|due| self.timetable.insert((due, id)));
            ward.due = due;
        }
        renew
    }

    fn do_what_is_due(&mut self) {
        let now = self.clock.now();
        let mut batch = Vec::new();
        let mut shortest = Duration::MAX;
        let due: Vec<u64> = self.timetable.range(..=(now, u64::MAX)).map(|(_, id)| *id).collect();
        for id in due {
            if self.attend(id, |lease, _| lease.handle_timeout(now)) {
                shortest = shortest.min(self.wards[&id].grant.ttl);
                batch.push(id);
            }
        }
        if batch.is_empty() {
            return;
        }
        // Others that are due soon travel with them.
        let soon: Vec<u64> = self.timetable.range(..(now + shortest / 12, 0)).map(|(_, id)| *id).collect();
        for id in soon {
            let mut joins = false;
            self.attend(id, |lease, now| joins = lease.renew_early(now));
            if joins {
                batch.push(id);
            }
        }
        self.send_renewals(batch, now, shortest);
    }

    fn send_renewals(&mut self, ids: Vec<u64>, sent_at: Moment, patience: Duration) {
        let grants: Vec<Grant> = ids.iter().map(|id| self.wards[id].grant.clone()).collect();
        let (store, clock) = (self.store.clone(), self.clock.clone());
        self.renewals.push(Box::pin(async move {
            let answer = tokio::select! {
                answer = store.renew(&grants) => answer,
                // The leases have given up on it long before; this only keeps a hung call from staying for ever.
                () = sleep_until(&*clock, sent_at + patience) => return (ids, sent_at, Err(None)),
            };
            match answer {
                Ok(answers) if answers.len() == ids.len() => (ids, sent_at, Ok(answers)),
                Ok(_) => {
                    tracing::error!("the store gave another number of answers than there were renewals");
                    (ids, sent_at, Err(None))
                }
                Err(error) => {
                    tracing::warn!(%error, guards = ids.len(), "renewal failed, will be tried again");
                    (ids, sent_at, Err(Some(error.to_string().into())))
                }
            }
        }));
    }

    fn take_answers(&mut self, (ids, sent_at, answers): Batch) {
        for (i, id) in ids.into_iter().enumerate() {
            self.attend(id, |lease, now| match &answers {
                Ok(all) => lease.handle_renewal(sent_at, now, Some(all[i].clone())),
                Err(Some(error)) => lease.handle_failure(now, error.clone()),
                Err(None) => lease.handle_renewal(sent_at, now, None),
            });
        }
    }
}

/// The longest pause between two tries to release.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Releases, and tries again for a ttl. Returns a request that may be queued if that did not help; the lease of a grant is over by
/// then.
async fn release(store: Arc<dyn Store>, clock: Arc<dyn Clock>, giving: Giving) -> Option<Giving> {
    let give_up = clock.now() + giving.ttl;
    let released = release_until(&*store, &*clock, &giving, give_up).await;
    if released {
        return None;
    }
    let (names, queued) = (&giving.claim.names, giving.queued);
    tracing::warn!(%names, queued, "could not be released for a ttl; a grant has expired, a queued request is tried again");
    giving.queued.then_some(giving)
}

/// Releases, and tries again without end.
async fn withdraw(store: Arc<dyn Store>, clock: Arc<dyn Clock>, giving: Giving) {
    release_until(&*store, &*clock, &giving, Moment::NEVER).await;
}

async fn release_until(store: &dyn Store, clock: &dyn Clock, giving: &Giving, give_up: Moment) -> bool {
    let mut pause = Duration::from_millis(10);
    loop {
        let answer = tokio::select! {
            answer = store.release(&giving.claim) => answer,
            () = sleep_until(clock, give_up) => return false,
        };
        match answer {
            Ok(_) => return true,
            Err(error) => tracing::debug!(%error, names = %giving.claim.names, "release failed"),
        }
        if clock.now() >= give_up {
            return false;
        }
        sleep_until(clock, (clock.now() + pause).min(give_up)).await;
        pause = (pause * 2).min(giving.ttl / 10).min(PAUSE_MAX);
    }
}
