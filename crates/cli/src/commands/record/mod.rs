//! `lockkeeper record`: small values that many processes change.

mod read;
mod write;

use clap::{Args, Subcommand};
use lockkeeper::register::Entry;
use lockkeeper::{Fence, LockName, Outcome};
use serde_json::json;

use crate::args::{CommonArgs, lock_name};
use crate::exit::{ExitFailure, OK};
use crate::output;
use crate::text::quoted;
use read::{RecordGetArgs, RecordLsArgs, RecordWatchArgs};
use write::{RecordCasArgs, RecordRmArgs, RecordSetArgs};

/// Keep small values that many processes change: read, write, compare and set, watch.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, arg_required_else_help = true, subcommand_required = true)]
pub struct RecordArgs {
    #[command(subcommand)]
    pub what: RecordAction,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper record set release/current v17
  lockkeeper record get release/current
  lockkeeper record cas release/current v18 --fence 1794775452413713   only if it is unchanged
  lockkeeper record cas leader me --absent                             only if there is none
  lockkeeper record set config --stdin < config.json

Every write has a fence (a fencing token) that is higher than that of every write before. Exit codes: 66 there is no
such record, 65 it was changed by others, 64 bad call, 78 the store has no records.";

#[derive(Debug, Subcommand)]
pub enum RecordAction {
    /// Print a value
    Get(RecordGetArgs),
    /// Write a value, whatever is there
    Set(RecordSetArgs),
    /// Write a value only over the one that was seen
    Cas(RecordCasArgs),
    /// Delete a value
    Rm(RecordRmArgs),
    /// List values
    Ls(RecordLsArgs),
    /// Print a value and then every change, until Ctrl-C
    Watch(RecordWatchArgs),
}

/// Which record, and where.
#[derive(Args, Debug)]
pub struct RecordKeyArgs {
    /// Which record: any text of 1 to 512 bytes
    #[arg(value_parser = lock_name())]
    pub key: LockName,
    #[command(flatten)]
    pub common: CommonArgs,
}

impl RecordArgs {
    pub fn json(&self) -> bool {
        match &self.what {
            RecordAction::Get(get) => get.key.common.json,
            RecordAction::Set(set) => set.key.common.json,
            RecordAction::Cas(cas) => cas.key.common.json,
            RecordAction::Rm(rm) => rm.key.common.json,
            RecordAction::Ls(ls) => ls.common.json,
            RecordAction::Watch(watch) => watch.key.common.json,
        }
    }

    pub async fn execute(self) -> Result<i32, ExitFailure> {
        match self.what {
            RecordAction::Get(get) => get.execute().await,
            RecordAction::Set(set) => set.execute().await,
            RecordAction::Cas(cas) => cas.execute().await,
            RecordAction::Rm(rm) => rm.execute().await,
            RecordAction::Ls(ls) => ls.execute().await,
            RecordAction::Watch(watch) => watch.execute().await,
        }
    }
}

impl RecordKeyArgs {
    fn absent(&self) -> ExitFailure {
        ExitFailure::new(Outcome::Absent, format!("there is no record {}", quoted(self.key.as_str())))
    }

    fn changed(&self, found: &Entry<Vec<u8>>) -> ExitFailure {
        let message =
            format!("{} was changed by others: its fence is {} now", quoted(self.key.as_str()), found.fence);
        ExitFailure::new(Outcome::Stale, message)
            .next(format!("look at it, then try with --fence {}", found.fence))
    }

    fn print_done(&self, action: &str, fence: Fence) -> Result<i32, ExitFailure> {
        output::line(&match self.common.json {
            true => json!({ "key": self.key, "fence": fence }).to_string(),
            false => format!("{action} {}, fence {fence}", quoted(self.key.as_str())),
        })?;
        Ok(OK)
    }
}
