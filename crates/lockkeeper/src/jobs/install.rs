//! Adds the columns of a job table, and removes them.

use lockkeeper_core::Result;
use lockkeeper_postgres::tokio_postgres::Client;

use super::error::to_error;
use super::statements;
use super::table::JobTable;

/// The state of the rows that the table has when it becomes a job table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExistingRows {
    /// Jobs to do. The default.
    #[default]
    Open,
    /// Done: only rows that come later are jobs.
    Done,
}

/// The statements of [`install`], for a role that may run them.
pub fn install_sql(table: &JobTable, existing: ExistingRows) -> String {
    statements::install(table, existing == ExistingRows::Done)
}

/// The statements of workers, each with its name, for programs in other languages: see docs/jobs.md.
pub fn worker_sql(table: &JobTable) -> Vec<(&'static str, String)> {
    let all = statements::JobStatements::of(table);
    vec![
        ("claim", all.claim),
        ("complete", all.complete),
        ("fail", all.fail),
        ("give back", all.give_back),
        ("extend", all.extend),
        ("look", all.look),
    ]
}

/// Adds the columns and two indexes, in one transaction. `false`: they were there, and nothing has changed.
///
/// # Errors
/// [`lockkeeper_core::Error::Denied`] if the role does not own the table: then [`install_sql`] is for one that does.
pub async fn install(client: &mut Client, table: &JobTable, existing: ExistingRows) -> Result<bool> {
    if table.installed {
        return Ok(false);
    }
    run(client, &install_sql(table, existing)).await.map(|()| true)
}

/// Removes the columns and what they hold: which rows are done is forgotten. `false`: there were none.
///
/// # Errors
/// As [`install`].
pub async fn uninstall(client: &mut Client, table: &JobTable) -> Result<bool> {
    if !table.installed {
        return Ok(false);
    }
    run(client, &statements::uninstall(table)).await.map(|()| true)
}

async fn run(client: &mut Client, sql: &str) -> Result<()> {
    let tx = client.transaction().await.map_err(|e| to_error(&e, false))?;
    tx.batch_execute(sql).await.map_err(|e| to_error(&e, false))?;
    tx.commit().await.map_err(|e| to_error(&e, true))
}
