//! The thread that renews all guards of a keeper in batches, reports the ones that are lost, and releases
//! dropped locks. It is a thread of its own, so that a busy or finished runtime of the caller loses no
//! lock.

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lockkeeper_core::lease::{Lease, LeaseEffect, LeaseState, LossReason};
use lockkeeper_core::limit::{LimitOutcome, LimitRequest};
use lockkeeper_core::{BootInstant, Grant, RenewOutcome, RequestKey, Store};
use lockkeeper_host::{Clock, Timer, forbid_blocking, log_elsewhere, sleep_until};
use tokio::sync::{Notify, mpsc, oneshot};

use crate::background_releases::{
    BackgroundRelease, BackgroundReleases, release_for_ttl, release_until_done,
};
use crate::guard::GuardState;
use crate::metrics::RenewalFailure;

/// The handle to the driver's thread. The thread ends when the handle is dropped and the background
/// releases are done.
pub(crate) struct RenewalDriver {
    commands: mpsc::UnboundedSender<DriverCommand>,
    ids: AtomicU64,
    pid: u32,
}

impl Drop for RenewalDriver {
    fn drop(&mut self) {
        // In a fork the driver's thread does not exist, and closing the channel could wait for a lock that
        // the thread held at the fork. So leak the sender.
        if self.pid != std::process::id() {
            std::mem::forget(self.commands.clone());
        }
    }
}

enum DriverCommand {
    Add(u64, Box<TrackedGuard>),
    Progress(u64),
    Remove(u64),
    Release(BackgroundRelease),
    Refund(LimitRequest),
    Reserve(LimitRequest, oneshot::Sender<lockkeeper_core::Result<LimitOutcome>>),
    FlushReleases(oneshot::Sender<()>),
    Quiesce(oneshot::Sender<()>),
}

/// A guard that the driver renews.
struct TrackedGuard {
    grant: Grant,
    lease: Lease,
    shared: Arc<GuardState>,
    /// Its key in `due_times`.
    due: Option<BootInstant>,
}

impl Drop for TrackedGuard {
    /// Marks the guard as lost, however the driver ends, also by a panic, and also if it never read the
    /// command that adds the guard: a holder must not rely on a lock that is no longer renewed.
    fn drop(&mut self) {
        self.shared.set_state(LeaseState::Lost(LossReason::Abandoned));
    }
}

impl RenewalDriver {
    /// Starts the thread with all that it needs: it creates no thread and no descriptor later.
    pub fn start(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> std::io::Result<Self> {
        let (commands, receiver) = mpsc::unbounded_channel();
        let renewal_loop = RenewalLoop {
            store,
            clock,
            guards: HashMap::new(),
            due_times: BTreeSet::new(),
            renewals: FuturesUnordered::new(),
            releases: BackgroundReleases::default(),
            withdrawals: FuturesUnordered::new(),
            timer: None,
            wake: Arc::new(Notify::new()),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let run = move || {
            // Log on another thread, also for the store's renewals: a subscriber that blocks must not stop
            // the renewals.
            let _log = log_elsewhere();
            // Nor must a release on a disk that hangs.
            forbid_blocking();
            runtime.block_on(renewal_loop.run(receiver));
        };
        std::thread::Builder::new().name("lockkeeper".into()).spawn(run)?;
        Ok(RenewalDriver { commands, ids: AtomicU64::new(0), pid: std::process::id() })
    }

    pub fn add(&self, grant: Grant, lease: Lease, shared: Arc<GuardState>) -> u64 {
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let tracked = TrackedGuard { grant, lease, shared: shared.clone(), due: None };
        self.command(DriverCommand::Add(id, Box::new(tracked)));
        // A driver that ends later than this line reads the command, or drops it and so marks the guard as
        // lost.
        if self.commands.is_closed() {
            shared.set_state(LeaseState::Lost(LossReason::Abandoned));
        }
        id
    }

    // A driver that has ended has marked all its guards as lost, and can release nothing: the ttl ends
    // their locks.
    fn command(&self, command: DriverCommand) {
        let _ = self.commands.send(command);
    }

    pub fn progress(&self, id: u64) {
        self.command(DriverCommand::Progress(id));
    }

    pub fn remove(&self, id: u64) {
        self.command(DriverCommand::Remove(id));
    }

    /// Releases a grant in the background, for as long as its lease may last.
    pub fn release_later(&self, key: RequestKey, ttl: Duration) {
        self.command(DriverCommand::Release(BackgroundRelease { key, ttl, queued: false }));
    }

    /// Releases a request that may be queued or granted, in the background. A ttl does not end a queue
    /// entry, so the driver retries for as long as it runs; the store ends the entries of a process that
    /// has become silent.
    pub fn withdraw_later(&self, key: RequestKey, ttl: Duration) {
        self.command(DriverCommand::Release(BackgroundRelease { key, ttl, queued: true }));
    }

    /// Gives tokens of a rate limit back in the background, once.
    pub fn refund_later(&self, request: LimitRequest) {
        self.command(DriverCommand::Refund(request));
    }

    /// Sends a take that may wait. If the caller drops the receiver before the reply, the driver gives the tokens back.
    pub fn reserve(&self, request: LimitRequest) -> oneshot::Receiver<lockkeeper_core::Result<LimitOutcome>> {
        let (reply, outcome) = oneshot::channel();
        self.command(DriverCommand::Reserve(request, reply));
        outcome
    }

    /// Waits until every background release of before this call is done, or has failed for a ttl.
    pub async fn flush_releases(&self) {
        let (done, flushed) = oneshot::channel();
        self.command(DriverCommand::FlushReleases(done));
        let _ = flushed.await;
    }

    /// Waits until the driver has nothing to do before its clock advances.
    pub async fn quiesce(&self) {
        let (done, flushed) = oneshot::channel();
        self.command(DriverCommand::Quiesce(done));
        let _ = flushed.await;
    }
}

/// A batch of renewals: the guards, when it was sent, and the outcomes; or the store's error; or
/// `Err(None)` without a reply.
type RenewedBatch = (Vec<u64>, BootInstant, Result<Vec<RenewOutcome>, Option<(RenewalFailure, Arc<str>)>>);

struct RenewalLoop {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    guards: HashMap<u64, TrackedGuard>,
    due_times: BTreeSet<(BootInstant, u64)>,
    renewals: FuturesUnordered<Pin<Box<dyn Future<Output = RenewedBatch> + Send>>>,
    /// Releases that are retried for a ttl.
    releases: BackgroundReleases,
    /// Releases of requests that may be queued, after that ttl. Neither [`RenewalDriver::flush_releases`]
    /// nor the end of the thread waits for them.
    withdrawals: FuturesUnordered<Pin<Box<dyn Future<Output = ()> + Send>>>,
    timer: Option<(BootInstant, Timer)>,
    wake: Arc<Notify>,
}

impl RenewalLoop {
    async fn run(mut self, mut commands: mpsc::UnboundedReceiver<DriverCommand>) {
        let mut open = true;
        while open || !self.releases.is_empty() {
            self.set_timer();
            let wake = self.wake.clone();
            tokio::select! {
                // In this order: replies, then due guards, then new commands. So `Quiesce` is answered
                // after all that can be done now.
                biased;
                Some(batch) = self.renewals.next() => self.handle_replies(batch),
                Some(failed) = self.releases.next() => {
                    let (store, clock) = (self.store.clone(), self.clock.clone());
                    self.withdrawals.extend(failed.map(|release| Box::pin(release_until_done(store, clock, release)) as _));
                }
                Some(()) = self.withdrawals.next() => {}
                () = wake.notified() => {}
                command = commands.recv(), if open => match command {
                    Some(command) => self.handle_command(command),
                    None => open = false,
                },
            }
            self.renew_due();
        }
    }

    /// Sets the timer for the next due guard. It stays set over commands and replies that do not change
    /// that time.
    fn set_timer(&mut self) {
        let next = self.due_times.first().map(|(at, _)| *at);
        if self.timer.as_ref().map(|(at, _)| *at) != next {
            self.timer = next.map(|at| {
                let wake = self.wake.clone();
                (at, self.clock.call_at(at, Box::new(move || wake.notify_one())))
            });
        }
    }

    fn handle_command(&mut self, command: DriverCommand) {
        match command {
            DriverCommand::Add(id, tracked) => {
                self.guards.insert(id, *tracked);
                self.update_lease(id, |_, _| ());
            }
            DriverCommand::Progress(id) => {
                let now = self.clock.now();
                self.update_lease(id, |lease, _| lease.handle_progress(now));
            }
            DriverCommand::Remove(id) => {
                if let Some(tracked) = self.guards.remove(&id) {
                    tracked.due.map(|due| self.due_times.remove(&(due, id)));
                }
            }
            DriverCommand::Release(release) => {
                let (store, clock) = (self.store.clone(), self.clock.clone());
                self.releases.push(release_for_ttl(store, clock, release));
            }
            DriverCommand::Refund(request) => {
                let store = self.store.clone();
                // Once: a refund that may have happened must not happen twice.
                self.releases.push(async move { store.limit(&request).await.err().and(None) });
            }
            DriverCommand::Reserve(request, reply) => {
                let store = self.store.clone();
                self.releases.push(async move {
                    // A caller that is gone before the request is sent needs nothing.
                    if !reply.is_closed()
                        && let Err(Ok(outcome)) = reply.send(store.limit(&request).await)
                        && outcome.allowed
                    {
                        let _ = store.limit(&request.refund(&outcome)).await;
                    }
                    None
                });
            }
            DriverCommand::FlushReleases(reply) => self.releases.flush(reply),
            // Commands come last, so all that could be done at this moment is done.
            DriverCommand::Quiesce(reply) => _ = reply.send(()),
        }
    }

    /// Changes a lease and reports its effects to the guard. Returns whether the lease wants a renewal now.
    fn update_lease(&mut self, id: u64, work: impl FnOnce(&mut Lease, BootInstant)) -> bool {
        let Some(tracked) = self.guards.get_mut(&id) else { return false };
        let now = self.clock.now();
        work(&mut tracked.lease, now);
        tracked.shared.set_deadline(&tracked.lease);
        let mut renew = false;
        while let Some(effect) = tracked.lease.poll_effect() {
            match effect {
                LeaseEffect::SendRenew => renew = true,
                LeaseEffect::Tell(state) => tracked.shared.report(state),
            }
        }
        let due = tracked.lease.poll_timeout();
        if due != tracked.due {
            tracked.due.map(|due| self.due_times.remove(&(due, id)));
            due.map(|due| self.due_times.insert((due, id)));
            tracked.due = due;
        }
        renew
    }

    fn renew_due(&mut self) {
        let now = self.clock.now();
        let mut batch = Vec::new();
        let mut shortest = Duration::MAX;
        let due: Vec<u64> = self.due_times.range(..=(now, u64::MAX)).map(|(_, id)| *id).collect();
        for id in due {
            if self.update_lease(id, |lease, _| lease.handle_timeout(now)) {
                shortest = shortest.min(self.guards[&id].grant.ttl);
                batch.push(id);
            }
        }
        if batch.is_empty() {
            return;
        }
        // Renew guards that are due soon in the same batch.
        let due_soon: Vec<u64> =
            self.due_times.range(..(now + shortest / 12, 0)).map(|(_, id)| *id).collect();
        for id in due_soon {
            let mut renew_now = false;
            self.update_lease(id, |lease, now| renew_now = lease.renew_early(now));
            if renew_now {
                batch.push(id);
            }
        }
        self.send_renewals(batch, now, shortest);
    }

    fn send_renewals(&mut self, ids: Vec<u64>, sent_at: BootInstant, timeout: Duration) {
        let grants: Vec<Grant> = ids.iter().map(|id| self.guards[id].grant.clone()).collect();
        let (store, clock) = (self.store.clone(), self.clock.clone());
        self.renewals.push(Box::pin(async move {
            let answer = tokio::select! {
                answer = store.renew(&grants) => answer,
                // The leases ended this renewal long before; the timeout only removes a call that hangs.
                () = sleep_until(&*clock, sent_at + timeout) => return (ids, sent_at, Err(None)),
            };
            match answer {
                Ok(answers) if answers.len() == ids.len() => (ids, sent_at, Ok(answers)),
                Ok(_) => {
                    tracing::error!("the store returned another number of outcomes than renewals; the batch counts as unanswered and is sent again");
                    (ids, sent_at, Err(None))
                }
                Err(error) => {
                    tracing::warn!(%error, guards = ids.len(), "renewal failed; the guards stay valid until their deadlines and the renewal is retried");
                    (ids, sent_at, Err(Some((error.outcome().into(), error.to_string().into()))))
                }
            }
        }));
    }

    fn handle_replies(&mut self, (ids, sent_at, answers): RenewedBatch) {
        for (i, id) in ids.into_iter().enumerate() {
            if let (Err(error), Some(tracked)) = (&answers, self.guards.get(&id)) {
                let failure = error.as_ref().map_or(RenewalFailure::Unknown, |(failure, _)| *failure);
                tracked.shared.metrics.count_renewal_failure(failure);
            }
            self.update_lease(id, |lease, now| match &answers {
                Ok(all) => lease.handle_renewal(sent_at, now, Some(all[i].clone())),
                Err(Some((_, why))) => lease.handle_failure(now, why.clone()),
                Err(None) => lease.handle_renewal(sent_at, now, None),
            });
        }
    }
}
