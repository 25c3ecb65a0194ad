//! The signals that this process gets: those that it passes on to its command, and those that end it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use lockkeeper::Lockkeeper;
use nix::sys::signal::SigSet;
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

use crate::exit::{self, ExitFailure};

/// The signals that are passed on to the command. Some of them end a wait.
const FORWARDED: [Signal; 9] = [
    Signal::INT,
    Signal::TERM,
    Signal::HUP,
    Signal::QUIT,
    Signal::USR1,
    Signal::USR2,
    Signal::TSTP,
    Signal::WINCH,
    Signal::CONT,
];

/// How long releases may take after a signal. If the store does not answer within it, the lock ends with its ttl.
const LEAVING: Duration = Duration::from_secs(2);

/// Whether a [`SignalStream`] takes Ctrl-Z, and passes it on to the command.
static TAKES_STOPS: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-Z stops this process where that harms no other process. The kernel would stop it anywhere, also in the middle of a
/// transaction, and every other process would wait until this one goes on.
///
/// A thread waits for the signal, because the main thread may be in a write to a pipe without a reader. Call it before other threads are
/// started: they must not take the signal. Not for a subcommand that runs a command, which would start with the signal blocked.
pub fn stop_between_transactions() {
    if is_ignored(Signal::TSTP) {
        return;
    }
    let mut stops = SigSet::empty();
    stops.add(nix::sys::signal::Signal::SIGTSTP);
    let wait = move || {
        while stops.wait().is_ok() {
            lockkeeper_host::stop_this_process();
        }
    };
    // Without a thread the kernel stops this process as usual.
    if stops.thread_block().is_ok() && std::thread::Builder::new().spawn(wait).is_err() {
        let _ = stops.thread_unblock();
    }
}

/// Unblocks the signals that this program may have blocked in this thread, which a command would inherit. Called right before this
/// process becomes the command. A signal that the caller of this program has blocked otherwise stays blocked, as with `env`.
pub fn unblock_for_command() {
    let mut ours = SigSet::empty();
    ours.add(nix::sys::signal::Signal::SIGTSTP);
    // A thread with a terminal blocks it, so that no write to the terminal stops it.
    ours.add(nix::sys::signal::Signal::SIGTTOU);
    let _ = ours.thread_unblock();
}

/// Runs `work` for a subcommand that runs a command. Until that takes Ctrl-Z itself, to pass it on, the signal stops this process where
/// that harms no other process.
pub async fn stoppable<T>(work: impl Future<Output = Result<T, ExitFailure>>) -> Result<T, ExitFailure> {
    let mut stops = SignalStream::of([Signal::TSTP])?;
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            biased;
            _ = stops.next() => {
                if !TAKES_STOPS.load(Ordering::Relaxed) {
                    lockkeeper_host::stop_this_process();
                }
            }
            result = &mut work => return result,
        }
    }
}

/// A stream of the signals that reach this process.
pub struct SignalStream(Vec<(Signal, tokio::signal::unix::Signal)>);

impl SignalStream {
    /// Catches them from now on, Ctrl-Z among them.
    pub fn forwarded() -> Result<Self, ExitFailure> {
        let streams = Self::of(FORWARDED)?;
        TAKES_STOPS.store(true, Ordering::Relaxed);
        Ok(streams)
    }

    /// Catches those that are passed on to several commands. Ctrl-Z stops only this process (see [`stoppable`]): the commands are in
    /// groups of their own, and their watchdogs end them at their deadlines.
    pub fn forwarded_to_several() -> Result<Self, ExitFailure> {
        let stops = [Signal::TSTP, Signal::CONT];
        Self::of(FORWARDED.into_iter().filter(|signal| !stops.contains(signal)))
    }

    /// The stream without one of its signals, which another stream handles.
    pub fn without(mut self, signal: Signal) -> Self {
        self.0.retain(|(other, _)| *other != signal);
        self
    }

    /// Catches what usually ends a program. Call it when the store is open: until then the signal should end this process at once.
    pub fn ending() -> Result<Self, ExitFailure> {
        Self::of([Signal::INT, Signal::TERM, Signal::HUP])
    }

    /// A signal that was ignored when this process was started (`nohup`, a background job) stays ignored, and a command inherits that.
    fn of(wanted: impl IntoIterator<Item = Signal>) -> Result<Self, ExitFailure> {
        let wanted = wanted.into_iter().filter(|signal| !is_ignored(*signal));
        let open = |s: Signal| signal(SignalKind::from_raw(s.as_raw())).map(|stream| (s, stream));
        let streams: std::io::Result<Vec<_>> = wanted.map(open).collect();
        streams.map(SignalStream).map_err(|e| {
            ExitFailure::new(lockkeeper::Outcome::Unavailable, format!("signals cannot be caught: {e}"))
        })
    }

    /// The next one.
    pub async fn next(&mut self) -> Signal {
        std::future::poll_fn(|cx| {
            for (signal, stream) in &mut self.0 {
                if stream.poll_recv(cx).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// The result of `work`, unless a signal that ends programs arrives first: then `work` is dropped.
    pub async fn race<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Signal> {
        tokio::select! {
            biased;
            value = work => Ok(value),
            signal = self.next_ending() => Err(signal),
        }
    }

    /// Waits for the releases in the background, of guards and permits that were dropped, before this process ends: a release that is not
    /// sent by then leaves the lock taken until its ttl ends. An unreachable store delays it for two seconds at most, and a signal ends it at
    /// once.
    pub async fn settle(&mut self, keeper: &Lockkeeper) {
        tokio::select! {
            () = keeper.settle() => {}
            _ = self.next_ending() => {}
            () = tokio::time::sleep(LEAVING) => {}
        }
    }

    /// The same after a signal. Returns the exit code.
    pub async fn flush_releases(&mut self, keeper: &Lockkeeper, ended: Signal) -> i32 {
        self.settle(keeper).await;
        exit::by_signal(ended.as_raw())
    }

    /// The next signal whose default action ends a program.
    pub async fn next_ending(&mut self) -> Signal {
        loop {
            let signal = self.next().await;
            if !matches!(signal, Signal::CONT | Signal::WINCH | Signal::TSTP) {
                return signal;
            }
            if signal == Signal::TSTP {
                // Caught to pass it on to a command; without a command it stops this process as usual.
                lockkeeper_host::stop_this_process();
            }
        }
    }
}

fn is_ignored(signal: Signal) -> bool {
    static AT_START: OnceLock<u64> = OnceLock::new();
    AT_START.get_or_init(ignored_at_start) & (1 << (signal.as_raw() - 1)) != 0
}

/// The signals that were ignored when this process was started, as a bit set.
fn ignored_at_start() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rfind(')').map(|end| stat[end + 1..].split_whitespace());
    // Field 33 of proc(5), counted from the third, which comes right after the name.
    let raw = fields.and_then(|mut f| f.nth(30)).and_then(|f| f.parse().ok()).unwrap_or(0);
    // SIGPIPE is ignored by Rust itself.
    raw & !(1 << (Signal::PIPE.as_raw() - 1))
}
