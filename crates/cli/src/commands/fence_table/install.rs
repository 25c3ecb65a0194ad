//! `lockkeeper fence install` and `uninstall`: the triggers of a PostgreSQL table that check fences.

use clap::Args;
use lockkeeper::{Error, Outcome};
use lockkeeper_fenced::postgres::table::{self, TableGuardSpec};
use serde_json::json;

use super::DatabaseArgs;
use crate::args::utf8;
use crate::exit::{ExitFailure, OK};
use crate::output;
use crate::text::{plain, quoted};

#[derive(Args, Debug)]
pub struct FenceInstallArgs {
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// The table, as in SQL: orders, sales.orders, '"Orders"'
    #[arg(long, value_parser = utf8("table"))]
    pub table: String,
    /// Its column for the fence, a bigint
    #[arg(long, value_name = "NAME", value_parser = utf8("column"))]
    pub column: String,
    /// The unique columns that name a row, separated by commas [default: the primary key]
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = utf8("key"))]
    pub key: Vec<String>,
    /// Let UPDATE and DELETE through that present no fence at all: for a change-over, not for ever
    #[arg(long)]
    pub allow_unfenced: bool,
    /// Print the SQL instead of running it
    #[arg(long, conflicts_with = "json")]
    pub sql: bool,
}

#[derive(Args, Debug)]
pub struct FenceUninstallArgs {
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// The table, as in SQL, or as `status` shows it
    #[arg(long, value_parser = utf8("table"))]
    pub table: String,
}

impl FenceInstallArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let mut client = self.database.open().await?;
        let (column, key) = (self.column, self.key);
        let spec = TableGuardSpec { table: self.table, column, key, allow_unfenced: self.allow_unfenced };
        let guarded = table::find(&mut client, &spec).await?;
        if self.sql {
            output::line(&format!("BEGIN;\n{}\nCOMMIT;", table::install_sql(&guarded)))?;
            return Ok(OK);
        }
        table::install(&mut client, &guarded).await.map_err(denied)?;
        let name = plain(&guarded.table).into_owned();
        let key: Vec<&str> = guarded.key.iter().map(|column| &*column.name).collect();
        output::line(&match self.database.json {
            true => json!({
                "table": guarded.table, "column": guarded.column, "key": key, "allow_unfenced": guarded.allow_unfenced,
            })
            .to_string(),
            false if guarded.allow_unfenced => {
                format!("{name} refuses older fences; writes without any fence are let through (--allow-unfenced)")
            }
            false => format!("{name} refuses older fences, and writes without any"),
        })?;
        Ok(OK)
    }
}

fn denied(error: Error) -> ExitFailure {
    let missing = error.outcome() == Outcome::Denied;
    let failure = ExitFailure::from(error);
    match missing {
        true => failure
            .next("print it with --sql, for a role that owns the table and the schema lockkeeper_fence"),
        false => failure,
    }
}

impl FenceUninstallArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let mut client = self.database.open().await?;
        if !table::uninstall(&mut client, &self.table).await? {
            let message = format!("{} is not guarded", quoted(&self.table));
            return Err(
                ExitFailure::new(Outcome::Absent, message).next("see which are: lockkeeper fence status")
            );
        }
        output::line(&match self.database.json {
            true => json!({ "table": self.table, "removed": true }).to_string(),
            false => format!("{} checks no fences any more; its column is as it was", plain(&self.table)),
        })?;
        Ok(OK)
    }
}
