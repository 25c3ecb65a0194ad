//! Renewing many grants in one statement.

use lockkeeper_core::{Grant, LockName, RenewOutcome, Result};

use crate::codec::{hash, unexpected_reply};
use crate::connection::Connection;
use crate::statements::RENEW;

/// How many holds one statement renews: few enough that others do not wait long for the rows.
const MAX_RENEWALS: usize = 10_000;

/// Renews grants. A grant of several names is lost as a whole.
pub(crate) async fn renew(connection: &Connection, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
    let mut holds: Vec<(&LockName, usize)> = Vec::with_capacity(grants.len());
    for (i, grant) in grants.iter().enumerate() {
        holds.extend(grant.key.names.iter().map(|name| (name, i)));
    }
    // In the order of names, as every client does.
    holds.sort();
    let hashes: Vec<Vec<u8>> = grants.iter().map(|grant| hash(&grant.key.attempt)).collect();
    let mut outcomes = vec![RenewOutcome::Renewed; grants.len()];
    for batch in holds.chunks(MAX_RENEWALS) {
        let names: Vec<&str> = batch.iter().map(|(name, _)| name.as_str()).collect();
        let attempts: Vec<&[u8]> = batch.iter().map(|(_, i)| &hashes[*i][..]).collect();
        let rows = connection.rows(&RENEW, &[&names, &attempts]).await?;
        if rows.len() != batch.len() {
            return Err(unexpected_reply());
        }
        for ((_, i), row) in batch.iter().zip(rows) {
            let reply: Option<String> = row.try_get(0).map_err(|_| unexpected_reply())?;
            match reply {
                None => outcomes[*i] = RenewOutcome::Lost,
                Some(reason) if !reason.is_empty() && outcomes[*i] != RenewOutcome::Lost => {
                    outcomes[*i] = RenewOutcome::Revoked(reason.into());
                }
                Some(_) => {}
            }
        }
    }
    Ok(outcomes)
}
