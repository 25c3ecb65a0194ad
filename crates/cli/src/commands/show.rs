//! `lockkeeper show`: everything about one lock.

use std::time::Duration;

use clap::Args;
use lockkeeper::{LockName, LockView, Mode, Profile, Purpose};
use serde_json::json;

use super::status;
use crate::args::{CommonArgs, lock_name};
use crate::duration;
use crate::exit::{ExitFailure, OK};
use crate::output::{self, bold};
use crate::text::{ago, columns, plain, quoted, rfc3339};

/// Show everything about one lock: who holds it, who waits, what the store promises.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ShowArgs {
    /// Which lock
    #[arg(value_parser = lock_name())]
    pub name: LockName,
    #[command(flatten)]
    pub common: CommonArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper show nightly
  lockkeeper show nightly --json | jq '.lock.held[0].fence'

A free lock is no error: the exit code is 0 and the JSON has \"lock\": null.";

impl ShowArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let keeper = self.common.open().await?;
        let (view, window) = status::look(&keeper, &self.name).await?;
        let profile = keeper.profile();
        let correctness = profile.allows(Purpose::Correctness).map_err(|error| error.to_string());
        if self.common.json {
            let good = json!({ "good": correctness.is_ok(), "why": correctness.err() });
            let all = json!({
                "name": self.name, "lock": view, "window": window.as_ref().map(|(record, _)| record), "store": profile, "correctness": good,
            });
            output::line(&all.to_string())?;
            return Ok(OK);
        }
        let shown = bold(&quoted(self.name.as_str()));
        match &view {
            None => output::line(&format!("{shown} is free"))?,
            Some(view) => lock(&shown, view)?,
        }
        if let Some((window, running)) = &window {
            if let Some(text) = status::unfinished(window, *running) {
                output::line(&text)?;
            }
            if let Some(run) = &window.ended {
                output::line(&format!("last run: {}", status::ended(run)))?;
            }
        }
        store(&profile)?;
        output::line(&match correctness {
            Ok(()) => "good for correctness: yes, because it keeps grants and fences over a crash".into(),
            Err(why) => format!("good for correctness: no, because {}", plain(&why)),
        })?;
        Ok(OK)
    }
}

fn lock(shown: &str, view: &LockView) -> Result<(), ExitFailure> {
    let state = match (view.held.len(), view.delayed_ms) {
        (0, Some(ms)) => {
            format!("held back for {} after an unclean end", duration::rough(Duration::from_millis(ms)))
        }
        (0, None) => "free, with a queue".into(),
        (1, _) => "held".into(),
        (n, _) => format!("held by {n}"),
    };
    output::line(&format!("{shown} is {state}"))?;
    for held in &view.held {
        let left = duration::rough(Duration::from_millis(held.expires_in_ms));
        let (end, left) = if held.lingering {
            ("  done, kept for", left)
        } else if held.revoked.is_some() {
            ("  free in", format!("{left} at the latest: it is not renewed any more"))
        } else {
            ("  expires in", format!("{left}, unless renewed"))
        };
        let mut rows = vec![
            ("  holder", plain(&held.holder.to_string()).into_owned()),
            ("  fence", held.fence.to_string()),
            ("  mode", mode(held.mode)),
            ("  since", format!("{} ({} ago)", rfc3339(held.since), ago(held.since))),
            (end, left),
        ];
        if let Some(reason) = &held.revoked {
            rows.push(("  asked to stop", plain(reason).into_owned()));
        }
        let rows: Vec<_> = rows.into_iter().map(|(what, value)| vec![what.to_owned(), value]).collect();
        rows_out(&rows)?;
    }
    if view.waiting > 0 {
        output::line(&format!("{} in the queue", view.waiting))?;
        let row = |(i, q): (usize, &lockkeeper::WaiterView)| {
            let who = plain(&q.holder.to_string()).into_owned();
            vec![format!("  {}.", i + 1), who, mode(q.mode), format!("for {}", ago(q.since))]
        };
        rows_out(&view.queue.iter().enumerate().map(row).collect::<Vec<_>>())?;
        if view.waiting > view.queue.len() {
            output::line(&format!("  … and {} more", view.waiting - view.queue.len()))?;
        }
    }
    Ok(())
}

fn rows_out(rows: &[Vec<String>]) -> Result<(), ExitFailure> {
    columns(rows).iter().try_for_each(|line| output::line(line))
}

fn mode(mode: Mode) -> String {
    match mode {
        Mode::Exclusive => "exclusive".into(),
        Mode::Shared => "shared".into(),
        Mode::Permit(n) => format!("one of {n}"),
    }
}

fn store(profile: &Profile) -> Result<(), ExitFailure> {
    let lower = |promise| format!("{promise:?}").to_lowercase();
    output::line(&format!(
        "store {}: exclusion {}, fences {}, durable {}; next waiter in within {}",
        plain(&profile.store),
        lower(profile.exclusion),
        lower(profile.fence),
        lower(profile.durable),
        duration::rough(profile.wake),
    ))?;
    profile.findings.iter().try_for_each(|finding| {
        output::line(&format!("  {}: {}", finding.severity.as_str(), plain(&finding.to_string())))
    })
}
