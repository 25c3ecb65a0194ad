//! The one thread of a process that waits or watches: it sleeps until another process writes into our pipe, a process
//! that is in our way ends, or it is time to look behind all this. It does nothing itself but tell the worker.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use lockkeeper_core::{Error, Result};
use lockkeeper_host::{Process, random_128};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::line::Guard;
use crate::post::{Mailbox, NEWS, POLL, RELOAD};
use crate::rows::Ticket;
use crate::worker::Job;

/// The processes whose end is told by the kernel; with more of them the poll has to do.
const GUARDS: usize = 256;

/// What woke us.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    /// Asks that may be served now.
    pub tickets: Vec<Ticket>,
    /// Look at every line: a process ended, or it is time.
    pub all: bool,
    /// It is time to look whether all is in place.
    pub poll: bool,
}

#[derive(Debug, Default)]
struct Watch {
    guards: HashMap<Process, Arc<OwnedFd>>,
    /// Somebody waits or watches: otherwise there is nothing to poll for.
    active: bool,
    stop: bool,
}

#[derive(Debug)]
pub(crate) struct Waker {
    mailbox: Arc<Mailbox>,
    watch: Arc<Mutex<Watch>>,
}

impl Waker {
    pub fn start(mailbox: Arc<Mailbox>, jobs: mpsc::Sender<Job>, wakes: Arc<AtomicU64>) -> Result<Self> {
        let watch = Arc::new(Mutex::new(Watch { active: true, ..Watch::default() }));
        let (mine, shared) = (mailbox.clone(), watch.clone());
        std::thread::Builder::new()
            .name("lockkeeper-wake".into())
            .stack_size(256 << 10)
            .spawn(move || run(&mine, &shared, &jobs, &wakes))
            .map_err(|e| Error::Unavailable(format!("no thread can be started: {e}")))?;
        Ok(Waker { mailbox, watch })
    }

    /// Watches these processes from now on, and no others. `None`: the same as before.
    pub fn set(&self, wanted: Option<BTreeSet<Guard>>, active: bool) {
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(wanted) = wanted else {
            if std::mem::replace(&mut watch.active, active) != active {
                drop(watch);
                self.mailbox.say(RELOAD);
            }
            return;
        };
        let as_key = |p: &Process| (p.pid, p.start, p.namespace);
        let known: BTreeSet<_> = watch.guards.keys().map(as_key).collect();
        let fresh: Vec<_> = wanted.difference(&known).take(GUARDS.saturating_sub(known.len())).collect();
        if fresh.is_empty() && known.is_subset(&wanted) && watch.active == active {
            return;
        }
        watch.active = active;
        watch.guards.retain(|process, _| wanted.contains(&as_key(process)));
        for (pid, start, namespace) in fresh.into_iter().copied() {
            let process = Process { pid, start, namespace };
            if let Some(fd) = process.watch() {
                watch.guards.insert(process, Arc::new(fd));
            }
        }
        drop(watch);
        self.mailbox.say(RELOAD);
    }
}

impl Drop for Waker {
    fn drop(&mut self) {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner).stop = true;
        self.mailbox.say(RELOAD);
    }
}

fn run(mailbox: &Mailbox, watch: &Mutex<Watch>, jobs: &mpsc::Sender<Job>, wakes: &AtomicU64) {
    let mut next = Instant::now() + jittered();
    loop {
        let (guards, active) = {
            let watch = watch.lock().unwrap_or_else(PoisonError::into_inner);
            if watch.stop {
                return;
            }
            (watch.guards.clone(), watch.active)
        };
        let ended = sleep(mailbox, &guards, active.then_some(next));
        if !ended.is_empty() {
            // An ended process stays ended: its descriptor would wake us for ever.
            let mut watch = watch.lock().unwrap_or_else(PoisonError::into_inner);
            watch.guards.retain(|process, _| !ended.contains(process));
        }
        let words: Vec<u64> = mailbox.words().into_iter().filter(|word| *word != RELOAD).collect();
        if !words.is_empty() {
            wakes.fetch_add(1, Ordering::Relaxed);
        }
        let polled = active && Instant::now() >= next;
        if polled {
            // From here and not from the worker: who waits for a busy file is well.
            mailbox.touch();
        }
        if polled || !active {
            next = Instant::now() + jittered();
        }
        let news = words.contains(&NEWS);
        let tickets: Vec<_> = words.iter().filter(|w| **w != NEWS).map(|w| w.cast_signed()).collect();
        if polled || news || !tickets.is_empty() || !ended.is_empty() {
            let wake = Wake { tickets, all: polled || !ended.is_empty(), poll: polled };
            if jobs.send(Job::Wake(wake)).is_err() {
                return;
            }
        }
    }
}

/// Sleeps until something happens; returns the processes that ended.
fn sleep(mailbox: &Mailbox, guards: &HashMap<Process, Arc<OwnedFd>>, until: Option<Instant>) -> Vec<Process> {
    let order: Vec<_> = guards.iter().collect();
    let mut fds = vec![PollFd::new(mailbox.pipe(), PollFlags::IN)];
    fds.extend(order.iter().map(|(_, fd)| PollFd::new(fd.as_ref(), PollFlags::IN)));
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let timeout = left
        .map(|left| Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() });
    let _ = poll(&mut fds, timeout.as_ref());
    let ended = order.iter().zip(&fds[1..]).filter(|(_, fd)| !fd.revents().is_empty());
    ended.map(|((process, _), _)| (*process).clone()).collect()
}

/// Give or take a fifth, so that a thousand processes do not look at the same moment.
fn jittered() -> Duration {
    let dice = u32::from(random_128()[0]);
    POLL * 4 / 5 + POLL * 2 / 5 * dice / 256
}
