//! `lockkeeper jobs install`, `uninstall` and `sql`: the columns of a job table, and the statements that use them.

use clap::{Args, ValueEnum};
use lockkeeper::jobs::{self, ExistingRows};
use lockkeeper::{Error, Outcome};
use serde_json::{Value, json};

use super::JobTableArgs;
use crate::exit::{ExitFailure, OK};
use crate::output;
use crate::text::{plain, quoted};

#[derive(Args, Debug)]
pub struct JobsInstallArgs {
    #[command(flatten)]
    pub table: JobTableArgs,
    /// The state of the rows that the table has now
    #[arg(long, value_enum, default_value_t = ExistingAs::Open)]
    pub existing: ExistingAs,
    /// Print the SQL instead of running it
    #[arg(long, conflicts_with = "json")]
    pub sql: bool,
}

/// The state of existing rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExistingAs {
    /// Jobs to do
    Open,
    /// Done: only later rows are jobs
    Done,
}

#[derive(Args, Debug)]
pub struct JobsUninstallArgs {
    #[command(flatten)]
    pub table: JobTableArgs,
}

#[derive(Args, Debug)]
pub struct JobsSqlArgs {
    #[command(flatten)]
    pub table: JobTableArgs,
}

impl JobsInstallArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let (mut client, table) = self.table.find().await?;
        let existing = match self.existing {
            ExistingAs::Open => ExistingRows::Open,
            ExistingAs::Done => ExistingRows::Done,
        };
        if self.sql {
            output::line(&format!("BEGIN;\n{}\nCOMMIT;", jobs::install_sql(&table, existing)))?;
            return Ok(OK);
        }
        let new = jobs::install(&mut client, &table, existing).await.map_err(denied)?;
        let name = plain(&table.table).into_owned();
        output::line(&match self.table.database.json {
            true => json!({ "table": table.table, "key": table.key_columns(), "new": new }).to_string(),
            false if new => format!("{name} is a job table now"),
            false => format!("{name} was a job table already; nothing has changed"),
        })?;
        Ok(OK)
    }
}

fn denied(error: Error) -> ExitFailure {
    let missing = error.outcome() == Outcome::Denied;
    let failure = ExitFailure::from(error);
    if missing { failure.next("print it with --sql, for the role that owns the table") } else { failure }
}

impl JobsUninstallArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let (mut client, table) = self.table.find().await?;
        if !jobs::uninstall(&mut client, &table).await.map_err(denied)? {
            return Err(ExitFailure::new(
                Outcome::Absent,
                format!("{} is no job table", quoted(&table.table)),
            ));
        }
        output::line(&match self.table.database.json {
            true => json!({ "table": table.table, "removed": true }).to_string(),
            false => format!(
                "{} is no job table any more; its other columns are as they were",
                plain(&table.table)
            ),
        })?;
        Ok(OK)
    }
}

impl JobsSqlArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let (_, table) = self.table.find().await?;
        let statements = jobs::worker_sql(&table);
        if self.table.database.json {
            let all: serde_json::Map<String, Value> =
                statements.into_iter().map(|(name, sql)| (name.replace(' ', "_"), sql.into())).collect();
            output::line(&json!({ "table": table.table, "statements": all }).to_string())?;
        } else {
            for (name, sql) in statements {
                output::line(&format!("-- {name}\n{sql};\n"))?;
            }
        }
        Ok(OK)
    }
}
