//! The thread that has the file: what callers want changed it does together, in one transaction after another.

use std::cell::OnceCell;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use lockkeeper_core::table::Now;
use lockkeeper_core::{Acquired, Attempt, Claim, Error, EventStream, LockName, Moment, Result};
use lockkeeper_host::{Process, Timer, random_128, while_busy};

use crate::batch::Request;
use crate::events::Watchers;
use crate::fault::{commit_fault, fault};
use crate::floor::Floor;
use crate::locals::{Local, Locals, Teller};
use crate::open::{Database, begin};
use crate::pending::{Call, Pending};
use crate::place::{Identity, Medium};
use crate::post::{Peer, Post};
use crate::tx::{After, Home, State, Tx};
use crate::waker::{Wake, Waker};
use crate::{Options, gather, open, script};

/// What the worker is told to do.
pub(crate) enum Job {
    /// Something a caller wants changed.
    Request(Request),
    /// Something a caller wants to know.
    Call(Call),
    /// Something happened outside.
    Wake(Wake),
    /// A lease, a delay or somebody's patience ends now.
    Alarm,
    /// The store is closed.
    Stop,
}

pub(crate) struct Worker {
    options: Options,
    db: Database,
    home: Home,
    pub locals: Locals,
    pub watchers: Watchers,
    /// Names of ours that somebody else has now, or nobody: what we watch for them is out of date.
    pub stale: BTreeSet<LockName>,
    /// Asks whose place was in a file that is not there any more.
    strays: Vec<Local>,
    pub pending: Pending,
    /// How many requests of the last transaction were answered with it.
    pub answered: usize,
    /// Names that are to be looked at, a few at a time: others get their turn in between.
    pub looking: VecDeque<LockName>,
    /// Requests that may still be in a queue, because they could not be taken out of it.
    unreleased: HashMap<Attempt, Claim>,
    withdraw_at: Option<Moment>,
    waker: Option<Waker>,
    alarm: Option<(Moment, Timer)>,
    /// When we last looked for what is due.
    pub looked: Moment,
    jobs: mpsc::Sender<Job>,
    wakes: Arc<AtomicU64>,
    count: u32,
    /// What another boot left behind has been dropped, if there was any.
    this_boot: bool,
    /// Whether a commit waits for the disk, as the connection is set now.
    durable: bool,
}

/// After how long a request is taken out of a queue that could not be taken out of it before.
const WITHDRAW: Duration = Duration::from_secs(1);
/// How many transactions a short command makes at most. Others let the log grow longer before they copy it.
const SHORT: u32 = 256;

impl Worker {
    pub fn open(mut options: Options, jobs: mpsc::Sender<Job>, wakes: Arc<AtomicU64>) -> Result<Self> {
        let boot = lockkeeper_host::boot_id().map_err(|e| {
            let why = format!("this machine does not tell one boot from another: {e}");
            // Out of descriptors, for instance, which passes.
            let lasting = e.kind() == std::io::ErrorKind::NotFound;
            if lasting { Error::Unsupported(why) } else { Error::Unavailable(why) }
        })?;
        // A relative path means another file after the program has changed its directory.
        options.path = std::path::absolute(&options.path)
            .map_err(|e| Error::invalid(format!("{}: {e}", options.path.display())))?;
        let db = Database::open(&options, boot.as_deref().unwrap_or_default())?;
        let random = random_128();
        let home = at_home(&db, random, boot)?;
        Ok(Worker {
            options,
            db,
            home,
            locals: Locals::default(),
            watchers: Watchers::default(),
            stale: BTreeSet::new(),
            strays: Vec::new(),
            pending: Pending::default(),
            answered: 0,
            looking: VecDeque::new(),
            unreleased: HashMap::new(),
            withdraw_at: None,
            waker: None,
            alarm: None,
            looked: Moment::default(),
            jobs,
            wakes,
            // Short-lived processes tidy up now and then as well: each begins to count somewhere else.
            count: u32::from(random[0] % 16),
            this_boot: false,
            durable: true,
        })
    }

    /// What it stands on, and what a user should know of it.
    pub fn medium(&self) -> Medium {
        let mut medium = self.db.medium.clone();
        if self.home.boot.is_none() {
            medium.notes.push(
                "this container masks the identity of the boot: after a reboot of the machine, locks that were held \
                 before end with their ttl"
                    .into(),
            );
        }
        medium
    }

    pub fn run(mut self, jobs: &mpsc::Receiver<Job>) {
        let mut stop = false;
        while !stop {
            if self.pending.is_empty() && self.looking.is_empty() {
                let Some(job) = gather::next_job(jobs, self.answered > 0) else { return };
                stop |= self.take_up(job);
            }
            stop |= self.gather(jobs);
            self.next_batch();
            self.guarded(Worker::look_further);
            if !self.strays.is_empty() {
                self.guarded(Worker::stand_again);
            }
            self.guarded(Worker::catch_up);
        }
        while !self.pending.is_empty() {
            self.next_batch();
        }
        self.guarded(Worker::close);
    }

    /// Whether it was the last.
    pub fn take_up(&mut self, job: Job) -> bool {
        match job {
            Job::Request(request) => self.pending.push(request, &self.locals),
            Job::Call(call) => self.pending.push_call(call),
            Job::Wake(wake) => self.guarded(|worker| worker.wake(&wake)),
            Job::Alarm => {
                self.alarm = None;
                self.guarded(|worker| worker.look(&[], false));
            }
            Job::Stop => return true,
        }
        false
    }

    /// A panic is a bug; it costs this job, and not everybody else's locks.
    fn guarded(&mut self, work: impl FnOnce(&mut Worker)) {
        let _ = catch_unwind(AssertUnwindSafe(|| work(self)));
    }

    fn next_batch(&mut self) {
        let (mut batch, call) = self.pending.next();
        if !self.unreleased.is_empty() {
            for request in &batch {
                if let Request::Acquire { ask, .. } = request {
                    self.unreleased.remove(&ask.claim.attempt);
                }
            }
            if !batch.is_empty() || self.withdraw_at.is_some_and(|at| at <= self.now()) {
                batch.extend(self.unreleased.drain().map(|(_, claim)| Request::Withdraw(claim)));
                self.withdraw_at = None;
            }
        }
        self.answered = 0;
        self.guarded(|worker| worker.run_batch(batch));
        if let Some(call) = call {
            self.guarded(call);
        }
        if self.withdraw_at.is_some() {
            self.guarded(Worker::rearm);
        }
    }

    /// It could not be taken out of the queue, where it would hold up everybody behind it.
    pub fn withdraw_later(&mut self, claim: Claim) {
        self.withdraw_at = Some(self.now() + WITHDRAW);
        self.unreleased.insert(claim.attempt, claim);
    }

    pub fn withdraw_at(&self) -> Option<Moment> {
        self.withdraw_at
    }

    fn time(&self) -> Now {
        Now { moment: self.options.clock.now(), wall: self.options.clock.wall() }
    }

    /// Begins a transaction on the file that the path leads to now. Going on with a file that was deleted or replaced
    /// would be a second set of the same locks.
    fn begin(&mut self, writes: bool) -> Result<()> {
        for _ in 0..64 {
            if !self.db.sql.is_autocommit() {
                let _ = script::run(&self.db.sql, "ROLLBACK");
            }
            begin(&self.db.sql, writes)?;
            if self.db.is_in_place(&self.options.path) {
                return Ok(());
            }
            let _ = script::run(&self.db.sql, "ROLLBACK");
            self.reopen()?;
        }
        Err(Error::Unavailable(format!("{} is replaced again and again", self.options.path.display())))
    }

    fn reopen(&mut self) -> Result<()> {
        self.db.save_lost_log();
        let db = Database::open(&self.options, self.home.boot.as_deref().unwrap_or_default())?;
        let same = db.identity == self.db.identity;
        self.db = db;
        (self.this_boot, self.durable) = (false, true);
        self.count %= 16;
        if same {
            tracing::warn!(path = %self.options.path.display(), "somebody deleted the log of the file or its index");
            return Ok(());
        }
        tracing::warn!(path = %self.options.path.display(), "the file was deleted or replaced: its locks are lost");
        self.waker = None;
        self.home = at_home(&self.db, random_128(), self.home.boot.clone())?;
        self.watchers.feed.miss();
        self.watchers.cursor = 0;
        let lost = self.locals.take_all();
        self.strays.extend(lost);
        Ok(())
    }

    /// Whether nothing of another boot is left, found out without the write lock: whoever only looks must not wait
    /// for somebody who writes.
    fn is_of_this_boot(&mut self) -> Result<bool> {
        self.begin(false)?;
        let (now, state) = (self.now(), State::read(&self.db.sql));
        let _ = script::run(&self.db.sql, "ROLLBACK");
        self.this_boot = !state?.0.is_of_another_boot(self.home.boot.as_deref(), now);
        Ok(self.this_boot)
    }

    /// Looks, and mends what is found amiss, such as a holder that died. If it cannot be mended now, because somebody
    /// keeps the write lock, what was seen has to do.
    pub fn look_at<T>(&mut self, work: impl Fn(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        let (seen, amiss) = self.read(&work)?;
        if !amiss {
            return Ok(seen);
        }
        let mended = self.write(false, |tx| {
            work(tx)?;
            tx.serve()?;
            work(tx)
        });
        if matches!(mended, Err(Error::Unavailable(_))) { Ok(seen) } else { mended }
    }

    /// A transaction that only looks. The second answer: it found something that a writer has to mend.
    pub fn read<T>(&mut self, work: impl FnOnce(&mut Tx<'_>) -> Result<T>) -> Result<(T, bool)> {
        if !self.this_boot && !self.is_of_this_boot()? {
            self.write(true, |_| Ok(()))?;
        }
        let sent = self.options.clock.now();
        self.begin(false)?;
        let now = self.time();
        let mut tx = Tx::new(&self.db.sql, &self.home, &self.locals, false, sent, now);
        let done = work(&mut tx);
        let due = tx.due;
        let _ = script::run(&self.db.sql, "ROLLBACK");
        Ok((done?, due))
    }

    /// A transaction that changes something, and then passes on what came of it. `durable`: it will most likely have to
    /// be on the disk before anybody is told.
    pub fn write<T>(&mut self, durable: bool, work: impl FnOnce(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        let (done, after) = self.commit(durable, work)?;
        self.pass_on(after);
        Ok(done)
    }

    pub fn commit<T>(
        &mut self,
        durable: bool,
        work: impl FnOnce(&mut Tx<'_>) -> Result<T>,
    ) -> Result<(T, After)> {
        // Stopped in here (Ctrl-Z), this process would keep the write lock, and everybody out.
        let _busy = while_busy();
        let sent = self.options.clock.now();
        self.set_durable(durable)?;
        self.begin(true)?;
        self.count = self.count.wrapping_add(1);
        let now = self.time();
        let mut tx = Tx::new(&self.db.sql, &self.home, &self.locals, true, sent, now);
        let tidy = self.count.is_multiple_of(16);
        let done = (|| {
            tx.load()?;
            let done = work(&mut tx)?;
            if tidy {
                tx.tidy()?;
            }
            tx.serve()?;
            tx.nudge_watchers()?;
            tx.save()?;
            Ok(done)
        })();
        let after = tx.after;
        let end = match done {
            Ok(_) => script::run(&self.db.sql, "COMMIT").map_err(commit_fault),
            Err(_) => Ok(()),
        };
        if !self.db.sql.is_autocommit() {
            let _ = script::run(&self.db.sql, "ROLLBACK");
        }
        let done = done?;
        end?;
        if after.durable && !durable {
            self.sync()?;
        }
        self.this_boot = true;
        if self.count == SHORT {
            let _ = script::set_pragma(&self.db.sql, "wal_autocheckpoint", open::LONG_LOG);
        }
        Ok((done, after))
    }

    /// Lets the next commit wait for the disk, or not. The log is written in order: what did not wait is on the disk
    /// before anything later that did.
    fn set_durable(&mut self, durable: bool) -> Result<()> {
        if self.durable != durable {
            let level = if durable { open::FULL } else { open::NORMAL };
            script::set_pragma(&self.db.sql, "synchronous", level).map_err(fault)?;
            self.durable = durable;
        }
        Ok(())
    }

    /// Brings to the disk what was committed without waiting for it.
    fn sync(&mut self) -> Result<()> {
        let unknown = |e: Error| Error::Unknown(format!("a power cut could still take it back: {e}"));
        self.set_durable(true).map_err(unknown)?;
        begin(&self.db.sql, true).map_err(unknown)?;
        let done = script::run(&self.db.sql, script::TOUCH_STATE)
            .and_then(|()| script::run(&self.db.sql, "COMMIT"))
            .map_err(|e| unknown(fault(e)));
        if !self.db.sql.is_autocommit() {
            let _ = script::run(&self.db.sql, "ROLLBACK");
        }
        done
    }

    pub fn pass_on(&mut self, after: After) {
        let mut gone: Vec<Peer> = Vec::new();
        for (peer, words) in &after.nudges {
            if !words.iter().all(|word| self.home.post.nudge(peer, *word)) {
                gone.push(*peer);
            }
        }
        for (ticket, answer) in after.answers {
            let Some(local) = self.locals.remove(ticket) else { continue };
            self.tell(local.tell, answer);
        }
        self.stale.extend(after.changed.into_iter().filter(|name| self.locals.first(name).is_some()));
        if !gone.is_empty() {
            // Whoever was to be served next is served now.
            let _ = self.write(true, |tx| gone.iter().try_for_each(|peer| tx.bury_peer(peer)));
        }
        if after.events && self.watchers.feed.any() {
            self.pass_on_events();
        }
    }

    /// Answers a request. If its caller left without a word, the next in the queue must not wait for its ttl.
    pub fn tell(&mut self, tell: Teller, answer: Result<Acquired>) {
        if let Err(Ok(Acquired::Granted(grant))) = tell.send(answer) {
            let (tell, _) = tokio::sync::oneshot::channel();
            self.pending.push(Request::Release { claim: grant.claim, tell }, &self.locals);
        }
    }

    /// Nobody waits for this request any more.
    pub fn forget(&mut self, claim: &Claim) {
        self.locals.forget(&claim.attempt);
        self.strays.retain(|stray| stray.ask.claim.attempt != claim.attempt);
    }

    pub fn watch(&mut self, prefix: &str) -> Result<EventStream> {
        let newest = self.write(false, |tx| tx.start_watching())?;
        if !self.watchers.feed.any() {
            self.watchers.cursor = newest;
        }
        let stream = self.watchers.feed.add(prefix);
        self.start_waker()?;
        self.rearm();
        Ok(stream)
    }

    fn close(&mut self) {
        // A file that is gone is not made again only to say goodbye.
        let there = Identity::of(&self.options.path) == Some(self.db.identity);
        if there && self.home.mailbox.get().is_some() {
            let peer = self.home.peer;
            let _ = self.write(false, |tx| tx.bury_peer(&peer));
        }
        if there && self.count > SHORT {
            let _ = script::checkpoint(&self.db.sql, "PASSIVE");
        }
        self.waker = None;
    }

    pub fn start_waker(&mut self) -> Result<()> {
        if self.waker.is_none() {
            let mailbox = self.home.mailbox()?;
            self.waker = Some(Waker::start(mailbox, self.jobs.clone(), self.wakes.clone())?);
        }
        Ok(())
    }

    pub fn set_alarm(&mut self, next: Option<Moment>) {
        if self.alarm.as_ref().map(|(at, _)| *at) == next {
            return;
        }
        self.alarm = next.map(|at| {
            let jobs = self.jobs.clone();
            let ring = move || drop(jobs.send(Job::Alarm));
            (at, self.options.clock.call_at(at, Box::new(ring)))
        });
    }

    pub fn now(&self) -> Moment {
        self.options.clock.now()
    }

    pub fn home(&self) -> &Home {
        &self.home
    }

    pub fn ring(&self) {
        let _ = self.jobs.send(Job::Alarm);
    }

    pub fn set_guards(&mut self) {
        let active = !self.locals.is_empty() || self.watchers.feed.any();
        if let Some(waker) = &self.waker {
            waker.set(self.locals.changed_guards(), active);
        }
    }

    /// Our pipe was taken away: others take us for dead. We come back under a new name.
    pub fn move_house(&mut self) {
        self.waker = None;
        self.home.peer = random_128();
        self.home.mailbox = OnceCell::new();
        let lost = self.locals.take_all();
        self.strays.extend(lost);
    }

    pub fn take_strays(&mut self) -> Vec<Local> {
        std::mem::take(&mut self.strays)
    }
}

fn at_home(db: &Database, peer: Peer, boot: Option<String>) -> Result<Home> {
    let process = Process::this()
        .map_err(|e| Error::Unavailable(format!("/proc does not tell which process this is: {e}")))?;
    Ok(Home {
        peer,
        process,
        boot,
        floor: Floor::beside(&db.path),
        post: Post::beside(&db.path),
        mailbox: OnceCell::new(),
    })
}
