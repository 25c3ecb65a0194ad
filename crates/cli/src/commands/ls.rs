//! `lockkeeper ls`: lists locks and their holders.

use std::time::Duration;

use clap::Args;
use lockkeeper::{LockView, Lockkeeper, Page};
use serde_json::json;

use crate::args::{CommonArgs, utf8};
use crate::duration;
use crate::exit::{ExitFailure, OK};
use crate::output::{self, bold};
use crate::text::{self, columns, plain};

/// List the locks that are held, waited for or held back.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct LsArgs {
    /// Only names that begin with this
    #[arg(default_value = "", hide_default_value = true, value_parser = utf8("prefix"))]
    pub prefix: String,
    #[command(flatten)]
    pub common: CommonArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper ls
  lockkeeper ls orders/
  lockkeeper ls --json | jq -r '.locks[] | select(.waiting > 0) | .name'";

impl LsArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let keeper = self.common.open().await?;
        let locks = all(&keeper, &self.prefix).await?;
        if self.common.json {
            output::line(&json!({ "locks": locks }).to_string())?;
        } else if locks.is_empty() {
            if output::is_terminal() {
                output::line("no locks are held")?;
            }
        } else {
            let mut rows = vec![HEAD.map(String::from).to_vec()];
            rows.extend(locks.iter().flat_map(rows_of));
            for (i, line) in columns(&rows).iter().enumerate() {
                output::line(&if i == 0 { bold(line) } else { line.clone() })?;
            }
        }
        Ok(OK)
    }
}

const HEAD: [&str; 6] = ["NAME", "HOLDER", "FENCE", "HELD FOR", "EXPIRES IN", "WAITING"];

/// Every page.
async fn all(keeper: &Lockkeeper, prefix: &str) -> Result<Vec<LockView>, ExitFailure> {
    let mut page = keeper.list(prefix, &Page::FIRST).await?;
    let mut locks = std::mem::take(&mut page.locks);
    while let Some(next) = page.next.take() {
        page = keeper.list(prefix, &Page::after(next)).await?;
        locks.append(&mut page.locks);
    }
    Ok(locks)
}

/// One row for each holder; the name and the length of the line only in the first.
fn rows_of(lock: &LockView) -> Vec<Vec<String>> {
    let name = plain(lock.name.as_str()).into_owned();
    let waiting = lock.waiting.to_string();
    if lock.held.is_empty() {
        let state = match lock.delayed_ms {
            Some(ms) => ["(held back)".into(), duration::rough(Duration::from_millis(ms))],
            None => ["(free)".into(), "-".into()],
        };
        let [state, until] = state;
        return vec![vec![name, state, "-".into(), "-".into(), until, waiting]];
    }
    let row = |(i, held): (usize, &lockkeeper::HolderView)| {
        let mut who = plain(&held.holder.to_string()).into_owned();
        if held.lingering {
            who += ", done";
        }
        vec![
            if i == 0 { name.clone() } else { String::new() },
            who,
            held.fence.to_string(),
            text::ago(held.since),
            duration::rough(Duration::from_millis(held.expires_in_ms)),
            if i == 0 { waiting.clone() } else { String::new() },
        ]
    };
    lock.held.iter().enumerate().map(row).collect()
}
