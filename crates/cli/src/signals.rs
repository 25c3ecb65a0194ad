//! The signals that are ours to pass on.

use std::task::Poll;
use std::time::Duration;

use lockkeeper::Lockkeeper;
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

use crate::exit::{self, Failure};

/// What is passed on to the command, and what ends a wait.
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

/// How long what was asked for is given back after a signal. A store that does not answer until then has a ttl.
const LEAVING: Duration = Duration::from_secs(2);

/// A stream of the signals that reach this process.
pub struct Signals(Vec<(Signal, tokio::signal::unix::Signal)>);

impl Signals {
    /// Catches them from now on. A signal that was ignored when we were started (`nohup`, a background job) stays
    /// ignored: the command inherits that, as it would without us.
    pub fn forwarded() -> Result<Self, Failure> {
        let ignored = ignored_at_start();
        let wanted = FORWARDED.into_iter().filter(|s| ignored & (1 << (s.as_raw() - 1)) == 0);
        Self::of(wanted)
    }

    /// Catches what usually ends a program.
    pub fn ending() -> Result<Self, Failure> {
        Self::of([Signal::INT, Signal::TERM, Signal::HUP])
    }

    fn of(wanted: impl IntoIterator<Item = Signal>) -> Result<Self, Failure> {
        let open = |s: Signal| signal(SignalKind::from_raw(s.as_raw())).map(|stream| (s, stream));
        let streams: std::io::Result<Vec<_>> = wanted.into_iter().map(open).collect();
        streams.map(Signals).map_err(|e| {
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

    /// What `work` gives, unless a signal that ends programs comes first: then `work` is dropped.
    pub async fn or_end<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Signal> {
        tokio::select! {
            biased;
            value = work => Ok(value),
            signal = self.end() => Err(signal),
        }
    }

    /// Gives back what was asked for, after a signal, and returns the exit code. Neither an unreachable store nor a second
    /// signal is waited for.
    pub async fn leave(&mut self, keeper: &Lockkeeper, ended: Signal) -> i32 {
        tokio::select! {
            () = keeper.settle() => {}
            _ = self.end() => {}
            () = tokio::time::sleep(LEAVING) => {}
        }
        exit::by_signal(ended.as_raw())
    }

    /// The next one that ends a program which does nothing about it.
    pub async fn end(&mut self) -> Signal {
        loop {
            let signal = self.next().await;
            if !matches!(signal, Signal::CONT | Signal::WINCH | Signal::TSTP) {
                return signal;
            }
            if signal == Signal::TSTP {
                // Caught for the command's sake; without one it means what it always means.
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
