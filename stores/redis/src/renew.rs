//! Renews the leases of many holds.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::Either;
use futures_util::stream::FuturesUnordered;
use lockkeeper_core::{RenewOutcome, RequestKey, Result};
use redis::Value;

use crate::error::unexpected_reply;
use crate::keys::KeyGroup;
use crate::router::OnSplitKeys;
use crate::runner::ScriptRunner;
use crate::slot_migration::SlotMigration;
use crate::statements::{RENEW, ScriptCall};

/// How many holds one script renews: few enough not to block the server's other clients for long.
const RENEWALS_PER_SCRIPT: usize = 100;

/// Renews holds, all scripts in flight at once. If the node of one group does not reply while another does, the renewals of that
/// group are *unknown* and do not harm the other groups: neither by their error nor by their delay, which is limited to a quarter
/// of `shortest`, the shortest ttl. An error if no group has a reply.
pub(crate) async fn renew_all(
    runner: &ScriptRunner,
    parts: &[(KeyGroup, &RequestKey)],
    shortest: Duration,
) -> Result<Vec<RenewOutcome>> {
    let mut sorted: Vec<usize> = (0..parts.len()).collect();
    sorted.sort_by_key(|i| parts[*i].0);
    let batches = sorted
        .chunk_by(|a, b| parts[*a].0 == parts[*b].0)
        .flat_map(|group| group.chunks(RENEWALS_PER_SCRIPT));
    let calls = batches.map(|batch| async move { (batch, renew_batch(runner, parts, batch).await) });
    let mut calls: FuturesUnordered<_> = calls.collect();
    let (mut outcomes, mut renewed, mut failed) =
        (vec![RenewOutcome::Unknown; parts.len()], calls.is_empty(), None);
    let mut timeout = std::pin::pin!(match calls.len() {
        // A single script delays no other.
        0 | 1 => Either::Left(std::future::pending()),
        _ => Either::Right(runner.router.pause(shortest / 4)),
    });
    let mut late = false;
    while !(late && renewed) {
        let next = tokio::select! {
            next = calls.next() => next,
            () = &mut timeout, if !late => {
                late = true;
                continue;
            }
        };
        let Some((batch, reply)) = next else { break };
        match reply {
            Ok(each) => {
                renewed = true;
                batch.iter().zip(each).for_each(|(i, outcome)| outcomes[*i] = outcome);
            }
            Err(error) => {
                tracing::warn!(%error, guards = batch.len(), "renewal failed; the guards renew again");
                failed = Some(error);
            }
        }
    }
    match failed {
        Some(error) if !renewed => Err(error),
        _ => Ok(outcomes),
    }
}

async fn renew_batch(
    runner: &ScriptRunner,
    parts: &[(KeyGroup, &RequestKey)],
    batch: &[usize],
) -> Result<Vec<RenewOutcome>> {
    let group = parts[batch[0]].0;
    let keys = || batch.iter().map(|i| parts[*i].1);
    let names = keys().flat_map(|key| key.names.iter()).map(|name| runner.keys.lock_key(name));
    let mut call = ScriptCall::new(&RENEW, &runner.script_keys(group, names))
        .arg(runner.keys.group_prefix(group))
        .arg(runner.claim_ms())
        .arg(&runner.client);
    for key in keys() {
        call = call.arg(key.attempt.to_hex()).arg(key.names.count());
    }
    let sent = match &runner.grant_router {
        Some(grants) => runner.run_replicated(grants, group, &call, OnSplitKeys::Report).await,
        None => runner.run_or_report(group, &call).await.map(|reply| (reply, Ok(()))),
    };
    let (replies, replicated) = match sent {
        Err(failure) if failure.keys_are_split() => {
            return SlotMigration::new(runner, group).renew(&keys().collect::<Vec<_>>()).await;
        }
        sent => sent?,
    };
    let Value::Array(replies) = replies else { return Err(unexpected_reply()) };
    if replies.len() != batch.len() {
        return Err(unexpected_reply());
    }
    if let Err(failure) = &replicated {
        tracing::warn!(
            ?failure,
            guards = batch.len(),
            "renewal not replicated; it does not count and is sent again"
        );
    }
    // The lease ends earlier on a replica without the renewal, so a renewal that too few replicas have does not count.
    let outcome = |reply| match reply {
        Value::Int(1) if replicated.is_ok() => RenewOutcome::Renewed,
        Value::Int(1) => RenewOutcome::Unknown,
        Value::BulkString(reason) => RenewOutcome::Revoked(String::from_utf8_lossy(&reason).into()),
        _ => RenewOutcome::Lost,
    };
    Ok(replies.into_iter().map(outcome).collect())
}
