//! A command under a lock, from its start to its end: what `run`, `once`, `elect` and `cron` have in common.

use std::ffi::OsString;
use std::time::Duration;

use lockkeeper::{Guard, LockName, Outcome};
use serde_json::json;

use super::capture::Pipes;
use super::supervise::{End, Leads, Watch};
use super::watchdog::Watchdog;
use super::{Child, Unusable, find};
use crate::exit::{self, Failure};
use crate::outlet;
use crate::report::{Report, millis};
use crate::signals::Signals;
use crate::text::plain;

/// What is to be run, and how.
pub struct Job<'a> {
    pub command: &'a [OsString],
    /// The lock it runs under.
    pub name: &'a LockName,
    /// Time between TERM and KILL.
    pub grace: Duration,
    pub max_hold: Option<Duration>,
    /// What it sees of the store in its environment.
    pub store: [(&'static str, Option<String>); 2],
    /// What it sees in its environment beside the name, the fence, the sequencer, the store and the ttl.
    pub env: Vec<(&'a str, String)>,
    /// Where its output goes; to ours if not given.
    pub pipes: Option<Pipes>,
}

impl Job<'_> {
    /// Runs it until it ends, or has been ended because the lock is lost.
    pub async fn supervise(
        self,
        guard: &Guard,
        signals: &mut Signals,
        report: &Report,
    ) -> Result<End, Failure> {
        let cannot = |e: std::io::Error| {
            let message = format!("{} cannot be started: {e}", plain(&self.command[0].to_string_lossy()));
            Failure::new(Outcome::Unavailable, message).with_code(exit::CANNOT_START)
        };
        let changes = Watch::changes().map_err(cannot)?;
        let mut env = vec![
            ("LOCKKEEPER_NAME", Some(self.name.to_string())),
            ("LOCKKEEPER_FENCE", Some(guard.fence().to_string())),
            ("LOCKKEEPER_SEQUENCER", Some(guard.sequencer().to_string())),
            ("LOCKKEEPER_TTL_MS", Some(millis(guard.ttl()).to_string())),
        ];
        env.extend(self.store.iter().cloned());
        env.extend(self.env.iter().map(|(name, value)| (*name, Some(value.clone()))));
        // What was said before the command belongs before what the command prints.
        outlet::ERR.flush(outlet::SHORTLY);
        let mut watchdog = Watchdog::start(self.name, guard.fence()).map_err(cannot)?;
        let leads = Leads::new(self.grace, guard.lease(), self.max_hold);
        watchdog.tell_moment(guard.deadline().before(leads.watchdog));
        let child = Child::start(self.command, &env, self.pipes.as_ref(), watchdog, report.is_json())
            .map_err(cannot)?;
        // Ours are closed, so that the readers see the end when the command's are.
        drop(self.pipes);
        let watch = Watch::new(child, changes, guard, self.name, self.grace, self.max_hold);
        let tell_lost = |why: &str| {
            report.event("lost", json!({ "fence": guard.fence(), "why": why }));
            report.say(&format!("losing the lock on {}: {why}. Ending the command", report.what()));
        };
        Ok(watch.until_end(signals, tell_lost).await)
    }
}

/// The failure of a command that was ended because its lock was lost.
pub fn lost(what: &str, why: &str, code: Option<i32>, all_gone: bool) -> Failure {
    let end = code.map_or("was ended".into(), |code| format!("ended with {code}"));
    let left = if all_gone { "" } else { "; some of its processes could not be killed" };
    Failure::new(Outcome::Lost, format!("the lock on {what} is lost: {why}. The command {end}{left}"))
        .next("its work may be half done: check before you run it again")
}

/// A command that cannot be started is told before anything is locked.
pub fn check(command: &[OsString]) -> Result<(), Failure> {
    let program = &command[0];
    let shown = plain(&program.to_string_lossy()).into_owned();
    match find(program) {
        Ok(_) => Ok(()),
        Err(Unusable::NotFound) => {
            Err(Failure::new(Outcome::Invalid, format!("there is no command {shown:?}"))
                .with_code(exit::NOT_FOUND)
                .next("check the spelling and PATH; for shell syntax use: sh -c '…'"))
        }
        Err(Unusable::NotExecutable) => {
            Err(Failure::new(Outcome::Invalid, format!("{shown:?} is not executable"))
                .with_code(exit::CANNOT_START)
                .next("chmod +x it, or name the program that runs it"))
        }
    }
}

/// What others see: the command's name, unless we were told.
pub fn label(command: &[OsString]) -> Option<String> {
    let name = std::path::Path::new(&command[0]).file_name()?.to_string_lossy();
    Some(name.chars().filter(|c| !c.is_control()).take(64).collect())
}
