//! Renewals: each grant has an answer of its own, by the majority of the nodes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use lockkeeper_core::lease::margin;
use lockkeeper_core::vote::Tally;
use lockkeeper_core::{BootInstant, Error, Grant, RenewOutcome, Result};
use lockkeeper_redis::Failure;
use redis::{Value, cmd};
use tokio::sync::oneshot;

use crate::connection::{NodeRelease, RedlockNode};
use crate::counters::Counters;
use crate::keys::{FENCE_COUNTER, Keys};
use crate::quorum::{NodeReplies, Quorum};
use crate::statements::{RENEW, RESTORE, ScriptCall, millis};
use crate::unknown::{PendingAttempt, PendingAttempts};

/// How many grants one script renews: few enough that a node is not blocked for long.
const MAX_BATCH: usize = 100;

/// The answers for one batch, and why some of them are unknown.
struct QuorumRenewal {
    answers: Vec<RenewOutcome>,
    error: Option<Error>,
}

/// The reply of one node for a grant.
#[derive(Clone, PartialEq)]
enum RenewReply {
    Renewed,
    /// Another holder has the lock there.
    Taken,
    /// No holder has it there.
    Missing,
    /// Not renewed: its holder is to stop, for this reason.
    Revoked(Arc<str>),
}

/// The reply of one node for each grant of a batch. `None`: no usable reply.
type BatchReply = Option<Vec<RenewReply>>;

/// Renews grants. Clones share everything.
#[derive(Clone)]
pub struct Renewer {
    pub quorum: Arc<Quorum>,
    pub keys: Arc<Keys>,
    pub counters: Arc<Counters>,
    pub pending: Arc<PendingAttempts>,
}

impl Renewer {
    /// Renews each grant and answers for each. A grant that the nodes did not decide is [`RenewOutcome::Unknown`]; an error
    /// means that nothing is known of any of them.
    pub async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        // Grants with different times for an answer travel apart: a short one would cut the time of the others.
        let mut by_timeout: BTreeMap<Duration, Vec<usize>> = BTreeMap::new();
        for (i, grant) in grants.iter().enumerate() {
            by_timeout.entry(self.quorum.node_timeout(grant.ttl)).or_default().push(i);
        }
        let batches = by_timeout.iter().flat_map(|(node_timeout, which)| {
            which.chunks(MAX_BATCH).map(move |which| async move {
                let batch = which.iter().map(|i| grants[*i].clone()).collect();
                (which, self.renew_batch(batch, *node_timeout).await)
            })
        });
        let mut answers = vec![RenewOutcome::Unknown; grants.len()];
        let mut error = None;
        for (which, batch) in join_all(batches).await {
            which.iter().zip(batch.answers).for_each(|(i, answer)| answers[*i] = answer);
            error = error.or(batch.error);
        }
        match error {
            Some(error) if answers.iter().all(|answer| *answer == RenewOutcome::Unknown) => Err(error),
            Some(error) => {
                let unknown = answers.iter().filter(|answer| **answer == RenewOutcome::Unknown).count();
                tracing::debug!(%error, unknown, of = grants.len(), "some renewals are unknown, and will be tried again");
                Ok(answers)
            }
            None => Ok(answers),
        }
    }

    /// Returns as soon as the nodes have decided on every grant; a task goes on with the nodes that are slower.
    async fn renew_batch(&self, grants: Vec<Grant>, node_timeout: Duration) -> QuorumRenewal {
        let count = grants.len();
        let (reply, replies) = oneshot::channel();
        self.quorum.io_thread.spawn(self.clone().renew_on_all(grants, node_timeout, reply));
        replies.await.unwrap_or_else(|_| QuorumRenewal {
            answers: vec![RenewOutcome::Unknown; count],
            error: Some(Error::Unknown("the store was closed during a renewal".into())),
        })
    }

    async fn renew_on_all(
        self,
        grants: Vec<Grant>,
        node_timeout: Duration,
        reply: oneshot::Sender<QuorumRenewal>,
    ) {
        // Registered before anything is sent, so that a release that comes meanwhile finds and cancels it.
        let pending: Vec<_> = grants.iter().map(|grant| self.pending.begin(grant.key.attempt)).collect();
        let sent_at = self.quorum.options.clock.now();
        let call = self.renewal(&grants);
        let work = |node: Arc<RedlockNode>| {
            let call = call.clone();
            async move { call.run(&node.connection).await }
        };
        let mut reply = Some(reply);
        let all = |answers: &NodeReplies| -> Vec<BatchReply> {
            answers.iter().map(|answer| codes(answer, grants.len())).collect()
        };
        let early = |answers: &NodeReplies| {
            let outcomes = self.outcomes(&all(answers), grants.len());
            if !outcomes.contains(&RenewOutcome::Unknown)
                && let Some(reply) = reply.take()
            {
                _ = reply.send(QuorumRenewal { answers: outcomes, error: None });
            }
            false
        };
        let answers = self.quorum.call_all(node_timeout, work, early).await;
        let codes = all(&answers);
        let outcomes = self.outcomes(&codes, grants.len());
        for (i, grant) in grants.iter().enumerate().filter(|(i, _)| outcomes[*i] == RenewOutcome::Renewed) {
            self.restore_where_missing(grant, &pending[i], &codes, i, sent_at);
        }
        if let Some(reply) = reply {
            let open = outcomes.contains(&RenewOutcome::Unknown);
            let error = open.then(|| self.undecided(answers));
            _ = reply.send(QuorumRenewal { answers: outcomes, error });
        }
    }

    fn renewal(&self, grants: &[Grant]) -> ScriptCall {
        let mut keys = vec![FENCE_COUNTER.to_owned()];
        grants.iter().for_each(|grant| keys.extend(self.keys.lock_and_vote(grant.key.names.first())));
        grants.iter().fold(ScriptCall::new(&RENEW, &keys), |call, grant| {
            call.arg(grant.key.attempt.to_hex()).arg(millis(grant.ttl)).arg(grant.fence.get())
        })
    }

    /// The outcome of each of `count` grants, by the replies so far.
    fn outcomes(&self, codes: &[BatchReply], count: usize) -> Vec<RenewOutcome> {
        let verdict = |i: usize| {
            let replies = codes.iter().flatten().map(|codes| &codes[i]);
            let yes = replies.clone().filter(|code| **code == RenewReply::Renewed).count();
            let revoked = replies.clone().filter(|code| matches!(code, RenewReply::Revoked(_))).count();
            let no = replies.clone().count() - yes;
            let decided = |no| Tally { yes, no }.verdict(self.quorum.nodes.len());
            let reason = replies.clone().find_map(|code| match code {
                RenewReply::Revoked(reason) => Some(reason.clone()),
                _ => None,
            });
            match (decided(no), decided(no - revoked)) {
                (Ok(Some(true)), _) => RenewOutcome::Renewed,
                // A majority cannot have the grant any more, revoked or not.
                (_, Ok(Some(false))) => RenewOutcome::Lost,
                (Ok(Some(false)), _) => reason.map_or(RenewOutcome::Lost, RenewOutcome::Revoked),
                _ => RenewOutcome::Unknown,
            }
        };
        (0..count).map(verdict).collect()
    }

    /// Why some renewals are unknown.
    fn undecided(&self, answers: NodeReplies) -> Error {
        match self.quorum.require_majority_of_writes(answers) {
            Err(error) => error,
            Ok(_) => {
                Error::Unknown("the nodes that answered do not decide whether the lock is renewed".into())
            }
        }
    }

    /// A majority has just renewed the grant, so no other holder can have the lock before that is over: a node that does
    /// not have it, young or old, may set it again. `docs/stores/redlock.md` says why that is safe.
    fn restore_where_missing(
        &self,
        grant: &Grant,
        pending: &Arc<PendingAttempt>,
        codes: &[BatchReply],
        i: usize,
        sent_at: BootInstant,
    ) {
        let with = |wanted: RenewReply| {
            let has = move |codes: &BatchReply| codes.as_ref().is_some_and(|codes| codes[i] == wanted);
            self.quorum.nodes.iter().filter(move |node| has(&codes[node.index])).cloned()
        };
        let Some(source) = with(RenewReply::Renewed).next() else { return };
        for node in with(RenewReply::Missing) {
            let restore = Restore { grant: grant.clone(), pending: pending.clone(), sent_at, node };
            self.quorum.io_thread.spawn(self.clone().restore(restore, source.clone()));
        }
    }

    async fn restore(self, restore: Restore, source: Arc<RedlockNode>) {
        let Restore { grant, pending, sent_at, node } = restore;
        let keys = self.keys.lock_vote_and_counter(grant.key.names.first());
        let Ok(Value::BulkString(text)) = source.connection.call(cmd("GET").arg(&keys[1])).await else {
            return;
        };
        let now = self.quorum.options.clock.now();
        if pending.is_cancelled() || now >= sent_at + (grant.ttl - margin(grant.ttl)) {
            return;
        }
        let attempt = grant.key.attempt.to_hex();
        let call = ScriptCall::new(&RESTORE, &keys[..])
            .arg(&attempt)
            .arg(millis(grant.ttl))
            .arg(grant.fence.get())
            .arg(text);
        let may_be_there = match call.run(&node.connection).await {
            Ok(answer) => answer == Value::Int(1),
            Err(Failure::NotSent(_)) => false,
            Err(_) => {
                node.note_unanswered(&attempt);
                true
            }
        };
        // Released meanwhile: the release may have reached the node before the revival.
        if may_be_there && pending.is_cancelled() {
            let [lock, vote, _] = keys;
            let channel = self.keys.channel(&lock);
            let release = NodeRelease::of_all(
                [lock, vote],
                &attempt,
                self.counters.next_round(),
                channel,
                now + grant.ttl,
            );
            _ = node.release_or_enqueue(release).await;
        }
    }
}

struct Restore {
    grant: Grant,
    pending: Arc<PendingAttempt>,
    sent_at: BootInstant,
    node: Arc<RedlockNode>,
}

fn codes(answer: &Option<Result<Value, Failure>>, count: usize) -> BatchReply {
    let Some(Ok(Value::Array(parts))) = answer else { return None };
    let code = |part: &Value| match part {
        Value::Int(1) => Some(RenewReply::Renewed),
        Value::Int(0) => Some(RenewReply::Taken),
        Value::Int(2) => Some(RenewReply::Missing),
        Value::BulkString(reason) => Some(RenewReply::Revoked(String::from_utf8_lossy(reason).into())),
        _ => None,
    };
    parts.iter().map(code).collect::<Option<Vec<RenewReply>>>().filter(|codes| codes.len() == count)
}
