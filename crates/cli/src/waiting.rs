//! Getting the lock: at once if it is free, else with a word about who has it and where in line we are.

use std::pin::pin;
use std::time::Duration;

use lockkeeper::{Clock, Guard, LockName, LockView, Lockkeeper, Outcome, SystemClock};
use rustix::process::Signal;
use serde_json::json;
use tokio::time::{Instant, sleep, sleep_until};

use crate::args::Ask;
use crate::exit::Failure;
use crate::outlet;
use crate::report::{Report, held_line, waiting_line};
use crate::signals::Signals;
use crate::store;
use crate::text::quoted;

/// A free lock answers long before this; nobody is asked about before.
const BEFORE_LOOKING: Duration = Duration::from_millis(200);
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);
const FRAME: Duration = Duration::from_millis(120);
const FRAMES: [&str; 8] = ["⠋", "⠙", "⠸", "⢰", "⣠", "⣄", "⡆", "⠇"];

/// Gets what was asked for, or says why not. With a `wait`, a store that is unreachable for a while is asked again, within it.
pub async fn acquire(
    keeper: &Lockkeeper,
    ask: &Ask,
    label: Option<String>,
    wait: Option<Duration>,
    report: &Report,
    signals: &mut Signals,
) -> Result<Guard, Failure> {
    if ask.skip {
        return match ask.builder(keeper, label, wait).try_acquire().await? {
            Some(guard) => Ok(guard),
            None => Err(skipped(keeper, ask, report).await),
        };
    }
    let end = wait.map(|wait| SystemClock.now() + wait);
    let mut told = false;
    loop {
        let builder = ask.builder(keeper, label.clone(), end.map(store::left));
        let answer = {
            let look = pin!(tell_while_waiting(keeper, ask, report));
            let acquire = async {
                tokio::select! {
                    biased;
                    answer = builder.acquire() => answer,
                    never = look => never,
                }
            };
            signals.or_end(acquire).await
            // Dropped here, the lock request leaves the queue in the background.
        };
        let error = match answer {
            Ok(Ok(guard)) => return Ok(guard),
            Ok(Err(error)) => error,
            Err(signal) => return Err(left(keeper, report, signals, signal).await),
        };
        let passes = matches!(error.outcome(), Outcome::Unavailable | Outcome::Unknown);
        let over = end.is_none_or(|end| SystemClock.now() >= end);
        if !passes || over {
            if error.outcome() == Outcome::Busy {
                report.event("busy", json!({ "outcome": "busy", "exit_code": Outcome::Busy.exit_code() }));
            }
            return Err(error.into());
        }
        if !told {
            report.say(&format!("{error}; asking again"));
            told = true;
        }
        report.event("retry", json!({ "why": error.to_string() }));
        let pause = BETWEEN_LOOKS.min(end.map(store::left).unwrap_or_default());
        if let Err(signal) = signals.or_end(sleep(pause)).await {
            return Err(left(keeper, report, signals, signal).await);
        }
    }
}

/// A signal ended the wait.
async fn left(keeper: &Lockkeeper, report: &Report, signals: &mut Signals, signal: Signal) -> Failure {
    let code = signals.leave(keeper, signal).await;
    report.event("left", json!({ "signal": signal.as_raw(), "exit_code": code }));
    Failure::silent(code)
}

/// Tells who is in the way for as long as somebody is. Never ends; it is dropped when the lock is there.
async fn tell_while_waiting<T>(keeper: &Lockkeeper, ask: &Ask, report: &Report) -> T {
    sleep(BEFORE_LOOKING).await;
    let spinner = report.is_live().then(Spinner::new);
    let mut told = None;
    loop {
        // Trouble while looking is no trouble: the ask itself will tell.
        if let Ok(Some((view, position))) = look(keeper, ask).await {
            let holders: Vec<_> =
                view.held.iter().map(|h| (h.fence, h.holder.clone(), h.lingering)).collect();
            if told.as_ref() != Some(&holders) {
                report.waiting(&view, position, spinner.is_some());
                told = Some(holders);
            }
            if let Some(spinner) = &spinner {
                spinner.turn(&view, position).await;
                continue;
            }
        }
        sleep(BETWEEN_LOOKS).await;
    }
}

/// The first of the names that somebody else has, and our place in its line.
async fn look(
    keeper: &Lockkeeper,
    ask: &Ask,
) -> Result<Option<(LockView, Option<usize>)>, lockkeeper::Error> {
    let host = lockkeeper_host::host_name();
    let pid = std::process::id();
    for name in ask.names().map(LockName::as_str) {
        let Some(view) = keeper.inspect(name).await? else { continue };
        if view.held.is_empty() && view.delayed_ms.is_none() {
            continue;
        }
        let ours = view.line.iter().position(|q| q.holder.pid == pid && q.holder.host == host);
        return Ok(Some((view, ours.map(|i| i + 1))));
    }
    Ok(None)
}

/// The failure of an ask that was not to wait.
async fn skipped(keeper: &Lockkeeper, ask: &Ask, report: &Report) -> Failure {
    let code = Outcome::Busy.exit_code();
    let (message, held) = match look(keeper, ask).await {
        Ok(Some((view, _))) => {
            (format!("skipped: {} is {}", quoted(view.name.as_str()), held_line(&view)), json!(view.held))
        }
        _ => (format!("skipped: somebody else had {} a moment ago", report.what()), json!([])),
    };
    report.event("skipped", json!({ "held_by": held, "outcome": "busy", "exit_code": code }));
    // That somebody else has it is no error to one who said --skip and --quiet: the exit code says it.
    if report.is_quiet() { Failure::silent(code.into()) } else { Failure::new(Outcome::Busy, message) }
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
            self.draw(&format!("{} {}", FRAMES[frame], waiting_line(view, position)));
            sleep_until((Instant::now() + FRAME).min(until)).await;
        }
    }

    fn draw(&self, line: &str) {
        // Some terminals do not know their size.
        let size = rustix::termios::tcgetwinsize(std::io::stderr()).map_or(0, |size| size.ws_col);
        let width = if size == 0 { 80 } else { size.max(20) };
        // A line that wraps could not be drawn over.
        let fits: String = crate::text::cut(line, usize::from(width) - 1);
        outlet::ERR.post_if_idle(format!("\r\x1b[2K{fits}"));
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        outlet::ERR.post("\r\x1b[2K".into());
    }
}
