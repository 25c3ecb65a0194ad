use clap::{Args, Subcommand};

use super::fence_table::{Install, Show, Uninstall};
use crate::exit::Failure;

/// Make a database table refuse late writers, whatever client they use.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, arg_required_else_help = true, subcommand_required = true)]
pub struct Fence {
    #[command(subcommand)]
    pub what: What,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper fence install --postgres postgres://app@db/shop --table orders --column fence
  psql -c \"UPDATE orders SET state = 'paid', fence = $LOCKKEEPER_FENCE WHERE id = 42\"
  lockkeeper fence status --postgres postgres://app@db/shop

From then on an UPDATE or DELETE that presents an older fence than the row has seen is refused
by the database (SQLSTATE LK065), and one that presents none as well (LK064).";

#[derive(Debug, Subcommand)]
pub enum What {
    /// Let a table check the fence of every write
    Install(Install),
    /// Stop checking, and remove all that was installed
    Uninstall(Uninstall),
    /// Show which tables check
    Status(Show),
}

impl Fence {
    pub fn json(&self) -> bool {
        match &self.what {
            What::Install(install) => install.database.json,
            What::Uninstall(uninstall) => uninstall.database.json,
            What::Status(status) => status.database.json,
        }
    }

    pub async fn go(self) -> Result<i32, Failure> {
        match self.what {
            What::Install(install) => install.go().await,
            What::Uninstall(uninstall) => uninstall.go().await,
            What::Status(status) => status.go().await,
        }
    }
}
