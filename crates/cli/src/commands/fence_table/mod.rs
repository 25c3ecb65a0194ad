//! The parts of `lockkeeper fence` that make a database table check by itself.

mod install;
mod status;

use clap::Args;
use lockkeeper::postgres::tokio_postgres::Client;
use lockkeeper::postgres::{Options, connect_to};

use crate::args::{SecretUrl, secret_url};
use crate::exit::ExitFailure;
pub use install::{FenceInstallArgs, FenceUninstallArgs};
pub use status::FenceStatusArgs;

/// Which database.
#[derive(Args, Debug)]
pub struct DatabaseArgs {
    /// The database: postgres://USER:PASSWORD@HOST/DATABASE, with the options of the store's address
    #[arg(long, value_name = "URL", env = "LOCKKEEPER_POSTGRES", hide_env_values = true, value_parser = secret_url())]
    pub postgres: SecretUrl,
    /// Write JSON, for machines
    #[arg(long)]
    pub json: bool,
}

impl DatabaseArgs {
    pub async fn open(&self) -> Result<Client, ExitFailure> {
        Ok(connect_to(&Options::from_url(self.postgres.expose()?)?).await?)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct TestCommand {
        #[command(flatten)]
        database: DatabaseArgs,
    }

    #[test]
    fn debug_output_hides_the_url() {
        let url = "postgres://me:hunter2@db.internal/app";
        let parsed = TestCommand::try_parse_from(["test", "--postgres", url]).unwrap();
        let shown = format!("{parsed:?}");
        assert!(
            shown.contains("postgres") && !shown.contains("hunter2") && !shown.contains("db.internal"),
            "{shown}"
        );
    }
}
