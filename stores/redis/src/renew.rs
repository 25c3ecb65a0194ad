//! Renews the leases of many holds.

use std::future::pending;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
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
/// group are *unknown* and do not harm the other groups: neither by their error nor by their delay. An error if no group has a reply.
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
    let begun = Instant::now();
    let limit = || runner.router.pause(patience(shortest, begun.elapsed()));
    collect(calls.collect(), parts.len(), limit).await
}

/// For how much longer a renewal waits for the other replies, if the first one took `first`: until a quarter of the shortest ttl is over,
/// or twice that time, but not beyond two fifths of the ttl. A guard renews when a third of its ttl is over, so its deadline is not past by then.
fn patience(shortest: Duration, first: Duration) -> Duration {
    (shortest / 4).max(first * 2).min(shortest * 2 / 5).saturating_sub(first)
}

/// Collects the replies of batches, each with the numbers of its holds. `limit` begins with the first reply. A server that is up replies
/// at about the time at which another one does, also where the shortest ttl is not much longer than a round trip.
async fn collect<'b, C, P>(
    mut calls: FuturesUnordered<C>,
    holds: usize,
    limit: impl Fn() -> P,
) -> Result<Vec<RenewOutcome>>
where
    C: Future<Output = (&'b [usize], Result<Vec<RenewOutcome>>)>,
    P: Future<Output = ()>,
{
    let (mut outcomes, mut renewed, mut failed) =
        (vec![RenewOutcome::Unknown; holds], calls.is_empty(), None);
    let mut timeout = std::pin::pin!(None);
    loop {
        let over = async {
            match timeout.as_mut().as_pin_mut() {
                Some(timeout) => timeout.await,
                None => pending().await,
            }
        };
        let next = tokio::select! {
            biased;
            next = calls.next() => next,
            () = over => break,
        };
        let Some((batch, reply)) = next else { break };
        match reply {
            Ok(each) => {
                batch.iter().zip(each).for_each(|(i, outcome)| outcomes[*i] = outcome);
                if !renewed {
                    timeout.set(Some(limit()));
                }
                renewed = true;
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

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tokio::sync::oneshot;

    use super::*;

    /// With a silent node, the replies of a slow one used to be reported after twice the time that the first took: beyond the deadline of
    /// its guards, if that was more than half of the ttl.
    #[test]
    fn the_wait_for_a_silent_node_ends_before_the_deadline_of_the_others() {
        let ttl = Duration::from_secs(4);
        let reported = |first| first + patience(ttl, first);
        for first in (0..4000).step_by(10).map(Duration::from_millis) {
            let latest = first.max(ttl / 2);
            assert!(reported(first) <= latest, "{first:?}: reported after {:?}", reported(first));
        }
        assert_eq!(reported(Duration::from_millis(10)), ttl / 4);
        assert_eq!(reported(Duration::from_millis(700)), Duration::from_millis(1400));
    }

    /// The first reply used to end the call if it came after the limit: of servers that were all well, but slower than a quarter of
    /// the shortest ttl, one renewed its guards, and those of the others were unknown, round after round.
    #[test]
    fn the_limit_begins_with_the_first_reply_and_takes_every_reply_that_is_there() {
        let (replies, calls): (Vec<_>, Vec<_>) = (0..3).map(|_| oneshot::channel::<()>()).unzip();
        let mut replies: Vec<_> = replies.into_iter().map(Some).collect();
        let holds = [&[0_usize][..], &[1], &[2], &[3]];
        let calls = calls.into_iter().zip(holds).map(|(reply, hold)| async move {
            reply.await.expect("the test sends it");
            (hold, Ok(vec![RenewOutcome::Renewed]))
        });
        let (end, limit) = oneshot::channel::<()>();
        let limit = std::cell::RefCell::new(Some(limit));
        let begin_limit = || limit.take().expect("one limit").map(drop);
        let mut outcomes = std::pin::pin!(collect(calls.collect(), 3, begin_limit));
        assert!(outcomes.as_mut().now_or_never().is_none(), "no reply, so no limit");
        assert!(limit.borrow().is_some(), "the limit has begun without a reply");
        replies[1].take().map(|reply| reply.send(()));
        assert!(outcomes.as_mut().now_or_never().is_none(), "the first reply has ended the call");
        assert!(limit.borrow().is_none(), "the limit has not begun with the first reply");
        replies[2].take().map(|reply| reply.send(()));
        end.send(()).unwrap();
        let outcomes = outcomes.now_or_never().expect("the limit is over").unwrap();
        assert_eq!(outcomes, [RenewOutcome::Unknown, RenewOutcome::Renewed, RenewOutcome::Renewed]);
    }
}
