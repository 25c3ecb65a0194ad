//! The wake thread of a store with waiters or watchers. It sleeps until another process writes into the pipe of this
//! store, a watched process ends, or the next poll is due, and reports that to the worker.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lockkeeper_core::{Error, IgnorePoison, Result};
use lockkeeper_host::{Process, random_128};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::codec::QueueTicket;
use crate::waiters::WatchedProcess;
use crate::wake_pipe::{EVENTS_WRITTEN, POLL, RELOAD, WakePipe};

/// How many processes the kernel watches at most (a pidfd each). The poll finds the end of any others.
const MAX_WATCHED: usize = 256;

/// A report of the wake thread to the worker.
#[derive(Debug, Default)]
pub(crate) struct WakeReport {
    /// Tickets of waiters that may be granted their locks now.
    pub tickets: Vec<QueueTicket>,
    /// The worker has to check every name with waiters: a process ended, or the poll is due.
    pub all: bool,
    /// The poll is due: the worker also checks that its pipe still exists.
    pub poll: bool,
}

#[derive(Debug, Default)]
struct WakeTargets {
    processes: HashMap<Process, Arc<OwnedFd>>,
    /// Whether the store has waiters or watchers: without them the thread does not poll.
    active: bool,
    stop: bool,
}

#[derive(Debug)]
pub(crate) struct WakeThread {
    wake_pipe: Arc<WakePipe>,
    targets: Arc<Mutex<WakeTargets>>,
}

impl WakeThread {
    /// `report` returns whether the worker still runs. `wakes` counts the wake-ups by other processes.
    pub fn start(
        wake_pipe: Arc<WakePipe>,
        report: impl Fn(WakeReport) -> bool + Send + 'static,
        wakes: Arc<AtomicU64>,
    ) -> Result<Self> {
        let targets = Arc::new(Mutex::new(WakeTargets { active: true, ..WakeTargets::default() }));
        let (mine, shared) = (wake_pipe.clone(), targets.clone());
        std::thread::Builder::new()
            .name("lockkeeper-wake".into())
            .stack_size(256 << 10)
            .spawn(move || run(&mine, &shared, report, &wakes))
            .map_err(|e| Error::Unavailable(format!("no thread can be started: {e}")))?;
        Ok(WakeThread { wake_pipe, targets })
    }

    /// Replaces the watched processes. `None`: they stay the same.
    pub fn set(&self, wanted: Option<BTreeSet<WatchedProcess>>, active: bool) {
        let mut targets = self.targets.lock().ignore_poison();
        let Some(wanted) = wanted else {
            if std::mem::replace(&mut targets.active, active) != active {
                drop(targets);
                self.wake_pipe.send_to_self(RELOAD);
            }
            return;
        };
        let as_key = |p: &Process| (p.pid, p.start, p.namespace);
        let known: BTreeSet<_> = targets.processes.keys().map(as_key).collect();
        let fresh: Vec<_> = wanted.difference(&known).take(MAX_WATCHED.saturating_sub(known.len())).collect();
        if fresh.is_empty() && known.is_subset(&wanted) && targets.active == active {
            return;
        }
        targets.active = active;
        targets.processes.retain(|process, _| wanted.contains(&as_key(process)));
        for (pid, start, namespace) in fresh.into_iter().copied() {
            let process = Process { pid, start, namespace };
            if let Some(fd) = process.watch() {
                targets.processes.insert(process, Arc::new(fd));
            }
        }
        drop(targets);
        self.wake_pipe.send_to_self(RELOAD);
    }
}

impl Drop for WakeThread {
    fn drop(&mut self) {
        self.targets.lock().ignore_poison().stop = true;
        self.wake_pipe.send_to_self(RELOAD);
    }
}

fn run(
    wake_pipe: &WakePipe,
    targets: &Mutex<WakeTargets>,
    report: impl Fn(WakeReport) -> bool,
    wakes: &AtomicU64,
) {
    let mut next = Instant::now() + jittered();
    loop {
        let (processes, active) = {
            let targets = targets.lock().ignore_poison();
            if targets.stop {
                return;
            }
            (targets.processes.clone(), targets.active)
        };
        let ended = sleep(wake_pipe, &processes, active.then_some(next));
        if !ended.is_empty() {
            // The descriptor of an ended process stays readable, and would wake this thread again and again.
            let mut targets = targets.lock().ignore_poison();
            targets.processes.retain(|process, _| !ended.contains(process));
        }
        let messages: Vec<u64> =
            wake_pipe.read_messages().into_iter().filter(|message| *message != RELOAD).collect();
        if !messages.is_empty() {
            wakes.fetch_add(1, Ordering::Relaxed);
        }
        let polled = active && Instant::now() >= next;
        if polled {
            // This thread and not the worker: a worker that waits for a busy file is alive.
            wake_pipe.mark_alive();
        }
        if polled || !active {
            next = Instant::now() + jittered();
        }
        let events = messages.contains(&EVENTS_WRITTEN);
        let tickets: Vec<_> =
            messages.iter().filter(|w| **w != EVENTS_WRITTEN).map(|w| w.cast_signed()).collect();
        if polled || events || !tickets.is_empty() || !ended.is_empty() {
            let all = polled || !ended.is_empty();
            if !report(WakeReport { tickets, all, poll: polled }) {
                return;
            }
        }
    }
}

/// Sleeps until a message comes, a process ends or `until` is reached. Returns the processes that ended.
fn sleep(
    wake_pipe: &WakePipe,
    processes: &HashMap<Process, Arc<OwnedFd>>,
    until: Option<Instant>,
) -> Vec<Process> {
    let order: Vec<_> = processes.iter().collect();
    let mut fds = vec![PollFd::new(wake_pipe.pipe(), PollFlags::IN)];
    fds.extend(order.iter().map(|(_, fd)| PollFd::new(fd.as_ref(), PollFlags::IN)));
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let timeout = left
        .map(|left| Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() });
    let _ = poll(&mut fds, timeout.as_ref());
    let ended = order.iter().zip(&fds[1..]).filter(|(_, fd)| !fd.revents().is_empty());
    ended.map(|((process, _), _)| (*process).clone()).collect()
}

/// The poll interval with a jitter of a fifth, so that a thousand processes do not poll at the same moment.
fn jittered() -> Duration {
    let dice = u32::from(random_128()[0]);
    POLL * 4 / 5 + POLL * 2 / 5 * dice / 256
}
