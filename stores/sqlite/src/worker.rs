//! The worker: uses the file. It runs the requests of all callers in batches, one transaction after another. Usually it runs on
//! the worker's thread; see `shared_worker.rs`.

use std::collections::{BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use lockkeeper_core::{AcquireOutcome, BootInstant, Error, EventStream, LockName, RequestKey, Result};
use lockkeeper_host::{BusySection, Timer, while_busy};
use tokio::sync::oneshot;

use crate::config::Options;
use crate::events::Watchers;
use crate::own_grants::OwnGrants;
use crate::pending::PendingWork;
use crate::profile::StorageInfo;
use crate::requests::WriteRequest;
use crate::session::{Begin, FileSession};
use crate::transaction::{PostCommit, Tx};
use crate::unknown::UnknownOutcomes;
use crate::waiters::{LocalWaiter, ReplySender, Waiters};
use crate::wake_pipe::Peer;
use crate::wake_thread::{WakeReport, WakeThread};

/// A function that runs on the worker's thread, for instance to read from the file.
pub(crate) type WorkerCall = Box<dyn FnOnce(&mut Worker) + Send>;

/// A message to the worker.
pub(crate) enum WorkerMessage {
    /// A caller wants to change something.
    Request(WriteRequest),
    /// A caller wants to read something.
    Call(WorkerCall),
    /// The wake thread reports a message, the end of a process, or its poll.
    Wake(WakeReport),
    /// A lease, a lock-delay or a wait ends now.
    Timer,
    /// A caller's thread has left work for the worker's.
    Continue,
    /// The store is closed.
    Stop,
}

/// A writing transaction that has begun.
pub(crate) struct BegunWrite {
    /// The time before it began.
    sent: BootInstant,
    sync_in_commit: bool,
    /// A process that Ctrl-Z stops inside a transaction would keep the write lock from all other processes.
    _busy: BusySection,
}

pub(crate) struct Worker {
    session: FileSession,
    pub waiters: Waiters,
    pub watchers: Watchers,
    /// Names with waiters here whose holders have changed: their wake conditions are stale.
    pub stale_names: BTreeSet<LockName>,
    /// Waiters whose queue entries were in a file that is gone.
    pub displaced: Vec<LocalWaiter>,
    pending: PendingWork<WorkerCall>,
    /// How many requests of the last batch the worker has answered: their callers may send more within a moment.
    pub answered: usize,
    /// Names whose waiters are checked a few at a time, with requests in between.
    pub names_to_check: VecDeque<LockName>,
    unknown: UnknownOutcomes,
    wake_thread: Option<WakeThread>,
    timer: Option<(BootInstant, Timer)>,
    pub own_grants: Arc<OwnGrants>,
    /// When the worker last checked its waiters.
    pub last_check: BootInstant,
    messages: mpsc::Sender<WorkerMessage>,
    wakes: Arc<AtomicU64>,
}

impl Worker {
    pub fn open(
        options: Options,
        messages: mpsc::Sender<WorkerMessage>,
        wakes: Arc<AtomicU64>,
        own_grants: Arc<OwnGrants>,
    ) -> Result<Self> {
        Ok(Worker {
            session: FileSession::open(options)?,
            waiters: Waiters::default(),
            watchers: Watchers::default(),
            stale_names: BTreeSet::new(),
            displaced: Vec::new(),
            pending: PendingWork::default(),
            answered: 0,
            names_to_check: VecDeque::new(),
            unknown: UnknownOutcomes::default(),
            wake_thread: None,
            timer: None,
            own_grants,
            last_check: BootInstant::default(),
            messages,
            wakes,
        })
    }

    pub fn storage(&self) -> StorageInfo {
        self.session.storage()
    }

    /// Returns whether the worker has to stop.
    pub fn handle_message(&mut self, message: WorkerMessage) -> bool {
        match message {
            WorkerMessage::Request(request) => self.pending.push(request, &self.waiters),
            WorkerMessage::Call(call) => self.pending.push_call(call),
            WorkerMessage::Wake(report) => self.catch_panic(|worker| worker.handle_wake(&report)),
            WorkerMessage::Timer => {
                self.timer = None;
                self.catch_panic(|worker| worker.check_waiters(&[], false));
            }
            WorkerMessage::Continue => {}
            WorkerMessage::Stop => return true,
        }
        false
    }

    /// Runs `work`. A panic is a bug; it costs the callers of this work their answers, and no other caller a lock.
    pub fn catch_panic(&mut self, work: impl FnOnce(&mut Worker)) {
        let _ = catch_unwind(AssertUnwindSafe(|| work(self)));
    }

    /// Whether it has no work that has come already.
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.names_to_check.is_empty() && !self.session.has_long_log()
    }

    /// Whether it also has no waiters to look after.
    pub fn is_at_rest(&self) -> bool {
        self.is_idle() && self.displaced.is_empty() && self.stale_names.is_empty()
    }

    /// Whether a request would run alone, and nothing but its caller waits for its end.
    pub fn is_free_for_caller(&self) -> bool {
        self.is_at_rest()
            && self.unknown.is_empty()
            && self.waiters.is_empty()
            && !self.watchers.hub.any()
            && self.session.has_quick_disk()
    }

    #[cfg(test)]
    pub fn assume_quick_disk(&self) {
        self.session.assume_disk(true);
    }

    #[cfg(test)]
    pub fn assume_slow_disk(&self) {
        self.session.assume_disk(false);
    }

    /// Whether as many requests are pending as the worker has just answered.
    pub fn has_full_batch(&self) -> bool {
        self.pending.len() >= self.answered
    }

    /// Runs the next batch, and what it leaves.
    pub fn run_pending(&mut self) {
        self.run_next_batch();
        self.catch_panic(Worker::check_some_names);
        if !self.displaced.is_empty() {
            self.catch_panic(Worker::enqueue_displaced);
        }
        self.catch_panic(Worker::refresh_stale);
        if self.session.has_long_log() {
            self.session.checkpoint();
        }
    }

    /// Runs all that is left before the store is closed.
    pub fn finish(&mut self) {
        while !self.pending.is_empty() {
            self.run_next_batch();
        }
        self.catch_panic(Worker::close);
    }

    /// Runs one request now, unless that would have to wait for another process. Then it returns the request.
    pub fn run_at_once(&mut self, request: WriteRequest) -> Option<WriteRequest> {
        let mut request = Some(request);
        self.answered = 0;
        self.catch_panic(|worker| {
            let Some(begun) = worker.begin_write_at_once() else { return };
            let alone = request.take().into_iter().collect();
            worker.run_requests(begun, alone);
        });
        // The worker's thread need not wait for the next request.
        self.answered = 0;
        request
    }

    fn run_next_batch(&mut self) {
        let (mut batch, call) = self.pending.next_batch();
        if !self.unknown.is_empty() {
            for request in &batch {
                if let WriteRequest::Acquire { request, .. } = request {
                    self.unknown.forget(&request.key.attempt);
                }
            }
            if !batch.is_empty() || self.unknown.retry_at().is_some_and(|at| at <= self.now()) {
                batch.extend(self.unknown.take_all().map(WriteRequest::Withdraw));
            }
        }
        self.answered = 0;
        self.session.note_batch(batch.len());
        let began = Instant::now();
        self.catch_panic(|worker| worker.run_batch(batch));
        self.pending.adapt(began.elapsed());
        if let Some(call) = call {
            self.catch_panic(call);
        }
        if self.unknown.retry_at().is_some() {
            self.catch_panic(Worker::rearm);
        }
    }

    /// Remembers a request that a failed transaction may have left in the queue.
    pub fn withdraw_later(&mut self, key: RequestKey) {
        self.unknown.add(self.now(), key);
    }

    pub fn withdraw_at(&self) -> Option<BootInstant> {
        self.unknown.retry_at()
    }

    /// Begins a transaction on the file to which the path leads now.
    pub fn begin(&mut self, writes: bool) -> Result<()> {
        for _ in 0..64 {
            match self.session.begin(writes)? {
                Begin::Begun => return Ok(()),
                Begin::Reopened => {}
                Begin::Replaced => {
                    self.wake_thread = None;
                    self.watchers.hub.miss();
                    self.watchers.cursor = 0;
                    self.displace_waiters();
                }
            }
        }
        Err(Error::Unavailable(format!("{} is replaced again and again", self.session.path().display())))
    }

    /// Opens the file again while no caller uses this process, if its log or index was deleted: until then no other process
    /// can open it.
    pub fn reopen_if_files_were_lost(&mut self) {
        if self.session.has_lost_files() && self.begin(false).is_ok() {
            self.session.rollback();
        }
    }

    fn check_boot(&mut self) -> Result<bool> {
        self.begin(false)?;
        self.session.check_boot()
    }

    /// Reads, and then repairs what the reading transaction found, such as the hold of a dead process. If another process
    /// keeps the write lock, the result is what was read.
    pub fn inspect_and_repair<T>(&mut self, work: impl Fn(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        let (seen, needs_write) = self.read(&work)?;
        if !needs_write {
            return Ok(seen);
        }
        let repaired = self.write(|tx| {
            work(tx)?;
            tx.grant_waiters()?;
            work(tx)
        });
        if matches!(repaired, Err(Error::Unavailable(_))) { Ok(seen) } else { repaired }
    }

    /// Runs a reading transaction. The second value says whether it found something that only a writing one can do.
    pub fn read<T>(&mut self, work: impl FnOnce(&mut Tx<'_>) -> Result<T>) -> Result<(T, bool)> {
        if !self.session.knows_this_boot() && !self.check_boot()? {
            self.write(|_| Ok(()))?;
        }
        let sent = self.now();
        self.begin(false)?;
        self.session.run_read(&self.waiters, sent, work)
    }

    /// Runs a writing transaction and what follows its commit.
    pub fn write<T>(&mut self, work: impl FnOnce(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        let begun = self.begin_write(false)?;
        let (done, after) = self.finish_write(begun, work)?;
        self.finish_commit(after);
        Ok(done)
    }

    /// `sync_in_commit`: see [`WriteRequest::syncs_in_commit`].
    pub fn begin_write(&mut self, sync_in_commit: bool) -> Result<BegunWrite> {
        let _busy = while_busy();
        let sent = self.now();
        self.session.set_sync_in_commit(sync_in_commit)?;
        self.begin(true)?;
        Ok(BegunWrite { sent, sync_in_commit, _busy })
    }

    /// The same, unless it would have to wait for another process.
    fn begin_write_at_once(&mut self) -> Option<BegunWrite> {
        let _busy = while_busy();
        let sent = self.now();
        self.session.set_sync_in_commit(false).ok()?;
        self.session.begin_at_once().then_some(BegunWrite { sent, sync_in_commit: false, _busy })
    }

    /// Runs `work` in the transaction that has begun, commits it, and waits for the disk if a caller's answer depends on it.
    pub fn finish_write<T>(
        &mut self,
        begun: BegunWrite,
        work: impl FnOnce(&mut Tx<'_>) -> Result<T>,
    ) -> Result<(T, PostCommit)> {
        let (done, after) = self.session.run_write(&self.waiters, begun.sent, work)?;
        let waits_for_disk = after.durable || begun.sync_in_commit;
        drop(begun);
        if waits_for_disk && let Err(error) = self.session.sync() {
            self.finish_unsynced(after, &error);
            return Err(error);
        }
        self.session.repair_log();
        Ok((done, after))
    }

    /// After a commit that may not be on the disk: no caller learns of its grants, so the worker releases them.
    fn finish_unsynced(&mut self, mut after: PostCommit, error: &Error) {
        for key in std::mem::take(&mut after.granted) {
            let (reply, _) = oneshot::channel();
            self.pending.push(WriteRequest::Release { key, reply }, &self.waiters);
        }
        for (_, answer) in &mut after.replies {
            *answer = Err(error.clone());
        }
        self.finish_commit(after);
    }

    /// After a commit: wakes other processes, answers waiters of this one, and delivers events.
    pub fn finish_commit(&mut self, after: PostCommit) {
        let mut gone: Vec<Peer> = Vec::new();
        for (peer, messages) in &after.wakes {
            if !messages.iter().all(|message| self.session.identity().pipes.wake(peer, *message)) {
                gone.push(*peer);
            }
        }
        for (ticket, answer) in after.replies {
            let Some(waiter) = self.waiters.remove(ticket) else { continue };
            self.reply_to_acquire(waiter.reply, answer);
        }
        self.stale_names.extend(after.changed.into_iter().filter(|name| self.waiters.first(name).is_some()));
        if !gone.is_empty() {
            // This transaction also wakes the waiters that were behind the dead ones.
            let _ = self.write(|tx| gone.iter().try_for_each(|peer| tx.remove_dead_peer(peer)));
        }
        if after.events && self.watchers.hub.any() {
            self.deliver_events();
        }
    }

    /// Answers a lock request. If its caller has gone, the worker releases the grant, so that the next waiter does not
    /// wait for the end of its lease.
    pub fn reply_to_acquire(&mut self, reply: ReplySender, answer: Result<AcquireOutcome>) {
        if let Ok(AcquireOutcome::Granted(grant)) = &answer {
            self.own_grants.add(grant.key.attempt, grant.sent_at + grant.lease);
        }
        if let Err(Ok(AcquireOutcome::Granted(grant))) = reply.send(answer) {
            let (reply, _) = oneshot::channel();
            self.pending.push(WriteRequest::Release { key: grant.key, reply }, &self.waiters);
        }
    }

    /// Forgets a request that no caller waits for any more.
    pub fn forget_request(&mut self, key: &RequestKey) {
        self.waiters.remove_attempt(&key.attempt);
        self.displaced.retain(|waiter| waiter.request.key.attempt != key.attempt);
    }

    pub fn watch(&mut self, prefix: &str) -> Result<EventStream> {
        let newest = self.write(|tx| tx.start_watching())?;
        if !self.watchers.hub.any() {
            self.watchers.cursor = newest;
        }
        let stream = self.watchers.hub.add(prefix);
        self.start_wake_thread()?;
        self.rearm();
        Ok(stream)
    }

    fn close(&mut self) {
        // A transaction would create a deleted file again, and a checkpoint would go by a deleted index.
        if self.session.is_in_place() && self.has_pipe() {
            let peer = self.peer();
            let _ = self.write(|tx| tx.remove_dead_peer(&peer));
        }
        if self.session.is_in_place() {
            self.session.checkpoint_at_end();
        } else if let Err(error) = self.session.save_lost_log() {
            tracing::warn!(%error, "the newest commits of this process are lost: the log was deleted and could not be saved");
        }
        self.wake_thread = None;
    }

    pub fn start_wake_thread(&mut self) -> Result<()> {
        if self.wake_thread.is_none() {
            let wake_pipe = self.session.identity().wake_pipe()?;
            let messages = self.messages.clone();
            let report = move |report| messages.send(WorkerMessage::Wake(report)).is_ok();
            self.wake_thread = Some(WakeThread::start(wake_pipe, report, self.wakes.clone())?);
        }
        Ok(())
    }

    pub fn set_timer(&mut self, next: Option<BootInstant>) {
        if self.timer.as_ref().map(|(at, _)| *at) == next {
            return;
        }
        self.timer = next.map(|at| {
            let messages = self.messages.clone();
            let fire = move || drop(messages.send(WorkerMessage::Timer));
            (at, self.session.options().clock.call_at(at, Box::new(fire)))
        });
    }

    pub fn now(&self) -> BootInstant {
        self.session.now()
    }

    pub fn peer(&self) -> Peer {
        self.session.identity().peer
    }

    fn has_pipe(&self) -> bool {
        self.session.identity().wake_pipe.get().is_some()
    }

    /// Whether another program has deleted the pipe of this store.
    pub fn has_lost_pipe(&self) -> bool {
        self.session.identity().wake_pipe.get().is_some_and(|wake_pipe| !wake_pipe.is_in_place())
    }

    /// Makes the worker check its waiters after the messages that it has already received.
    pub fn wake_self(&self) {
        let _ = self.messages.send(WorkerMessage::Timer);
    }

    pub fn update_watched_processes(&mut self) {
        let active = !self.waiters.is_empty() || self.watchers.hub.any();
        if let Some(wake_thread) = &self.wake_thread {
            wake_thread.set(self.waiters.changed_processes(), active);
        }
    }

    /// Takes a new identity with a new pipe. Without its pipe other processes take this store for dead.
    pub fn recreate_pipe(&mut self) {
        self.wake_thread = None;
        self.session.renew_identity();
        self.displace_waiters();
    }

    fn displace_waiters(&mut self) {
        let lost = self.waiters.take_all();
        self.displaced.extend(lost);
    }
}
