//! Asking, and waiting for the lock.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lockkeeper_core::lease::Why;
use lockkeeper_core::vote::{Verdict, Vote};
use lockkeeper_core::{Acquired, Ask, Busy, Error, Fence, Grant, Mode, Moment, Result, Wait};
use lockkeeper_host::{random_128, sleep_until};

use crate::entry;
use crate::errand::Errand;
use crate::node::Debt;
use crate::quorum::millis;
use crate::round::{Job, Round};
use crate::script::{Call, LOCK};
use crate::store::{COUNTER, Shared};

/// How an ask without patience goes on when several try at once and nobody wins.
const CONTESTED: u32 = 8;
/// The first pause between two such tries, at most; the next is twice as long.
const PAUSE: Duration = Duration::from_millis(4);
/// Other clients give a lock back without a word to us: it is tried more often.
const FOREIGN: Duration = Duration::from_millis(100);
/// Those who are told of a release together do not try together.
const SPREAD: Duration = Duration::from_millis(16);

/// How a round ended, if it ended well.
enum Outcome {
    Granted(Grant),
    Busy(Busy, Next),
}

/// When it is worth trying again.
#[derive(Clone, Copy)]
enum Next {
    /// Nobody has a majority.
    Soon,
    /// Somebody has: after this long, if nothing is heard before.
    After(Duration),
}

impl Shared {
    pub fn check(&self, ask: &Ask) -> Result<()> {
        ask.check()?;
        let wanted = [
            (ask.mode == Mode::Shared, "shared locks"),
            (matches!(ask.mode, Mode::Permit(_)), "permits"),
            (ask.claim.names.count() > 1, "several names at once"),
            (ask.owner.is_some(), "re-entry by an owner"),
            (!ask.lock_delay.is_zero(), "lock-delay"),
            (!ask.min_hold.is_zero(), "minimum hold"),
        ];
        if let Some((_, what)) = wanted.iter().find(|(wanted, _)| *wanted) {
            return Err(unsupported(what));
        }
        if ask.ttl > self.options.max_ttl {
            return Err(Error::invalid(format!(
                "the ttl is {:?}, and this store allows {:?} at most: a longer one needs ?max_ttl=",
                ask.ttl, self.options.max_ttl
            )));
        }
        Ok(())
    }

    pub async fn acquire(self: &Arc<Self>, ask: &Ask) -> Result<Acquired> {
        let clock = &*self.options.clock;
        let until = match ask.wait {
            Wait::No => clock.now(),
            Wait::For(time) => clock.now() + time,
            Wait::Forever => Moment::NEVER,
        };
        let errand = self.errands.begin(ask.claim.attempt);
        let _asking = errand.ask();
        let (busy, next) = match self.ask_now(&errand, ask).await? {
            Outcome::Granted(grant) => return Ok(Acquired::Granted(grant)),
            Outcome::Busy(busy, _) if ask.wait == Wait::No => return Ok(Acquired::Busy(busy)),
            Outcome::Busy(busy, next) => (busy, next),
        };
        self.wait(&errand, ask, until, busy, next).await
    }

    /// Asks until somebody has the lock: if several ask at once, it may be that nobody gets a majority.
    async fn ask_now(&self, errand: &Arc<Errand>, ask: &Ask) -> Result<Outcome> {
        let clock = &*self.options.clock;
        for tries in 0.. {
            match self.round(errand, ask).await? {
                Outcome::Busy(_, Next::Soon) if tries < CONTESTED => {
                    sleep_until(clock, clock.now() + jitter(PAUSE * 2u32.pow(tries))).await;
                }
                outcome => return Ok(outcome),
            }
        }
        Err(Error::Unknown("the counting of tries has ended".into()))
    }

    async fn wait(
        self: &Arc<Self>,
        errand: &Arc<Errand>,
        ask: &Ask,
        until: Moment,
        mut busy: Busy,
        mut next: Next,
    ) -> Result<Acquired> {
        let clock = &*self.options.clock;
        let place = self.join(&self.key(ask.claim.names.first()));
        let mut turn = None;
        let mut contested = 0;
        loop {
            if turn.is_none() {
                tokio::select! {
                    got = place.gate.turn() => turn = Some(got),
                    () = errand.withdrawn() => return Err(left()),
                    () = sleep_until(clock, until) => {}
                }
            }
            if turn.is_some() {
                place.listen();
                let pause = self.pause(next, contested);
                tokio::select! {
                    () = place.gate.hint() => sleep_until(clock, (clock.now() + jitter(SPREAD)).min(until)).await,
                    () = errand.withdrawn() => return Err(left()),
                    () = sleep_until(clock, (clock.now() + pause).min(until)) => {}
                }
            }
            let last = clock.now() >= until;
            match self.round(errand, ask).await {
                Ok(Outcome::Granted(grant)) => return Ok(Acquired::Granted(grant)),
                Ok(Outcome::Busy(now_busy, now_next)) => (busy, next) = (now_busy, now_next),
                // Whoever waits goes on waiting while nodes are away.
                Err(error @ (Error::Unavailable(_) | Error::Unknown(_)))
                    if !last && !errand.is_withdrawn() =>
                {
                    tracing::debug!(%error, "still waiting");
                    next = Next::After(self.options.poll);
                }
                Err(error) => return Err(error),
            }
            if last {
                return Ok(Acquired::Busy(busy));
            }
            contested = if matches!(next, Next::Soon) { contested + 1 } else { 0 };
        }
    }

    fn pause(&self, next: Next, contested: u32) -> Duration {
        let poll = self.options.poll;
        match next {
            Next::Soon => jitter((PAUSE * 2u32.pow(contested.min(16))).min(poll)),
            Next::After(time) => time.min(poll / 2 + jitter(poll / 2)) + Duration::from_millis(1),
        }
    }

    /// Asks every node once. If it is not granted, what some of them gave has been released, or will be.
    async fn round(&self, errand: &Arc<Errand>, ask: &Ask) -> Result<Outcome> {
        let clock = &*self.options.clock;
        let patience = self.patience(ask.ttl);
        let sent_at = clock.now();
        let floor = Fence::new(self.floor.load(Ordering::Relaxed)).ok();
        let vote = Vote::new(self.nodes.len(), ask.ttl, patience, floor, sent_at)?;
        let number = self.number();
        let job = self.job(ask, number, sent_at);
        let round = Round::begin(errand, number, vote, job, &self.nodes, &self.reactor);
        let verdict = round.verdict(clock).await;
        let revoked = round.said().revoked.clone();
        if let Verdict::Granted(fence) = verdict
            && revoked.is_none()
        {
            self.seen(fence);
            let (claim, mode, ttl) = (ask.claim.clone(), ask.mode, ask.ttl);
            return Ok(Outcome::Granted(Grant { claim, fence, mode, ttl, sent_at, lease: ttl }));
        }
        round.tidy(clock, patience).await;
        if let Some(reason) = revoked {
            return Err(Error::Lost(Why::Revoked(reason).to_string()));
        }
        match verdict {
            Verdict::Withdrawn => Err(left()),
            Verdict::Silent => Err(self.silence(&round)),
            _ => Ok(self.busy(ask, &round, verdict)),
        }
    }

    fn job(&self, ask: &Ask, number: u64, sent_at: Moment) -> Job {
        let [lock, vote] = self.keys(ask.claim.names.first());
        let attempt = ask.claim.attempt.to_hex();
        let channel = self.channel(&lock);
        let keys = [lock, vote, COUNTER.to_owned()];
        let call = Call::new(&LOCK, &keys[..])
            .arg(&attempt)
            .arg(number)
            .arg(millis(ask.ttl))
            .arg(millis(self.options.young_node))
            .arg(entry::info(&ask.holder));
        let both = [keys[0].clone(), keys[1].clone()];
        let debt = Debt::of_round(both, &attempt, number, channel, sent_at + ask.ttl);
        Job { lock: call, keys, attempt, debt, clock: self.options.clock.clone() }
    }

    /// Who is in the way, and when it is worth trying again.
    fn busy(&self, ask: &Ask, round: &Round, verdict: Verdict) -> Outcome {
        let said = round.said();
        let leader = entry::leader(said.seen.iter());
        let held: Vec<_> =
            (!leader.is_empty()).then(|| entry::held(&leader, self.quorum)).into_iter().collect();
        let next = if verdict == Verdict::Contested {
            Next::Soon
        } else {
            let ends = Duration::from_millis(held.first().map_or(0, |held| held.expires_in_ms));
            Next::After(if leader.iter().all(|seen| seen.ours.is_none()) { ends.min(FOREIGN) } else { ends })
        };
        Outcome::Busy(Busy { name: ask.claim.names.first().clone(), held, waiting: 0 }, next)
    }

    fn silence(&self, round: &Round) -> Error {
        let said = round.said();
        let silent = self.too_few(said.seen.len() + said.given, said.young, &said.failures);
        match silent {
            Error::Unavailable(text) if round.unclean() >= self.quorum => Error::Unknown(format!(
                "{text}. A majority may keep the lock for nobody until it is released"
            )),
            other => other,
        }
    }
}

/// A random part of a time.
fn jitter(most: Duration) -> Duration {
    most * u32::from(random_128()[0]) / 256
}

fn left() -> Error {
    Error::Unknown("the ask was taken back".into())
}

/// What this store does not have, and which do.
pub fn unsupported(what: &str) -> Error {
    Error::Unsupported(format!("the redlock store has no {what}: use redis:// or sqlite: for that"))
}
