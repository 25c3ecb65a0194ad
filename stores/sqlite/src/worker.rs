//! The thread that has the file: it does one job after another, each in a transaction of its own.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};

use lockkeeper_core::table::Now;
use lockkeeper_core::{Acquired, Ask, Error, EventStream, LockName, Moment, Release, Result};
use lockkeeper_host::{Process, Timer, random_128};

use crate::events::Watchers;
use crate::fault::{commit_fault, fault};
use crate::hold::Answer;
use crate::locals::{Local, Locals, Teller};
use crate::open::{Database, begin};
use crate::place::Identity;
use crate::post::{Peer, Post};
use crate::tx::{After, Home, Tx};
use crate::waker::{Wake, Waker};
use crate::{Options, rows, script};

type Call = Box<dyn FnOnce(&mut Worker) + Send>;

/// What the worker is told to do.
pub(crate) enum Job {
    /// Something a caller wants.
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
    waker: Option<Waker>,
    alarm: Option<(Moment, Timer)>,
    /// When we last looked for what is due.
    pub looked: Moment,
    jobs: mpsc::Sender<Job>,
    wakes: Arc<AtomicU64>,
    count: u8,
    /// What another boot left behind has been dropped, if there was any.
    this_boot: bool,
}

impl Worker {
    pub fn open(mut options: Options, jobs: mpsc::Sender<Job>, wakes: Arc<AtomicU64>) -> Result<Self> {
        let boot = lockkeeper_host::boot_id().map_err(|e| {
            Error::Unsupported(format!("this machine does not tell one boot from another: {e}"))
        })?;
        // A relative path means another file after the program has changed its directory.
        options.path = std::path::absolute(&options.path)
            .map_err(|e| Error::invalid(format!("{}: {e}", options.path.display())))?;
        let db = Database::open(&options, &boot)?;
        let random = random_128();
        let home = at_home(&db, random, boot);
        Ok(Worker {
            options,
            db,
            home,
            locals: Locals::default(),
            watchers: Watchers::default(),
            stale: BTreeSet::new(),
            strays: Vec::new(),
            waker: None,
            alarm: None,
            looked: Moment::default(),
            jobs,
            wakes,
            // Short-lived processes tidy up now and then as well: each begins to count somewhere else.
            count: random[0],
            this_boot: false,
        })
    }

    pub fn notes(&self) -> &[String] {
        &self.db.notes
    }

    pub fn run(mut self, jobs: &mpsc::Receiver<Job>) {
        while let Ok(job) = jobs.recv() {
            let stop = matches!(job, Job::Stop);
            let work = || match job {
                Job::Call(call) => call(&mut self),
                Job::Wake(wake) => self.wake(&wake),
                Job::Alarm => {
                    self.alarm = None;
                    self.look(&[], false);
                }
                Job::Stop => self.close(),
            };
            // A panic is a bug; it costs this job, and not everybody else's locks.
            let _ = catch_unwind(AssertUnwindSafe(work));
            if stop {
                return;
            }
            if !self.strays.is_empty() {
                self.stand_again();
            }
            self.catch_up();
        }
    }

    fn time(&self) -> Now {
        Now { moment: self.options.clock.now(), wall: self.options.clock.wall() }
    }

    /// Begins a transaction on the file that the path leads to now. Going on with a file that was deleted or replaced
    /// would be a second set of the same locks.
    fn begin(&mut self, writes: bool) -> Result<()> {
        for _ in 0..8 {
            if !self.db.sql.is_autocommit() {
                let _ = script::run(&self.db.sql, "ROLLBACK");
            }
            begin(&self.db.sql, writes)?;
            if Identity::of(&self.options.path) == Some(self.db.identity) {
                return Ok(());
            }
            let _ = script::run(&self.db.sql, "ROLLBACK");
            self.reopen()?;
        }
        Err(Error::Unavailable(format!("{} is replaced again and again", self.options.path.display())))
    }

    fn reopen(&mut self) -> Result<()> {
        tracing::warn!(path = %self.options.path.display(), "the file was deleted or replaced: its locks are lost");
        let db = Database::open(&self.options, &self.home.boot)?;
        self.waker = None;
        self.home = at_home(&db, random_128(), self.home.boot.clone());
        self.db = db;
        self.this_boot = false;
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
        let boot = rows::one(&self.db.sql, script::BOOT, [], |row| row.get::<_, String>(0));
        let _ = script::run(&self.db.sql, "ROLLBACK");
        self.this_boot = boot.map_err(fault)?.is_some_and(|boot| boot == self.home.boot);
        Ok(self.this_boot)
    }

    /// Looks, and mends what is found amiss, such as a holder that died. If it cannot be mended now, because somebody
    /// keeps the write lock, what was seen has to do.
    pub fn look_at<T>(&mut self, work: impl Fn(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        let (seen, amiss) = self.read(&work)?;
        if !amiss {
            return Ok(seen);
        }
        let mended = self.write(|tx| {
            work(tx)?;
            tx.serve()?;
            work(tx)
        });
        if matches!(mended, Err(Error::Unavailable(_))) { Ok(seen) } else { mended }
    }

    /// A transaction that only looks. The second answer: it found something that a writer has to mend.
    pub fn read<T>(&mut self, work: impl FnOnce(&mut Tx<'_>) -> Result<T>) -> Result<(T, bool)> {
        if !self.this_boot && !self.is_of_this_boot()? {
            self.write(|_| Ok(()))?;
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

    /// A transaction that changes something, and then passes on what came of it.
    pub fn write<T>(&mut self, work: impl FnOnce(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        let (done, after) = self.commit(work)?;
        self.pass_on(after);
        Ok(done)
    }

    fn commit<T>(&mut self, work: impl FnOnce(&mut Tx<'_>) -> Result<T>) -> Result<(T, After)> {
        let sent = self.options.clock.now();
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
        self.this_boot = true;
        Ok((done, after))
    }

    fn pass_on(&mut self, after: After) {
        let mut gone: Vec<Peer> = Vec::new();
        for (peer, words) in &after.nudges {
            if !words.iter().all(|word| self.home.post.nudge(peer, *word)) {
                gone.push(*peer);
            }
        }
        for (ticket, answer) in after.answers {
            let Some(local) = self.locals.remove(ticket) else { continue };
            if let Err(Ok(Acquired::Granted(grant))) = local.tell.send(answer) {
                // It left without saying goodbye: the next in line must not wait for its ttl.
                let _ = self.write(|tx| tx.release(&grant.claim));
            }
        }
        self.stale.extend(after.changed.into_iter().filter(|name| self.locals.first(name).is_some()));
        if !gone.is_empty() {
            // Whoever was to be served next is served now.
            let _ = self.write(|tx| gone.iter().try_for_each(|peer| tx.bury_peer(peer)));
        }
        if after.events && self.watchers.feed.any() {
            self.pass_on_events();
        }
    }

    pub fn acquire(&mut self, ask: Ask, tell: Teller) {
        let (answer, after) = match self.commit(|tx| tx.ask(&ask)) {
            Ok(done) => done,
            Err(error) => return drop(tell.send(Err(error))),
        };
        match answer {
            Answer::Granted(grant) => drop(tell.send(Ok(Acquired::Granted(grant)))),
            Answer::Busy(busy) => drop(tell.send(Ok(Acquired::Busy(busy)))),
            Answer::Waiting(ticket, until) => {
                // Known here before anything else happens: a place that nobody knows of is given up.
                self.locals.add(ticket, Local { ask, until, tell });
                self.pass_on(after);
                return self.wait(ticket);
            }
        }
        self.pass_on(after);
    }

    pub fn release(&mut self, claim: &lockkeeper_core::Claim) -> Result<Release> {
        self.locals.forget(&claim.attempt);
        self.strays.retain(|stray| stray.ask.claim.attempt != claim.attempt);
        self.write(|tx| tx.release(claim))
    }

    pub fn watch(&mut self, prefix: &str) -> Result<EventStream> {
        let newest = self.write(|tx| tx.start_watching())?;
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
            let _ = self.write(|tx| tx.bury_peer(&peer));
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
            waker.set(&self.locals.guards(), active);
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

fn at_home(db: &Database, peer: Peer, boot: String) -> Home {
    Home {
        peer,
        process: Process::this(),
        boot,
        floor: db.floor.clone(),
        post: Post::beside(&db.path),
        mailbox: OnceCell::new(),
    }
}
