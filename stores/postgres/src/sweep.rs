//! Removing rows that have been idle for an hour.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use crate::connection::Connection;
use crate::error::Failure;
use crate::poll::jitter;
use crate::session::first;
use crate::statements::{CLAIM_SWEEP, END_SWEEP, SWEEPS};

/// Sweeps every ten minutes, and at once where no process has done so for long: most processes may live for seconds only. The first
/// process to come sweeps for all.
pub(crate) async fn run(connection: Arc<Connection>, overdue: Arc<Notify>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(jitter(Duration::from_secs(600))) => {}
            () = overdue.notified() => {}
        }
        if let Err(failure) = sweep(&connection).await {
            tracing::debug!(?failure, "the sweep of idle rows failed; sweeping again in ten minutes");
        }
    }
}

/// Sweeps in portions: requests and renewals use the same connection.
async fn sweep(connection: &Connection) -> Result<(), Failure> {
    if !first::<bool>(&connection.rows(&CLAIM_SWEEP, &[]).await?, 0)? {
        return Ok(());
    }
    for sweep in &SWEEPS {
        let mut after = Some(String::new());
        while let Some(last) = after {
            after = first(&connection.rows(sweep, &[&last]).await?, 0)?;
        }
    }
    connection.rows(&END_SWEEP, &[]).await?;
    Ok(())
}
