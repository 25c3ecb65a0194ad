//! Renewals: each grant has an answer of its own, by the majority of the nodes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use lockkeeper_core::lease::margin;
use lockkeeper_core::vote::Tally;
use lockkeeper_core::{Error, Grant, Moment, Renewal, Result};
use lockkeeper_redis::Failure;
use redis::{Value, cmd};
use tokio::sync::oneshot;

use crate::errand::Errand;
use crate::node::{Debt, Node};
use crate::quorum::{Answers, millis};
use crate::script::{Call, RENEW, REVIVE};
use crate::store::{COUNTER, Shared};

/// How many grants one script renews: few enough that a node is not blocked for long.
const BATCH: usize = 100;

/// The answers for one batch, and why some of them are unknown.
struct Renewed {
    answers: Vec<Renewal>,
    trouble: Option<Error>,
}

/// What one node says of a grant.
#[derive(Clone, PartialEq)]
enum Code {
    Renewed,
    /// Another holder has the lock there.
    Taken,
    /// No holder has it there.
    Missing,
    /// Not renewed: its holder is to stop, for this reason.
    Revoked(Arc<str>),
}

/// What one node says of each grant of a batch. `None`: no usable reply.
type Codes = Option<Vec<Code>>;

impl Shared {
    /// Renews each grant and answers for each. A grant that the nodes did not decide is [`Renewal::Unknown`]; an error
    /// means that nothing is known of any of them.
    pub async fn renew(self: &Arc<Self>, grants: &[Grant]) -> Result<Vec<Renewal>> {
        // Grants with different times for an answer travel apart: a short one would cut the time of the others.
        let mut by_patience: BTreeMap<Duration, Vec<usize>> = BTreeMap::new();
        for (i, grant) in grants.iter().enumerate() {
            by_patience.entry(self.patience(grant.ttl)).or_default().push(i);
        }
        let batches = by_patience.iter().flat_map(|(patience, which)| {
            which.chunks(BATCH).map(move |which| async move {
                let batch = which.iter().map(|i| grants[*i].clone()).collect();
                (which, self.renew_batch(batch, *patience).await)
            })
        });
        let mut answers = vec![Renewal::Unknown; grants.len()];
        let mut trouble = None;
        for (which, batch) in join_all(batches).await {
            which.iter().zip(batch.answers).for_each(|(i, answer)| answers[*i] = answer);
            trouble = trouble.or(batch.trouble);
        }
        match trouble {
            Some(error) if answers.iter().all(|answer| *answer == Renewal::Unknown) => Err(error),
            Some(error) => {
                let unknown = answers.iter().filter(|answer| **answer == Renewal::Unknown).count();
                tracing::debug!(%error, unknown, of = grants.len(), "some renewals are unknown, and will be tried again");
                Ok(answers)
            }
            None => Ok(answers),
        }
    }

    /// Answers as soon as the nodes have decided on every grant; a task goes on with the nodes that are slower.
    async fn renew_batch(self: &Arc<Self>, grants: Vec<Grant>, patience: Duration) -> Renewed {
        let count = grants.len();
        let (tell, told) = oneshot::channel();
        self.reactor.spawn(self.clone().renew_everywhere(grants, patience, tell));
        told.await.unwrap_or_else(|_| Renewed {
            answers: vec![Renewal::Unknown; count],
            trouble: Some(Error::Unknown("the store was closed during a renewal".into())),
        })
    }

    async fn renew_everywhere(
        self: Arc<Self>,
        grants: Vec<Grant>,
        patience: Duration,
        tell: oneshot::Sender<Renewed>,
    ) {
        // Registered before anything is sent: a release that comes meanwhile must find what begins here.
        let errands: Vec<_> = grants.iter().map(|grant| self.errands.begin(grant.claim.attempt)).collect();
        let sent_at = self.options.clock.now();
        let call = self.renewal(&grants);
        let work = |node: Arc<Node>| {
            let call = call.clone();
            async move { call.run(&node.link).await }
        };
        let mut tell = Some(tell);
        let all = |answers: &Answers| -> Vec<Codes> {
            answers.iter().map(|answer| codes(answer, grants.len())).collect()
        };
        let early = |answers: &Answers| {
            let verdicts = self.verdicts(&all(answers), grants.len());
            if !verdicts.contains(&Renewal::Unknown)
                && let Some(tell) = tell.take()
            {
                _ = tell.send(Renewed { answers: verdicts, trouble: None });
            }
            false
        };
        let answers = self.hear(patience, work, early).await;
        let codes = all(&answers);
        let verdicts = self.verdicts(&codes, grants.len());
        for (i, grant) in grants.iter().enumerate().filter(|(i, _)| verdicts[*i] == Renewal::Renewed) {
            self.revive_where_missing(grant, &errands[i], &codes, i, sent_at);
        }
        if let Some(tell) = tell {
            let open = verdicts.contains(&Renewal::Unknown);
            let trouble = open.then(|| self.undecided(answers));
            _ = tell.send(Renewed { answers: verdicts, trouble });
        }
    }

    fn renewal(&self, grants: &[Grant]) -> Call {
        let mut keys = vec![COUNTER.to_owned()];
        grants.iter().for_each(|grant| keys.extend(self.keys(grant.claim.names.first())));
        grants.iter().fold(Call::new(&RENEW, &keys), |call, grant| {
            call.arg(grant.claim.attempt.to_hex()).arg(millis(grant.ttl)).arg(grant.fence.get())
        })
    }

    /// What the nodes have decided on each of `count` grants.
    fn verdicts(&self, codes: &[Codes], count: usize) -> Vec<Renewal> {
        let verdict = |i: usize| {
            let said = codes.iter().flatten().map(|codes| &codes[i]);
            let yes = said.clone().filter(|code| **code == Code::Renewed).count();
            let revoked = said.clone().filter(|code| matches!(code, Code::Revoked(_))).count();
            let no = said.clone().count() - yes;
            let decided = |no| Tally { yes, no }.verdict(self.nodes.len());
            let reason = said.clone().find_map(|code| match code {
                Code::Revoked(reason) => Some(reason.clone()),
                _ => None,
            });
            match (decided(no), decided(no - revoked)) {
                (Ok(Some(true)), _) => Renewal::Renewed,
                // A majority cannot have the grant any more, revoked or not.
                (_, Ok(Some(false))) => Renewal::Lost,
                (Ok(Some(false)), _) => reason.map_or(Renewal::Lost, Renewal::Revoked),
                _ => Renewal::Unknown,
            }
        };
        (0..count).map(verdict).collect()
    }

    /// Why some renewals are unknown.
    fn undecided(&self, answers: Answers) -> Error {
        match self.majority_did(answers) {
            Err(error) => error,
            Ok(_) => {
                Error::Unknown("the nodes that answered do not decide whether the lock is renewed".into())
            }
        }
    }

    /// A majority has just renewed the grant, so no other holder can have the lock before that is over: a node that does
    /// not have it, young or old, may be given it. See `docs/stores/redlock.md` for why that is safe.
    fn revive_where_missing(
        self: &Arc<Self>,
        grant: &Grant,
        errand: &Arc<Errand>,
        codes: &[Codes],
        i: usize,
        sent_at: Moment,
    ) {
        let with = |wanted: Code| {
            let has = move |codes: &Codes| codes.as_ref().is_some_and(|codes| codes[i] == wanted);
            self.nodes.iter().filter(move |node| has(&codes[node.index])).cloned()
        };
        let Some(source) = with(Code::Renewed).next() else { return };
        for node in with(Code::Missing) {
            let revival = Revival { grant: grant.clone(), errand: errand.clone(), sent_at, node };
            self.reactor.spawn(self.clone().revive(revival, source.clone()));
        }
    }

    async fn revive(self: Arc<Self>, revival: Revival, source: Arc<Node>) {
        let Revival { grant, errand, sent_at, node } = revival;
        let [lock, vote] = self.keys(grant.claim.names.first());
        let Ok(Value::BulkString(text)) = source.link.call(cmd("GET").arg(&vote)).await else { return };
        let now = self.options.clock.now();
        if errand.is_withdrawn() || now >= sent_at + (grant.ttl - margin(grant.ttl)) {
            return;
        }
        let attempt = grant.claim.attempt.to_hex();
        let keys = [lock.clone(), vote.clone(), COUNTER.to_owned()];
        let call = Call::new(&REVIVE, &keys[..])
            .arg(&attempt)
            .arg(millis(grant.ttl))
            .arg(grant.fence.get())
            .arg(text);
        let may_be_there = match call.run(&node.link).await {
            Ok(answer) => answer == Value::Int(1),
            Err(Failure::Away(_)) => false,
            Err(_) => {
                node.note_unanswered(&attempt);
                true
            }
        };
        // Released meanwhile: the release may have reached the node before the revival.
        if may_be_there && errand.is_withdrawn() {
            let channel = self.channel(&lock);
            let debt = Debt::of_all([lock, vote], &attempt, self.number(), channel, now + grant.ttl);
            _ = node.give_back(debt).await;
        }
    }
}

struct Revival {
    grant: Grant,
    errand: Arc<Errand>,
    sent_at: Moment,
    node: Arc<Node>,
}

fn codes(answer: &Option<Result<Value, Failure>>, count: usize) -> Codes {
    let Some(Ok(Value::Array(parts))) = answer else { return None };
    let code = |part: &Value| match part {
        Value::Int(1) => Some(Code::Renewed),
        Value::Int(0) => Some(Code::Taken),
        Value::Int(2) => Some(Code::Missing),
        Value::BulkString(reason) => Some(Code::Revoked(String::from_utf8_lossy(reason).into())),
        _ => None,
    };
    parts.iter().map(code).collect::<Option<Vec<Code>>>().filter(|codes| codes.len() == count)
}
