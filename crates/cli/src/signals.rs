//! The signals that this process gets: those that it passes on to its command, and those that end it.

use std::task::Poll;
use std::time::Duration;

use lockkeeper::Lockkeeper;
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

use crate::exit::{self, Failure};

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

/// A stream of the signals that reach this process.
pub struct SignalStream(Vec<(Signal, tokio::signal::unix::Signal)>);

impl SignalStream {
    /// Catches them from now on. A signal that was ignored when we were started (`nohup`, a background job) stays
    /// ignored: the command inherits that, as it would without us.
    pub fn forwarded() -> Result<Self, Failure> {
        let ignored = ignored_at_start();
        let wanted = FORWARDED.into_iter().filter(|s| ignored & (1 << (s.as_raw() - 1)) == 0);
        Self::of(wanted)
    }

    /// Catches those that are passed on to several commands. Ctrl-Z stops this process as it would without us: the commands are in groups
    /// of their own, and their watchdogs end them at their deadlines.
    pub fn forwarded_to_several() -> Result<Self, Failure> {
        let ignored = ignored_at_start();
        let stops = [Signal::TSTP, Signal::CONT];
        Self::of(
            FORWARDED.into_iter().filter(|s| !stops.contains(s) && ignored & (1 << (s.as_raw() - 1)) == 0),
        )
    }

    /// Catches what usually ends a program.
    pub fn ending() -> Result<Self, Failure> {
        Self::of([Signal::INT, Signal::TERM, Signal::HUP])
    }

    fn of(wanted: impl IntoIterator<Item = Signal>) -> Result<Self, Failure> {
        let open = |s: Signal| signal(SignalKind::from_raw(s.as_raw())).map(|stream| (s, stream));
        let streams: std::io::Result<Vec<_>> = wanted.into_iter().map(open).collect();
        streams.map(SignalStream).map_err(|e| {
            Failure::new(lockkeeper::Outcome::Unavailable, format!("signals cannot be caught: {e}"))
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

    /// Waits for the releases in the background after a signal, and returns the exit code. An unreachable store delays it for two
    /// seconds at most, and a second signal ends it at once.
    pub async fn flush_releases(&mut self, keeper: &Lockkeeper, ended: Signal) -> i32 {
        tokio::select! {
            () = keeper.settle() => {}
            _ = self.next_ending() => {}
            () = tokio::time::sleep(LEAVING) => {}
        }
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

/// The signals that were ignored when this process was started, as a bit set.
fn ignored_at_start() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rfind(')').map(|end| stat[end + 1..].split_whitespace());
    // Field 33 of proc(5), counted from the third, which comes right after the name.
    let raw = fields.and_then(|mut f| f.nth(30)).and_then(|f| f.parse().ok()).unwrap_or(0);
    // SIGPIPE is ignored by Rust itself.
    raw & !(1 << (Signal::PIPE.as_raw() - 1))
}
