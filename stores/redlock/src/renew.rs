//! Renewing, giving back, breaking.

use std::sync::Arc;

use futures_util::future::try_join_all;
use lockkeeper_core::lease::margin;
use lockkeeper_core::vote::Tally;
use lockkeeper_core::{Claim, Error, Fence, Grant, LockName, Moment, Release, Renewal, Result, Wall};
use lockkeeper_redis::Failure;
use redis::{Value, cmd};

use crate::errand::Errand;
use crate::node::{Debt, Node};
use crate::quorum::{Answers, millis, odd};
use crate::script::{BREAK, Call, RAISE, RENEW, REVIVE};
use crate::store::{COUNTER, Shared};

/// How many one script renews: few enough not to keep a node from everybody else for long.
const BATCH: usize = 100;
/// How often a renewal that some nodes did not answer is tried, when that is all that is missing.
const TRIES: usize = 3;

impl Shared {
    pub async fn renew(self: &Arc<Self>, grants: &[Grant]) -> Result<Vec<Renewal>> {
        let batches = try_join_all(grants.chunks(BATCH).map(|batch| self.renew_some(batch))).await?;
        Ok(batches.into_iter().flatten().collect())
    }

    async fn renew_some(self: &Arc<Self>, grants: &[Grant]) -> Result<Vec<Renewal>> {
        // Known before anything is sent: a release that comes meanwhile must find what we begin here.
        let errands: Vec<_> = grants.iter().map(|grant| self.errands.begin(grant.claim.attempt)).collect();
        let ttl = grants.iter().map(|grant| grant.ttl).min().unwrap_or_default();
        let mut tries = 0;
        loop {
            tries += 1;
            let sent_at = self.options.clock.now();
            let call = self.renewal(grants);
            let work = |node: Arc<Node>| {
                let call = call.clone();
                async move { call.run(&node.link).await }
            };
            let answers = self.hear(self.patience(ttl), work, |_| false).await;
            let codes: Vec<Option<Vec<i64>>> =
                answers.iter().map(|answer| codes(answer, grants.len())).collect();
            let verdicts = (0..grants.len()).map(|i| self.tally(&codes, i).verdict(self.nodes.len()));
            let verdicts: Vec<Option<bool>> = verdicts.collect::<Result<_>>()?;
            if verdicts.contains(&None) && !verdicts.contains(&Some(true)) {
                // Nothing is known of any of them: they are tried again for as long as their leases last.
                self.majority_of(answers)?;
                return Err(Error::Unavailable("too few nodes know of the lock".into()));
            }
            if verdicts.contains(&None) && tries < TRIES {
                continue;
            }
            for (i, grant) in grants.iter().enumerate().filter(|(i, _)| verdicts[*i] == Some(true)) {
                self.revive_where_missing(grant, &errands[i], &codes, i, sent_at);
            }
            // One that stays open is lost: it must not take the others with it, which were renewed.
            let renewal = |renewed: &Option<bool>| match renewed {
                Some(true) => Renewal::Renewed,
                _ => Renewal::Lost,
            };
            return Ok(verdicts.iter().map(renewal).collect());
        }
    }

    fn renewal(&self, grants: &[Grant]) -> Call {
        let mut keys = vec![COUNTER.to_owned()];
        grants.iter().for_each(|grant| keys.extend(self.keys(grant.claim.names.first())));
        grants.iter().fold(Call::new(&RENEW, &keys), |call, grant| {
            call.arg(grant.claim.attempt.to_hex()).arg(millis(grant.ttl)).arg(grant.fence.get())
        })
    }

    fn tally(&self, codes: &[Option<Vec<i64>>], i: usize) -> Tally {
        let said = codes.iter().flatten().map(|codes| codes[i]);
        Tally {
            yes: said.clone().filter(|code| *code == 1).count(),
            no: said.filter(|code| *code != 1).count(),
        }
    }

    /// A majority has just renewed it, so nobody else can have it before that is over: a node that does not have it, be
    /// it young or old, may be given it. See `docs/stores/redlock.md` for why that is safe.
    fn revive_where_missing(
        self: &Arc<Self>,
        grant: &Grant,
        errand: &Arc<Errand>,
        codes: &[Option<Vec<i64>>],
        i: usize,
        sent_at: Moment,
    ) {
        let with = |wanted: i64| {
            let has = move |codes: &Option<Vec<i64>>| codes.as_ref().is_some_and(|codes| codes[i] == wanted);
            self.nodes.iter().filter(move |node| has(&codes[node.index])).cloned()
        };
        let Some(source) = with(1).next() else { return };
        for node in with(2) {
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
        let unheard = match call.run(&node.link).await {
            Ok(answer) => answer == Value::Int(1),
            Err(failure) => matches!(failure, Failure::Unheard(_)),
        };
        // Released meanwhile: the release may have been there before us.
        if unheard && errand.is_withdrawn() {
            let channel = self.channel(&lock);
            let debt = Debt::new(&[lock, vote], &attempt, 0, &channel, now + grant.ttl);
            _ = node.give_back(debt).await;
        }
    }

    /// Gives back everywhere, and takes back what is under way. A node that does not answer now hears of it later.
    pub async fn release(&self, claim: &Claim) -> Result<Release> {
        let asked = self.errands.withdraw(claim.attempt);
        let [lock, vote] = self.keys(claim.names.first());
        let until = self.options.clock.now() + self.options.max_ttl;
        let channel = self.channel(&lock);
        let debt = Debt::new(&[lock, vote], &claim.attempt.to_hex(), 0, &channel, until);
        let work = |node: Arc<Node>| {
            let debt = debt.clone();
            async move { node.give_back(debt).await.map(|was_there| Value::Int(was_there.into())) }
        };
        let count = |answers: &Answers, wanted: i64| {
            answers.iter().filter(|answer| matches!(answer, Some(Ok(Value::Int(n))) if *n == wanted)).count()
        };
        let heard = |answers: &Answers| count(answers, 1) + count(answers, 0);
        let answers =
            self.hear(self.options.node_timeout, work, |answers| heard(answers) >= self.quorum).await;
        if heard(&answers) >= self.quorum {
            // A majority has nothing of ours any more, so it is not ours. It was, if any node still had it.
            let was_ours = asked || count(&answers, 1) > 0;
            return Ok(if was_ours { Release::Released } else { Release::AlreadyGone });
        }
        let heard = heard(&answers);
        let unheard = answers.iter().any(|answer| matches!(answer, None | Some(Err(Failure::Unheard(_)))));
        let failures: Vec<Failure> = answers.into_iter().flatten().filter_map(Result::err).collect();
        Err(match self.too_few(heard, 0, &failures) {
            Error::Unavailable(text) if unheard => Error::Unknown(text),
            other => other,
        })
    }

    /// Takes the lock away at every node that answers, and moves the fence on at a majority.
    pub async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let [lock, vote] = self.keys(name);
        let channel = self.channel(&lock);
        let call = Call::new(&BREAK, &[lock, vote, COUNTER.to_owned()][..]).arg(channel);
        let mut highest = Fence::new(self.floor.load(std::sync::atomic::Ordering::Relaxed)).ok();
        let mut clock = Wall::default();
        for (_, answer) in self.majority_of(self.everywhere(&call).await)? {
            let Value::Array(parts) = answer else { return Err(odd()) };
            let [Value::Int(counter), Value::Int(now)] = parts[..] else { return Err(odd()) };
            highest = highest.max(u64::try_from(counter).ok().and_then(|n| Fence::new(n).ok()));
            clock = clock.max(Wall::from_micros(u64::try_from(now).unwrap_or(0)));
        }
        let fence = Fence::after(highest, clock)?;
        let raise = Call::new(&RAISE, &[COUNTER]).arg(fence.get());
        // The lock is gone already: what is not known is only whether the fence has moved on.
        self.majority_of(self.everywhere(&raise).await).map_err(|error| Error::Unknown(error.to_string()))?;
        self.seen(fence);
        tracing::info!(%name, reason, %fence, "a lock was broken");
        Ok(fence)
    }

    async fn everywhere(&self, call: &Call) -> Answers {
        let work = |node: Arc<Node>| {
            let call = call.clone();
            async move { call.run(&node.link).await }
        };
        self.hear(self.options.node_timeout, work, |_| false).await
    }
}

struct Revival {
    grant: Grant,
    errand: Arc<Errand>,
    sent_at: Moment,
    node: Arc<Node>,
}

fn codes(answer: &Option<Result<Value, Failure>>, count: usize) -> Option<Vec<i64>> {
    let Some(Ok(Value::Array(parts))) = answer else { return None };
    let code = |part: &Value| match part {
        Value::Int(code) => Some(*code),
        _ => None,
    };
    parts.iter().map(code).collect::<Option<Vec<i64>>>().filter(|codes| codes.len() == count)
}
