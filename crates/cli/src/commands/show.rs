//! `lockkeeper show`: everything about one lock.

use std::time::{Duration, Instant};

use clap::Args;
use futures_util::StreamExt;
use lockkeeper::{EventKind, LockName, LockView, Lockkeeper, Mode, Profile, Purpose};
use serde_json::json;

use super::status;
use crate::args::{CommonArgs, lock_name};
use crate::contention::{Contention, ContentionMeter};
use crate::duration;
use crate::exit::{ExitFailure, OK};
use crate::output::{self, bold};
use crate::text::{ago, columns, plain, quoted, rfc3339, shell};

/// Show everything about one lock: who holds it, who waits, what the store promises.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ShowArgs {
    /// Which lock
    #[arg(value_parser = lock_name())]
    pub name: LockName,
    /// Watch the lock for this long, and say whether waiting or holding is the problem, and what to do
    #[arg(long = "for", value_name = "DURATION", value_parser = duration::parse_up_to_a_day, allow_hyphen_values = true)]
    pub look: Option<Duration>,
    #[command(flatten)]
    pub common: CommonArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper show nightly
  lockkeeper show orders --for 10s                wait and hold times, measured from the events
  lockkeeper show nightly --json | jq '.lock.held[0].fence'

A free lock is no error: the exit code is 0 and the JSON has \"lock\": null.";

impl ShowArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let keeper = self.common.open().await?;
        let measured = match self.look {
            Some(look) => Some(measure(&keeper, &self.name, look).await?),
            None => None,
        };
        let (view, window) = status::look(&keeper, &self.name).await?;
        let profile = keeper.profile();
        let correctness = profile.allows(Purpose::Correctness).map_err(|error| error.to_string());
        if self.common.json {
            let good = json!({ "good": correctness.is_ok(), "why": correctness.err() });
            let mut all = json!({
                "name": self.name, "lock": view, "window": window.as_ref().map(|(record, _)| record), "store": profile, "correctness": good,
            });
            if let Some(measured) = &measured {
                all["measured"] = measured.json();
            }
            output::line(&all.to_string())?;
            return Ok(OK);
        }
        let shown = bold(&quoted(self.name.as_str()));
        match &view {
            None => output::line(&format!("{shown} is free"))?,
            Some(view) => lock(&shown, view)?,
        }
        match &measured {
            Some(measured) => measured.lines().iter().try_for_each(|line| output::line(line))?,
            None if view.as_ref().is_some_and(|view| view.waiting > 0) && profile.watch => {
                let name = shell(self.name.as_str());
                output::line(&format!(
                    "is waiting or holding the problem? lockkeeper show --for 10s {name}"
                ))?;
            }
            None => {}
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

/// Watches the lock for a while. That costs the store one watch, and nothing for the holders and waiters.
async fn measure(keeper: &Lockkeeper, name: &LockName, look: Duration) -> Result<Contention, ExitFailure> {
    // First watch, then look: an event in between is seen twice rather than never.
    let mut events = keeper.watch(name.as_str()).await?;
    let view = keeper.inspect(name).await?;
    let (mut meter, began) = (ContentionMeter::new(view.as_ref()), Instant::now());
    let watch = async {
        while let Some(event) = events.next().await {
            let event = event?;
            if event.name == *name || event.kind == EventKind::Missed {
                meter.add(&event, began.elapsed());
            }
        }
        Ok::<_, ExitFailure>(())
    };
    if let Ok(ended) = tokio::time::timeout(look, watch).await {
        ended?;
    }
    Ok(meter.end(began.elapsed()))
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
