mod install;
mod status;

use clap::{Args, Subcommand};
use lockkeeper::postgres::tokio_postgres::Client;
use lockkeeper::postgres::{Options, connect_to};

use crate::args::utf8;
use crate::exit::Failure;
use install::{Install, Uninstall};
use status::Show;

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

/// Which database.
#[derive(Args, Debug)]
pub struct Database {
    /// The database: postgres://USER:PASSWORD@HOST/DATABASE, with the options of the store's address
    #[arg(long, value_name = "URL", env = "LOCKKEEPER_POSTGRES", hide_env_values = true, value_parser = utf8("URL"))]
    pub postgres: String,
    /// Write JSON, for machines
    #[arg(long)]
    pub json: bool,
}

impl Database {
    async fn open(&self) -> Result<Client, Failure> {
        Ok(connect_to(&Options::from_url(&self.postgres)?).await?)
    }
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
