mod read;
mod write;

use clap::{Args, Subcommand};
use lockkeeper::{Entry, Fence, LockName, Outcome};
use serde_json::json;

use crate::args::{Common, lock_name};
use crate::exit::{Failure, OK};
use crate::output;
use crate::text::quoted;
use read::{Get, Ls, Watch};
use write::{Cas, Rm, Set};

/// Keep small values that many change: read, write, compare and set, watch.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, arg_required_else_help = true, subcommand_required = true)]
pub struct Record {
    #[command(subcommand)]
    pub what: What,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper record set release/current v17
  lockkeeper record get release/current
  lockkeeper record cas release/current v18 --fence 1794775452413713   only if nobody changed it
  lockkeeper record cas leader me --absent                             only if there is none
  lockkeeper record set config --stdin < config.json

Every write has a fence that is higher than that of every write before. Exit codes: 66 there is no
such record, 65 it was changed by others, 64 bad call, 78 the store has no records.";

#[derive(Debug, Subcommand)]
pub enum What {
    /// Print a value
    Get(Get),
    /// Write a value, whatever is there
    Set(Set),
    /// Write a value only over the one that was seen
    Cas(Cas),
    /// Delete a value
    Rm(Rm),
    /// List values
    Ls(Ls),
    /// Print a value and then every change, until Ctrl-C
    Watch(Watch),
}

/// Which record, and where.
#[derive(Args, Debug)]
pub struct Key {
    /// Which record: any text of 1 to 512 bytes
    #[arg(value_parser = lock_name())]
    pub key: LockName,
    #[command(flatten)]
    pub common: Common,
}

impl Record {
    pub fn json(&self) -> bool {
        match &self.what {
            What::Get(get) => get.key.common.json,
            What::Set(set) => set.key.common.json,
            What::Cas(cas) => cas.key.common.json,
            What::Rm(rm) => rm.key.common.json,
            What::Ls(ls) => ls.common.json,
            What::Watch(watch) => watch.key.common.json,
        }
    }

    pub async fn go(self) -> Result<i32, Failure> {
        match self.what {
            What::Get(get) => get.go().await,
            What::Set(set) => set.go().await,
            What::Cas(cas) => cas.go().await,
            What::Rm(rm) => rm.go().await,
            What::Ls(ls) => ls.go().await,
            What::Watch(watch) => watch.go().await,
        }
    }
}

impl Key {
    fn absent(&self) -> Failure {
        Failure::new(Outcome::Absent, format!("there is no record {}", quoted(self.key.as_str())))
    }

    fn changed(&self, found: &Entry<Vec<u8>>) -> Failure {
        let message =
            format!("{} was changed by others: its fence is {} now", quoted(self.key.as_str()), found.fence);
        Failure::new(Outcome::Stale, message)
            .next(format!("look at it, then try with --fence {}", found.fence))
    }

    fn told(&self, word: &str, fence: Fence) -> Result<i32, Failure> {
        output::line(&match self.common.json {
            true => json!({ "key": self.key, "fence": fence }).to_string(),
            false => format!("{word} {}, fence {fence}", quoted(self.key.as_str())),
        })?;
        Ok(OK)
    }
}
