//! A command under a lock, from its start to its end: the common part of `run`, `once`, `elect` and `cron`.

use std::ffi::OsString;
use std::time::Duration;

use lockkeeper::{Clock, Fence, Guard, LockName, Lockkeeper, Outcome, SystemClock};
use lockkeeper_host::sleep_until;
use serde_json::json;

use super::capture::CommandPipes;
use super::lease::LockLease;
use super::supervisor::{self, CommandEnd, Finish, LeadTimes, Supervisor};
use super::watchdog::Watchdog;
use super::{CommandProcess, CommandUnusable, find};
use crate::exit::{self, ExitFailure};
use crate::job_metrics::JobMetrics;
use crate::message_writer;
use crate::report::{Report, millis};
use crate::signals::SignalStream;
use crate::text::plain;

/// How often the store is asked whether a lease is over.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// A command, and how to run it.
pub struct CommandJob<'a> {
    pub command: &'a [OsString],
    /// The lock that the command runs under.
    pub name: &'a LockName,
    /// Time between TERM and KILL.
    pub grace: Duration,
    pub max_hold: Option<Duration>,
    /// The variables of its environment that name the store. `None`: removed.
    pub store: [(&'static str, Option<String>); 2],
    /// More variables of its environment, beside the name, the fence, the sequencer, the store and the ttl.
    pub env: Vec<(&'static str, String)>,
    /// When the command is to finish, while its lock is still held: it gets TERM then, and KILL when the lock is lost.
    pub finish: Option<Finish<'a>>,
    /// A watchdog that was started early.
    pub watchdog: Option<Watchdog>,
    /// Where its output goes. `None`: to the stdout and stderr of this process.
    pub pipes: Option<CommandPipes>,
}

impl<'a> CommandJob<'a> {
    /// Runs the command until it ends, or until it has been ended because the lock is lost.
    pub async fn supervise(
        self,
        guard: &Guard,
        signals: &mut SignalStream,
        report: &Report,
    ) -> Result<CommandEnd, ExitFailure> {
        let cannot = |e: std::io::Error| {
            let message = format!("{} cannot be started: {e}", plain(&self.command[0].to_string_lossy()));
            ExitFailure::new(Outcome::Unavailable, message).with_code(exit::CANNOT_START)
        };
        let changes = supervisor::changes().map_err(cannot)?;
        let mut env = vec![
            ("LOCKKEEPER_NAME", Some(self.name.to_string())),
            ("LOCKKEEPER_FENCE", Some(guard.fence().to_string())),
            ("LOCKKEEPER_SEQUENCER", Some(guard.sequencer().to_string())),
            ("LOCKKEEPER_TTL_MS", Some(millis(guard.ttl()).to_string())),
        ];
        env.extend(self.store.iter().cloned());
        env.extend(self.env.iter().map(|(name, value)| (*name, Some(value.clone()))));
        // Messages from before the start of the command belong before its output.
        message_writer::STDERR.flush(message_writer::SHORT_FLUSH);
        let mut watchdog = match self.watchdog.filter(Watchdog::is_running) {
            Some(mut watchdog) => {
                watchdog.send_lock(self.name, guard.fence());
                watchdog
            }
            None => Watchdog::start(self.name, guard.fence()).map_err(cannot)?,
        };
        let leads = LeadTimes::new(self.grace, guard.lease(), self.max_hold);
        watchdog.send_deadline(guard.deadline().before(leads.watchdog));
        let child =
            CommandProcess::start(self.command, &env, self.pipes.as_ref(), watchdog, report.is_json())
                .map_err(cannot)?;
        report.measure(JobMetrics::command_started);
        // Closed here, so that the readers see the end of file when the command closes its copies.
        drop(self.pipes);
        let lease = LockLease { guard, name: self.name };
        let watch = Supervisor::new(child, changes, &lease, self.grace, self.max_hold).until(self.finish);
        let report_loss = |why: &str| {
            report.event("lost", json!({ "fence": guard.fence(), "why": why }));
            report.say(&format!("losing the lock on {}: {why}. Ending the command", report.what()));
        };
        let end = watch.until_end(signals, report_loss).await;
        report.measure(|job| job.command_ended(&end));
        Ok(end)
    }
}

/// The failure of a job whose command was ended because its lock was lost.
pub fn lost(what: &str, why: &str, code: Option<i32>, all_gone: bool) -> ExitFailure {
    let end = code.map_or("was ended".into(), |code| format!("ended with {code}"));
    let left = if all_gone { "" } else { "; some of its processes could not be killed" };
    ExitFailure::new(Outcome::Lost, format!("the lock on {what} is lost: {why}. The command {end}{left}"))
        .next("its work may be half done: check before you run it again")
}

/// A hold that was given up without a release, because some processes of its command could not be killed.
pub struct ExpiringHold {
    name: LockName,
    fence: Fence,
    ttl: Duration,
}

impl ExpiringHold {
    pub fn of(guard: &Guard) -> Self {
        ExpiringHold { name: guard.names().first().clone(), fence: guard.fence(), ttl: guard.ttl() }
    }

    /// Waits until its lease is over, but only on the `sqlite:` store, which frees the locks of a process that has ended. A signal ends the
    /// wait.
    pub async fn outlast(self, keeper: &Lockkeeper, signals: &mut SignalStream, report: &Report) {
        report.say(&format!(
            "warning: some processes of the command could not be killed: {} is not released, and is free when its lease is over",
            report.what()
        ));
        if keeper.profile().store == "sqlite" {
            let _ = signals.race(self.until_over(keeper)).await;
        }
    }

    async fn until_over(&self, keeper: &Lockkeeper) {
        // It is not renewed any more, so the store grants the lock by then.
        let end = SystemClock.now() + self.ttl;
        while SystemClock.now() < end {
            let seen = keeper.inspect(&self.name).await;
            if seen.is_ok_and(|view| {
                view.is_none_or(|view| view.held.iter().all(|held| held.fence != self.fence))
            }) {
                return;
            }
            sleep_until(&SystemClock, (SystemClock.now() + LOOK_AGAIN).min(end)).await;
        }
    }
}

/// Fails if the command cannot be started. Called before anything is locked.
pub fn check(command: &[OsString]) -> Result<(), ExitFailure> {
    let program = &command[0];
    let shown = plain(&program.to_string_lossy()).into_owned();
    match find(program) {
        Ok(_) => Ok(()),
        Err(CommandUnusable::NotFound) => {
            Err(ExitFailure::new(Outcome::Invalid, format!("there is no command {shown:?}"))
                .with_code(exit::NOT_FOUND)
                .next("check the spelling and PATH; for shell syntax use: sh -c '…'"))
        }
        Err(CommandUnusable::NotExecutable) => {
            Err(ExitFailure::new(Outcome::Invalid, format!("{shown:?} is not executable"))
                .with_code(exit::CANNOT_START)
                .next("chmod +x it, or name the program that runs it"))
        }
    }
}

/// The default label of a holder: the file name of the command.
pub fn label(command: &[OsString]) -> Option<String> {
    let name = std::path::Path::new(command.first()?).file_name()?.to_string_lossy();
    Some(name.chars().filter(|c| !c.is_control()).take(64).collect())
}
