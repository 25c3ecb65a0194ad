//! Acquires the lock of `run` and `hold`, and reports the holder and the position in the queue while it waits.

use std::pin::pin;
use std::time::Duration;

use lockkeeper::{Clock, Guard, LockName, LockView, Lockkeeper, Outcome, SystemClock};
use rustix::process::Signal;
use serde_json::json;
use tokio::time::{Instant, sleep, sleep_until};

use crate::args::LockArgs;
use crate::exit::ExitFailure;
use crate::message_writer;
use crate::report::{Report, describe_holder, describe_wait};
use crate::signals::SignalStream;
use crate::store;
use crate::text::quoted;

/// How long to wait before the first look at the holder: a free lock is granted long before this.
const BEFORE_LOOKING: Duration = Duration::from_millis(200);
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);
const FRAME: Duration = Duration::from_millis(120);
const FRAMES: [&str; 8] = ["⠋", "⠙", "⠸", "⢰", "⣠", "⣄", "⡆", "⠇"];

/// Acquires the lock, or returns why not. With a `wait`, retries within it while the store is unreachable. Without one the request waits
/// for ever: once it may be in the queue, an outage does not end the wait. `is_repeated`: an earlier request
/// of this call was granted, and an outage came before its command was started.
pub async fn acquire_lock(
    keeper: &Lockkeeper,
    request: &LockArgs,
    label: Option<String>,
    wait: Option<Duration>,
    is_repeated: bool,
    report: &Report,
    signals: &mut SignalStream,
) -> Result<Guard, ExitFailure> {
    if request.skip {
        let answer = async {
            match request.builder(keeper, label, wait).try_acquire().await? {
                Some(guard) => Ok(guard),
                None => Err(skipped(keeper, request, report).await),
            }
        };
        return match signals.race(answer).await {
            Ok(answer) => answer,
            Err(signal) => Err(end_by_signal(keeper, report, signals, signal).await),
        };
    }
    let end = wait.map(|wait| SystemClock.now() + wait);
    let (mut reported, mut sent) = (false, is_repeated);
    loop {
        let builder = request.builder(keeper, label.clone(), end.map(store::left));
        let answer = {
            let look = pin!(report_while_waiting(keeper, request, report));
            let acquire = async {
                tokio::select! {
                    biased;
                    answer = builder.acquire() => answer,
                    never = look => never,
                }
            };
            signals.race(acquire).await
            // Dropped here, the lock request leaves the queue in the background.
        };
        let error = match answer {
            Ok(Ok(guard)) => return Ok(guard),
            Ok(Err(error)) => error,
            Err(signal) => return Err(end_by_signal(keeper, report, signals, signal).await),
        };
        let passes = matches!(error.outcome(), Outcome::Unavailable | Outcome::Unknown);
        sent |= error.outcome() == Outcome::Unknown;
        let over = end.map_or(!sent, |end| SystemClock.now() >= end);
        if !passes || over {
            if error.outcome() == Outcome::Busy {
                report.event("busy", json!({ "outcome": "busy", "exit_code": Outcome::Busy.exit_code() }));
            }
            return Err(error.into());
        }
        if !reported {
            report.say(&format!("{error}; asking again"));
            reported = true;
        }
        report.event("retry", json!({ "why": error.to_string() }));
        let pause = end.map_or(BETWEEN_LOOKS, |end| BETWEEN_LOOKS.min(store::left(end)));
        if let Err(signal) = signals.race(sleep(pause)).await {
            return Err(end_by_signal(keeper, report, signals, signal).await);
        }
    }
}

/// The failure of a wait that a signal ended.
async fn end_by_signal(
    keeper: &Lockkeeper,
    report: &Report,
    signals: &mut SignalStream,
    signal: Signal,
) -> ExitFailure {
    let code = signals.flush_releases(keeper, signal).await;
    report.event("left", json!({ "signal": signal.as_raw(), "exit_code": code }));
    ExitFailure::silent(code)
}

/// Reports the holder while the request waits. Never completes; the caller drops it when the lock is granted.
async fn report_while_waiting<T>(keeper: &Lockkeeper, request: &LockArgs, report: &Report) -> T {
    sleep(BEFORE_LOOKING).await;
    let spinner = report.is_live().then(Spinner::new);
    let mut reported = None;
    loop {
        // An error here is not reported: the lock request reports its own errors.
        if let Ok(Some((view, position))) = look(keeper, request).await {
            let holders: Vec<_> =
                view.held.iter().map(|h| (h.fence, h.holder.clone(), h.lingering)).collect();
            if reported.as_ref() != Some(&holders) {
                report.waiting(&view, position, spinner.is_some());
                reported = Some(holders);
            }
            if let Some(spinner) = &spinner {
                spinner.turn(&view, position).await;
                continue;
            }
        }
        sleep(BETWEEN_LOOKS).await;
    }
}

/// The first of the names that another process holds, and this process's position in its queue.
async fn look(
    keeper: &Lockkeeper,
    request: &LockArgs,
) -> Result<Option<(LockView, Option<usize>)>, lockkeeper::Error> {
    let host = lockkeeper_host::host_name();
    let pid = std::process::id();
    for name in request.names().map(LockName::as_str) {
        let Some(view) = keeper.inspect(name).await? else { continue };
        if view.held.is_empty() && view.delayed_ms.is_none() {
            continue;
        }
        let ours = view.queue.iter().position(|q| q.holder.pid == pid && q.holder.host == host);
        return Ok(Some((view, ours.map(|i| i + 1))));
    }
    Ok(None)
}

/// The failure of a lock request with `--skip` whose lock is busy.
async fn skipped(keeper: &Lockkeeper, request: &LockArgs, report: &Report) -> ExitFailure {
    let code = Outcome::Busy.exit_code();
    let (message, held) = match look(keeper, request).await {
        Ok(Some((view, _))) => (
            format!("skipped: {} is {}", quoted(view.name.as_str()), describe_holder(&view)),
            json!(view.held),
        ),
        _ => (format!("skipped: another process held {} a moment ago", report.what()), json!([])),
    };
    report.event("skipped", json!({ "held_by": held, "outcome": "busy", "exit_code": code }));
    // With --skip and --quiet a busy lock is no error to print: the exit code says it.
    if report.is_quiet() {
        ExitFailure::silent(code.into())
    } else {
        ExitFailure::new(Outcome::Busy, message)
    }
}

/// One line on the terminal that is drawn over and over, and wiped away at the end.
struct Spinner {
    started: Instant,
}

impl Spinner {
    fn new() -> Self {
        Spinner { started: Instant::now() }
    }

    /// Turns until it is time to look again.
    async fn turn(&self, view: &LockView, position: Option<usize>) {
        let until = Instant::now() + BETWEEN_LOOKS;
        while Instant::now() < until {
            let frame = (self.started.elapsed().as_millis() / FRAME.as_millis()) as usize % FRAMES.len();
            self.draw(&format!("{} {}", FRAMES[frame], describe_wait(view, position)));
            sleep_until((Instant::now() + FRAME).min(until)).await;
        }
    }

    fn draw(&self, line: &str) {
        // Some terminals do not know their size.
        let size = rustix::termios::tcgetwinsize(std::io::stderr()).map_or(0, |size| size.ws_col);
        let width = if size == 0 { 80 } else { size.max(20) };
        // A line that wraps could not be drawn over.
        let fits: String = crate::text::cut(line, usize::from(width) - 1);
        message_writer::STDERR.enqueue_if_idle(format!("\r\x1b[2K{fits}"));
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        message_writer::STDERR.enqueue("\r\x1b[2K".into());
    }
}
