//! `lockkeeper break`: takes a lock away from its holder.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use clap::Args;
use lockkeeper::{Error, LockName, LockView, Outcome, limits};
use serde_json::json;

use crate::args::{CommonArgs, lock_name, utf8};
use crate::duration;
use crate::exit::{ExitFailure, OK};
use crate::output;
use crate::report::describe_holder;
use crate::text::{plain, quoted, shell};

/// Take a lock away from its holder.
///
/// The holder gets the reason at its next renewal, within a third of its ttl; it ends its command and releases the lock. The store
/// then grants the lock to the next waiter, or when the lease has ended, which is not renewed any more. With `--now` the store
/// grants it to the next waiter at once.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct BreakArgs {
    /// Which lock
    #[arg(value_parser = lock_name())]
    pub name: LockName,
    /// Why; other users see it
    #[arg(long, value_name = "TEXT", value_parser = utf8("reason"))]
    pub reason: String,
    /// Grant the lock to the next waiter at once, beside a holder that may not know of it yet
    #[arg(long)]
    pub now: bool,
    /// Do not ask for confirmation
    #[arg(long, short)]
    pub yes: bool,
    #[command(flatten)]
    pub common: CommonArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper show nightly                                          look first
  lockkeeper break nightly --reason 'host 7 hangs, ticket 4711'
  lockkeeper break nightly --reason 'clean-up' --yes               do not ask
  lockkeeper break nightly --reason 'host 7 is off' --now          do not wait for the holder

The holder gets the reason at its next renewal, within a third of its ttl: it ends its command and
releases the lock. Only then is the lock granted to the next waiter, or when the lease has ended,
which is not renewed any more. --now grants it at once: until its next renewal the old holder runs on
beside the new one, and only a resource that checks fences (fencing tokens) is safe from it.";

impl BreakArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        limits::check_reason(&self.reason)?;
        let keeper = self.common.open().await?;
        let before = keeper.inspect(&self.name).await?;
        if !self.yes && !self.common.json && std::io::stdin().is_terminal() && std::io::stderr().is_terminal()
        {
            self.confirm(before.as_ref())?;
        }
        let broken = match self.now {
            true => keeper.break_lock(&self.name, &self.reason).await,
            false => keeper.revoke(&self.name, &self.reason).await,
        };
        let fence = broken.map_err(|error| self.refused(error))?;
        let delayed = before.as_ref().is_some_and(|view| view.delayed_ms.is_some());
        let held = before.map(|view| view.held).unwrap_or_default();
        if self.common.json {
            let line = json!({ "name": self.name, "fence": fence, "now": self.now, "holders": held, "reason": self.reason });
            output::line(&line.to_string())?;
            return Ok(OK);
        }
        let name = quoted(self.name.as_str());
        if held.is_empty() && !delayed {
            output::line(&format!(
                "{name} had no holder: nothing was taken away; the fence moved on to {fence}"
            ))?;
            return Ok(OK);
        }
        output::line(&format!("broken {name}, the fence moved on to {fence}"))?;
        for held in &held {
            let who = plain(&held.holder.to_string()).into_owned();
            let what = if self.now { "removed" } else { "asked to stop" };
            output::line(&format!("  {what}: {who}, fence {}", held.fence))?;
        }
        let latest = held.iter().map(|held| held.expires_in_ms).max();
        output::line(&match latest {
            None => "  it had no holder; it is not held back any more".into(),
            Some(_) if self.now => {
                "  the next waiter is granted the lock beside them: they learn of it at their next renewal, and only resources that check \
                 fences refuse them until then"
                    .into()
            }
            Some(ms) => format!(
                "  the next waiter is granted the lock when they have stopped, in {} at the latest",
                duration::rough(Duration::from_millis(ms))
            ),
        })?;
        Ok(OK)
    }

    /// The failure of a break. A store that cannot wait for the holder refuses a break without `--now`.
    fn refused(&self, error: Error) -> ExitFailure {
        let cannot = matches!(error, Error::Unsupported(_)) && !self.now;
        let failure = ExitFailure::from(error);
        if !cannot {
            return failure;
        }
        failure.next(format!(
            "nothing happened. If the holder is known to be dead, or every write is fenced: {}",
            break_now(&self.name)
        ))
    }

    fn confirm(&self, before: Option<&LockView>) -> Result<(), ExitFailure> {
        let name = quoted(self.name.as_str());
        let state = before.map_or_else(|| "free".into(), describe_holder);
        eprint!("{name} is {state}.\nTake it away? [y/N] ");
        let _ = std::io::stderr().flush();
        let mut answer = String::new();
        let _ = std::io::stdin().read_line(&mut answer);
        if matches!(answer.trim(), "y" | "Y" | "yes") {
            return Ok(());
        }
        Err(ExitFailure::new(Outcome::Denied, format!("{name} was not touched")))
    }
}

/// The call that breaks a lock at once, as it can be typed into a shell. The name is at the end, because it may begin with a dash.
fn break_now(name: &LockName) -> String {
    format!("lockkeeper break --now --reason … {}", shell(name.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The name was quoted as in a message: pasted with a dollar sign in it, the advice broke another lock.
    #[test]
    fn the_advice_can_be_pasted_whatever_the_name_is() {
        let advice = |name: &str| break_now(&LockName::new(name).unwrap());
        assert_eq!(advice("nightly"), "lockkeeper break --now --reason … nightly");
        assert_eq!(advice("$HOME"), "lockkeeper break --now --reason … '$HOME'");
        assert_eq!(advice("-x"), "lockkeeper break --now --reason … -- '-x'");
    }
}
