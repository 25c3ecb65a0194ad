use clap::{Args, Subcommand};

use super::fence_check::Check;
#[cfg(feature = "postgres")]
use super::fence_table::{Install, Show, Uninstall};
use crate::exit::Failure;

/// Ask whether a grant still holds, or make a database table refuse late writers.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, arg_required_else_help = true, subcommand_required = true)]
pub struct Fence {
    #[command(subcommand)]
    pub what: What,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper run nightly -- sh -c 'lockkeeper fence check \"$LOCKKEEPER_SEQUENCER\" && ./publish'
  lockkeeper fence install --postgres postgres://app@db/shop --table orders --column fence
  psql -c \"UPDATE orders SET state = 'paid', fence = $LOCKKEEPER_FENCE WHERE id = 42\"
  lockkeeper fence status --postgres postgres://app@db/shop

The yes of a check is true for a moment. Only a resource that compares fences in the step that
writes is safe from a writer that is paused right after it has asked.

After an install an UPDATE or DELETE that presents an older fence than the row has seen is refused
by the database (SQLSTATE LK065), and one that presents none as well (LK064).";

#[derive(Debug, Subcommand)]
pub enum What {
    /// Ask the store whether the grant of a sequencer still holds
    Check(Check),
    /// Let a table check the fence of every write
    #[cfg(feature = "postgres")]
    Install(Install),
    /// Stop checking, and remove all that was installed
    #[cfg(feature = "postgres")]
    Uninstall(Uninstall),
    /// Show which tables check
    #[cfg(feature = "postgres")]
    Status(Show),
}

impl Fence {
    pub fn json(&self) -> bool {
        match &self.what {
            What::Check(check) => check.common.json,
            #[cfg(feature = "postgres")]
            What::Install(install) => install.database.json,
            #[cfg(feature = "postgres")]
            What::Uninstall(uninstall) => uninstall.database.json,
            #[cfg(feature = "postgres")]
            What::Status(status) => status.database.json,
        }
    }

    pub async fn go(self) -> Result<i32, Failure> {
        match self.what {
            What::Check(check) => check.go().await,
            #[cfg(feature = "postgres")]
            What::Install(install) => install.go().await,
            #[cfg(feature = "postgres")]
            What::Uninstall(uninstall) => uninstall.go().await,
            #[cfg(feature = "postgres")]
            What::Status(status) => status.go().await,
        }
    }
}
