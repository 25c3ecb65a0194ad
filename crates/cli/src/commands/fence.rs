//! `lockkeeper fence`: the subcommands about fences.

use clap::{Args, Subcommand};

use super::fence_check::FenceCheckArgs;
#[cfg(feature = "postgres")]
use super::fence_table::{FenceInstallArgs, FenceStatusArgs, FenceUninstallArgs};
use crate::exit::ExitFailure;

/// Ask whether a grant still holds, or make a database table refuse late writers.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, arg_required_else_help = true, subcommand_required = true)]
pub struct FenceArgs {
    #[command(subcommand)]
    pub what: FenceAction,
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
pub enum FenceAction {
    /// Ask the store whether the grant of a sequencer still holds
    Check(FenceCheckArgs),
    /// Let a table check the fence of every write
    #[cfg(feature = "postgres")]
    Install(FenceInstallArgs),
    /// Stop checking, and remove all that was installed
    #[cfg(feature = "postgres")]
    Uninstall(FenceUninstallArgs),
    /// Show which tables check
    #[cfg(feature = "postgres")]
    Status(FenceStatusArgs),
}

impl FenceArgs {
    pub fn json(&self) -> bool {
        match &self.what {
            FenceAction::Check(check) => check.common.json,
            #[cfg(feature = "postgres")]
            FenceAction::Install(install) => install.database.json,
            #[cfg(feature = "postgres")]
            FenceAction::Uninstall(uninstall) => uninstall.database.json,
            #[cfg(feature = "postgres")]
            FenceAction::Status(status) => status.database.json,
        }
    }

    pub async fn execute(self) -> Result<i32, ExitFailure> {
        match self.what {
            FenceAction::Check(check) => check.execute().await,
            #[cfg(feature = "postgres")]
            FenceAction::Install(install) => install.execute().await,
            #[cfg(feature = "postgres")]
            FenceAction::Uninstall(uninstall) => uninstall.execute().await,
            #[cfg(feature = "postgres")]
            FenceAction::Status(status) => status.execute().await,
        }
    }
}
