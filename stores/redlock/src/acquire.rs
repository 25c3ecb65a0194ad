//! Acquiring a lock: rounds of votes, and waiting between them.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::lease::LossReason;
use lockkeeper_core::vote::{Vote, VoteOutcome};
use lockkeeper_core::{AcquireOutcome, BootInstant, Busy, Error, Grant, LockRequest, Mode, Result, Wait};
use lockkeeper_host::{random_128, sleep_until};

use crate::codec;
use crate::connection::NodeRelease;
use crate::counters::Counters;
use crate::error::{cancelled_error, unsupported};
use crate::keys::Keys;
use crate::quorum::Quorum;
use crate::round::{Round, RoundRequest};
use crate::statements::{LOCK, ScriptCall, millis};
use crate::unknown::{PendingAttempt, PendingAttempts};
use crate::waiters::Waiters;

/// How often a request without a wait tries again when several clients share the nodes and none has a majority.
const MAX_CONTESTED_TRIES: u32 = 8;
/// The longest first pause between two such tries; the next one is twice as long.
const CONTESTED_PAUSE: Duration = Duration::from_millis(4);
/// How often a waiter polls a lock that another Redlock client holds, because that client publishes no release.
const FOREIGN_POLL: Duration = Duration::from_millis(100);
/// Processes that are notified of the same release try after a random part of this, so that they do not collide.
const WAKE_JITTER: Duration = Duration::from_millis(16);

/// The outcome of a round that the nodes decided.
enum RoundOutcome {
    Granted(Grant),
    Busy(Busy, NextTry),
}

/// When to try again.
#[derive(Clone, Copy)]
enum NextTry {
    /// No client has a majority.
    Soon,
    /// A client has a majority: try after this long, or when a release is published.
    After(Duration),
}

/// Acquires locks, and waits for them.
pub struct Acquirer {
    pub quorum: Arc<Quorum>,
    pub keys: Arc<Keys>,
    pub counters: Arc<Counters>,
    pub pending: Arc<PendingAttempts>,
    pub waiters: Arc<Waiters>,
}

impl Acquirer {
    pub fn check(&self, request: &LockRequest) -> Result<()> {
        request.check()?;
        let wanted = [
            (request.mode == Mode::Shared, "shared locks"),
            (matches!(request.mode, Mode::Permit(_)), "permits"),
            (request.key.names.count() > 1, "several names at once"),
            (request.owner.is_some(), "re-entry by an owner"),
            (!request.lock_delay.is_zero(), "lock-delay"),
            (!request.min_hold.is_zero(), "minimum hold"),
        ];
        if let Some((_, what)) = wanted.iter().find(|(wanted, _)| *wanted) {
            return Err(unsupported(what));
        }
        if request.ttl > self.quorum.options.max_ttl {
            return Err(Error::invalid(format!(
                "the ttl is {:?}, and this store allows {:?} at most: a longer one needs ?max_ttl=",
                request.ttl, self.quorum.options.max_ttl
            )));
        }
        Ok(())
    }

    pub async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        let clock = &*self.quorum.options.clock;
        let until = request.wait.deadline(clock.now());
        let pending = self.pending.begin(request.key.attempt);
        let _caller = pending.count_caller();
        let (busy, next) = match self.try_until_decided(&pending, request).await? {
            RoundOutcome::Granted(grant) => return Ok(AcquireOutcome::Granted(grant)),
            RoundOutcome::Busy(busy, _) if request.wait == Wait::No => return Ok(AcquireOutcome::Busy(busy)),
            RoundOutcome::Busy(busy, next) => (busy, next),
        };
        self.wait(&pending, request, until, busy, next).await
    }

    /// Repeats the round for as long as several clients share the nodes and none has a majority.
    async fn try_until_decided(
        &self,
        pending: &Arc<PendingAttempt>,
        request: &LockRequest,
    ) -> Result<RoundOutcome> {
        let clock = &*self.quorum.options.clock;
        for tries in 0.. {
            match self.round(pending, request).await? {
                RoundOutcome::Busy(_, NextTry::Soon) if tries < MAX_CONTESTED_TRIES => {
                    sleep_until(clock, clock.now() + jitter(CONTESTED_PAUSE * 2u32.pow(tries))).await;
                }
                outcome => return Ok(outcome),
            }
        }
        Err(Error::Unknown("the tries were not counted to their end".into()))
    }

    async fn wait(
        &self,
        pending: &Arc<PendingAttempt>,
        request: &LockRequest,
        until: BootInstant,
        mut busy: Busy,
        mut next: NextTry,
    ) -> Result<AcquireOutcome> {
        let clock = &*self.quorum.options.clock;
        let waiter = self.waiters.waiter(&self.keys.lock_key(request.key.names.first()));
        let mut poller = None;
        let mut contested = 0;
        loop {
            if poller.is_none() {
                tokio::select! {
                    permit = waiter.lock.become_poller() => poller = Some(permit),
                    () = pending.cancelled() => return Err(cancelled_error()),
                    () = sleep_until(clock, until) => {}
                }
            }
            if poller.is_some() {
                waiter.subscribe();
                let pause = self.pause(next, contested);
                tokio::select! {
                    () = waiter.lock.woken() => sleep_until(clock, (clock.now() + jitter(WAKE_JITTER)).min(until)).await,
                    () = pending.cancelled() => return Err(cancelled_error()),
                    () = sleep_until(clock, (clock.now() + pause).min(until)) => {}
                }
            }
            let last = clock.now() >= until;
            match self.round(pending, request).await {
                Ok(RoundOutcome::Granted(grant)) => return Ok(AcquireOutcome::Granted(grant)),
                Ok(RoundOutcome::Busy(now_busy, now_next)) => (busy, next) = (now_busy, now_next),
                // A waiter keeps waiting while nodes are unreachable.
                Err(error @ (Error::Unavailable(_) | Error::Unknown(_)))
                    if !last && !pending.is_cancelled() =>
                {
                    tracing::debug!(%error, "a round failed; the waiter tries again after the poll interval");
                    next = NextTry::After(self.quorum.options.poll);
                }
                Err(error) => return Err(error),
            }
            if last {
                return Ok(AcquireOutcome::Busy(busy));
            }
            contested = if matches!(next, NextTry::Soon) { contested + 1 } else { 0 };
        }
    }

    fn pause(&self, next: NextTry, contested: u32) -> Duration {
        let poll = self.quorum.options.poll;
        match next {
            NextTry::Soon => jitter((CONTESTED_PAUSE * 2u32.pow(contested.min(16))).min(poll)),
            NextTry::After(time) => time.min(poll / 2 + jitter(poll / 2)) + Duration::from_millis(1),
        }
    }

    /// Runs one round. If it does not grant the lock, the nodes that locked it have released it, or will.
    async fn round(&self, pending: &Arc<PendingAttempt>, request: &LockRequest) -> Result<RoundOutcome> {
        let clock = &*self.quorum.options.clock;
        let node_timeout = self.quorum.node_timeout(request.ttl);
        let sent_at = clock.now();
        let nodes = &self.quorum.nodes;
        let highest_fence_seen = self.counters.highest_fence_seen();
        let vote = Vote::new(nodes.len(), request.ttl, node_timeout, highest_fence_seen, sent_at)?;
        let number = self.counters.next_round();
        let round_request = self.round_request(request, number, sent_at);
        let round = Round::begin(pending, number, vote, round_request, nodes, &self.quorum.io_thread);
        let verdict = round.verdict(clock).await;
        let revoked = round.replies().revoked.clone();
        if let VoteOutcome::Granted(fence) = verdict
            && revoked.is_none()
        {
            self.counters.record_fence(fence);
            let (key, mode, ttl) = (request.key.clone(), request.mode, request.ttl);
            return Ok(RoundOutcome::Granted(Grant { key, fence, mode, ttl, sent_at, lease: ttl }));
        }
        round.wait_until_released(clock, node_timeout).await;
        if let Some(reason) = revoked {
            return Err(Error::Lost(LossReason::Revoked(reason).to_string()));
        }
        match verdict {
            VoteOutcome::Withdrawn => Err(cancelled_error()),
            VoteOutcome::Silent => Err(self.no_verdict(&round)),
            _ => Ok(self.busy(request, &round, verdict)),
        }
    }

    fn round_request(&self, request: &LockRequest, number: u64, sent_at: BootInstant) -> RoundRequest {
        let keys = self.keys.lock_vote_and_counter(request.key.names.first());
        let attempt = request.key.attempt.to_hex();
        let channel = self.keys.channel(&keys[0]);
        let call = ScriptCall::new(&LOCK, &keys[..])
            .arg(&attempt)
            .arg(number)
            .arg(millis(request.ttl))
            .arg(millis(self.quorum.options.young_node))
            .arg(codec::info(&request.holder));
        let both = [keys[0].clone(), keys[1].clone()];
        let release = NodeRelease::of_round(both, &attempt, number, channel, sent_at + request.ttl);
        RoundRequest { lock: call, keys, attempt, release, clock: self.quorum.options.clock.clone() }
    }

    /// The holder, and when to try again.
    fn busy(&self, request: &LockRequest, round: &Round, verdict: VoteOutcome) -> RoundOutcome {
        let replies = round.replies();
        let leader = codec::leader(replies.seen.iter());
        let held: Vec<_> =
            (!leader.is_empty()).then(|| codec::holder_view(&leader, self.quorum.size)).into_iter().collect();
        let next = if verdict == VoteOutcome::Contested {
            NextTry::Soon
        } else {
            let ends = Duration::from_millis(held.first().map_or(0, |held| held.expires_in_ms));
            NextTry::After(if leader.iter().all(|seen| seen.metadata.is_none()) {
                ends.min(FOREIGN_POLL)
            } else {
                ends
            })
        };
        RoundOutcome::Busy(Busy { name: request.key.names.first().clone(), held, waiting: 0 }, next)
    }

    fn no_verdict(&self, round: &Round) -> Error {
        let replies = round.replies();
        let silent = self.quorum.no_majority(
            replies.seen.len() + replies.granted_nodes,
            replies.young,
            &replies.failures,
        );
        match silent {
            // Also if a node has rejected the request: the others may have locked it.
            error if round.unclean() >= self.quorum.size => Error::Unknown(format!(
                "{error}. A majority may be locked without a holder until the release arrives"
            )),
            other => other,
        }
    }
}

/// A random duration up to `most`.
fn jitter(most: Duration) -> Duration {
    most * u32::from(random_128()[0]) / 256
}
