use std::io::{IsTerminal, Write};

use clap::Args;
use lockkeeper::{LockName, LockView, Outcome, limits};
use serde_json::json;

use crate::args::{Common, lock_name, utf8};
use crate::exit::{Failure, OK};
use crate::output;
use crate::report::held_line;
use crate::text::{plain, quoted};

/// Take a lock away from whoever holds it.
///
/// The fence moves on at once, so a resource that checks fences refuses the old holder from now on. The holder itself
/// learns of it at its next renewal, within a third of its ttl: until then only the fence keeps it out.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Break {
    /// Which lock
    #[arg(value_parser = lock_name())]
    pub name: LockName,
    /// Why; others will see it
    #[arg(long, value_name = "TEXT", value_parser = utf8("reason"))]
    pub reason: String,
    /// Do not ask first
    #[arg(long, short)]
    pub yes: bool,
    #[command(flatten)]
    pub common: Common,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper show nightly                                          look first
  lockkeeper break nightly --reason 'host 7 hangs, ticket 4711'
  lockkeeper break nightly --reason 'clean-up' --yes               do not ask

The fence moves on at once, so resources that check fences refuse the old holder from now on. The
holder itself learns of it at its next renewal, within a third of its ttl.";

impl Break {
    pub async fn go(self) -> Result<i32, Failure> {
        limits::check_reason(&self.reason)?;
        let keeper = self.common.open().await?;
        let before = keeper.inspect(&self.name).await?;
        if !self.yes && !self.common.json && std::io::stdin().is_terminal() && std::io::stderr().is_terminal()
        {
            self.confirm(before.as_ref())?;
        }
        let fence = keeper.break_lock(&self.name, &self.reason).await?;
        let held = before.map(|view| view.held).unwrap_or_default();
        if self.common.json {
            let line =
                json!({ "name": self.name, "fence": fence, "thrown_out": held, "reason": self.reason });
            output::line(&line.to_string())?;
            return Ok(OK);
        }
        output::line(&format!("broken {}, the fence moved on to {fence}", quoted(self.name.as_str())))?;
        for held in &held {
            let who = plain(&held.holder.to_string()).into_owned();
            output::line(&format!("  thrown out: {who}, fence {}", held.fence))?;
        }
        output::line(if held.is_empty() {
            "  nobody held it"
        } else {
            "  they learn of it at their next renewal; resources that check fences refuse them from now on"
        })?;
        Ok(OK)
    }

    fn confirm(&self, before: Option<&LockView>) -> Result<(), Failure> {
        let name = quoted(self.name.as_str());
        let state = before.map_or_else(|| "free".into(), held_line);
        eprint!("{name} is {state}.\nTake it away? [y/N] ");
        let _ = std::io::stderr().flush();
        let mut answer = String::new();
        let _ = std::io::stdin().read_line(&mut answer);
        if matches!(answer.trim(), "y" | "Y" | "yes") {
            return Ok(());
        }
        Err(Failure::new(Outcome::Denied, format!("{name} was not touched")))
    }
}
