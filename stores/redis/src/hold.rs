//! Asking, renewing, giving back.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lockkeeper_core::lease::Why;
use lockkeeper_core::{
    Acquired, Ask, Busy, Claim, Error, Fence, Grant, Held, LockName, LockView, Mode, Moment, Release,
    Renewal, Result, Wait, Wall,
};
use lockkeeper_host::sleep_until;
use redis::Value;

use crate::entry::{self, Hold, Stage};
use crate::fault::Failure;
use crate::lane::{Kept, run_replicated};
use crate::layout::Group;
use crate::line::{Called, Place, Since};
use crate::script::{BREAK, Call, RENEW};
use crate::store::Shared;

/// What a script says to an ask.
pub(crate) enum Answer {
    Granted(Fence),
    Busy(Busy),
    /// It stands in line, and this was the highest fence of all then; whoever is in the way is gone after this long at the
    /// latest, if it says nothing.
    InLine(u64, Option<Duration>),
    /// The script decided against it, and nothing is left of it.
    Refused(Error),
}

/// How many holds one script renews: few enough not to keep the server from everybody else for long.
const RENEWALS: usize = 100;

impl Shared {
    /// Asks for names of one group and stands in line for as long as the ask says. `others`: the names of the same
    /// grant in other groups.
    pub(crate) async fn acquire_in(&self, group: Group, ask: &Ask, others: &[LockName]) -> Result<Acquired> {
        let clock = &*self.options.clock;
        let until = match ask.wait {
            Wait::No => clock.now(),
            Wait::For(time) => clock.now() + time,
            Wait::Forever => Moment::NEVER,
        };
        let mut place = (ask.wait != Wait::No).then(|| self.line.join(ask.claim.attempt.to_hex()));
        let keys: Vec<String> = ask.claim.names.iter().map(|name| self.layout.key(name)).collect();
        // Whether the request is in the queue, and the highest fence when the server last said so.
        let (mut stands, mut queued_at) = (false, 0);
        let mut called = None;
        loop {
            let waits = place.is_some() && clock.now() < until;
            let mut lease = ask.ttl;
            let mut by_message = false;
            let (sent_at, answer) = match called.take() {
                // Unless nobody looked at it for so long that it is better to ask.
                Some(Called::In { sent_at, lease: first, fence }) if clock.now() < sent_at + first / 2 => {
                    (lease, by_message) = (first, true);
                    self.floor.fetch_max(fence.get(), Ordering::Relaxed);
                    (sent_at, Ok(Answer::Granted(fence)))
                }
                Some(Called::Asked(sent_at, answer)) => (sent_at, self.read(group, ask, answer)),
                _ => {
                    if let Some(place) = &place {
                        place.ask();
                    }
                    let stage = if waits { Stage::Patient } else { Stage::Hasty };
                    (clock.now(), self.ask(group, &keys, (ask, others), stage, None).await)
                }
            };
            let ends = match answer {
                Ok(Answer::Granted(fence)) => {
                    if let Some(place) = &place {
                        place.keep(by_message && !ask.min_hold.is_zero());
                    }
                    let (claim, mode, ttl) = (ask.claim.clone(), ask.mode, ask.ttl);
                    return Ok(Acquired::Granted(Grant { claim, fence, mode, ttl, sent_at, lease }));
                }
                Ok(Answer::Busy(busy)) => return Ok(Acquired::Busy(busy)),
                Ok(Answer::Refused(error)) => return Err(error),
                Ok(Answer::InLine(fence, ends)) => {
                    queued_at = fence;
                    Some((Since { sent_at, fence }, ends))
                }
                // The waiter goes on waiting while the server is unreachable, because its queue entry may be kept.
                Err(error @ (Error::Unavailable(_) | Error::Unknown(_))) if stands && waits => {
                    tracing::debug!(%error, "no answer for a waiter; it keeps its queue entry and asks again");
                    self.fleet.pause(self.options.poll).await;
                    None
                }
                // The queue entry may be there still: the store removes it, unless the caller acquires again.
                Err(error) if stands => {
                    self.unknown.owe(group, &ask.claim, queued_at);
                    return Err(Error::Unknown(format!("the request was in the queue: {error}")));
                }
                Err(error) => return Err(error),
            };
            stands = true;
            let Some(place) = &mut place else { return Err(odd()) };
            if let Some((since, ends)) = ends {
                let say = self.args(&keys, (ask, others), Stage::Called, None);
                place.stand(group, &keys, say, since, ends);
                self.wait(place, ask, until).await;
                called = place.answer();
            }
            if place.left() {
                return Err(Error::Unknown("the ask left the line".into()));
            }
        }
    }

    async fn wait(&self, place: &Place<'_>, ask: &Ask, until: Moment) {
        let clock = &*self.options.clock;
        // An owner may get in past the line once it has the lock elsewhere, and nobody tells it.
        let look = if ask.owner.is_some() { clock.now() + self.options.poll } else { Moment::NEVER };
        tokio::select! {
            () = place.called() => {}
            () = sleep_until(clock, until.min(look)) => {}
        }
        // One answer is enough: another, asked for meanwhile, would count the lease anew when nobody looks.
        while place.answers() {
            place.called().await;
        }
    }

    /// Asks once. `raise`: what is held already is to have this fence from now on.
    pub(crate) async fn ask(
        &self,
        group: Group,
        keys: &[String],
        (ask, others): (&Ask, &[LockName]),
        stage: Stage,
        raise: Option<Fence>,
    ) -> Result<Answer> {
        let args = self.args(keys, (ask, others), stage, raise);
        let answer = self.asks.send(group, keys.to_vec(), args, Kept::default()).await;
        self.read(group, ask, answer)
    }

    /// What the script is to know of an ask.
    fn args(
        &self,
        keys: &[String],
        (ask, others): (&Ask, &[LockName]),
        stage: Stage,
        raise: Option<Fence>,
    ) -> Vec<Vec<u8>> {
        let lives = millis(ask.ttl + ask.lock_delay).to_string();
        let attempt = ask.claim.attempt.to_hex();
        let generation = self.unknown.generation(&attempt);
        let head = entry::head(ask, keys, stage, raise, generation);
        let terms = entry::terms(ask, keys, others);
        vec![attempt.into_bytes(), lives.into_bytes(), head, terms]
    }

    fn read(&self, group: Group, ask: &Ask, answer: Result<Value, Failure>) -> Result<Answer> {
        let parts = match answer? {
            Value::Int(fence) => return Ok(Answer::Granted(self.seen(fence)?)),
            Value::Array(parts) => parts,
            _ => return Err(odd()),
        };
        let refused = |error| Ok(Answer::Refused(error));
        let as_server = |code: &str| Failure::Refused { code: code.into(), detail: String::new() }.into();
        match &parts[..] {
            [Value::Int(12)] => refused(Error::Deadlock(ask.claim.names.iter().cloned().collect())),
            [Value::Int(14)] => refused(Error::invalid(format!(
                "this owner holds some of {} already, but not all of them under one fence: ask for all names at once, \
                 or for the missing ones alone",
                ask.claim.names
            ))),
            [Value::Int(15)] => refused(as_server("WRONGTYPE")),
            [Value::Int(16)] => refused(as_server("OOM")),
            [Value::Int(17)] => refused(Error::Unavailable(
                "this attempt was released while one of its requests had no reply: use a new attempt".into(),
            )),
            [Value::Int(18), Value::BulkString(reason)] => {
                let reason = String::from_utf8_lossy(reason);
                refused(Error::Lost(Why::Revoked(reason.into()).to_string()))
            }
            [Value::Int(code), state @ ..] => {
                let (busy, ends, highest) = self.busy(state).ok_or_else(odd)?;
                debug_assert_eq!(self.layout.group(&busy.name), group);
                Ok(if *code == 2 { Answer::InLine(highest, ends) } else { Answer::Busy(busy) })
            }
            _ => Err(odd()),
        }
    }

    /// Who is in the way, until when, and what the highest fence was.
    fn busy(&self, state: &[Value]) -> Option<(Busy, Option<Duration>, u64)> {
        let [
            Value::BulkString(key),
            Value::Array(holds),
            Value::Int(pttl),
            Value::Int(waiting),
            Value::Int(now),
            Value::Int(highest),
        ] = state
        else {
            return None;
        };
        let name = self.layout.name(key)?;
        let mut held = holders(&stored_holds(holds), *pttl, u64::try_from(*now).ok()?);
        held.truncate(LockView::BUSY);
        let ends = u64::try_from(*pttl).ok().map(Duration::from_millis);
        Some((
            Busy { name, held, waiting: usize::try_from(*waiting).unwrap_or(0) },
            ends,
            u64::try_from(*highest).ok()?,
        ))
    }

    /// Notes the highest fence that this client has seen: whatever happens to the server, the next one is higher.
    pub(crate) fn seen(&self, fence: i64) -> Result<Fence> {
        let fence = u64::try_from(fence).map_err(|_| odd())?;
        self.floor.fetch_max(fence, Ordering::Relaxed);
        Fence::new(fence)
    }

    pub(crate) async fn release_in(&self, group: Group, claim: &Claim) -> Result<Release> {
        let mut unpaid = Unpaid { shared: self, owed: Some((group, claim)) };
        let answer = self.release_once(group, claim, 0, 0).await?;
        unpaid.owed = None;
        self.line.forget_unconfirmed(&claim.attempt.to_hex());
        Ok(answer)
    }

    /// Sends one release. `flags`: see [`release_flags`], besides those that follow from what is known of the attempt.
    /// `limit`: the highest fence of what is meant; 0 for all.
    pub(crate) async fn release_once(
        &self,
        group: Group,
        claim: &Claim,
        flags: u8,
        limit: u64,
    ) -> Result<Release> {
        let keys: Vec<String> = claim.names.iter().map(|name| self.layout.key(name)).collect();
        let attempt = claim.attempt.to_hex();
        let guarded = if self.line.is_unconfirmed(&attempt) { release_flags::GUARDED } else { 0 };
        let args = vec![self.release_arg(attempt, keys.len(), flags | guarded, limit)];
        match self.releases.send(group, keys, args, Kept::default()).await? {
            Value::Int(1) => Ok(Release::Released),
            Value::Int(_) => Ok(Release::AlreadyGone),
            _ => Err(odd()),
        }
    }

    /// What the script is to know of a release: the attempt, and more behind it if there is more to know.
    pub(crate) fn release_arg(&self, attempt: String, names: usize, flags: u8, limit: u64) -> Vec<u8> {
        let ended = self.unknown.end(&attempt, self.tombstone());
        let flags = flags | if ended.is_some() { release_flags::UNANSWERED } else { 0 };
        let mut arg = attempt.into_bytes();
        if names > 1 || flags != 0 {
            arg.extend([flags, names as u8, ended.unwrap_or(0)]);
            arg.extend((limit as f64).to_be_bytes());
        }
        arg
    }

    /// How long a request without a reply may take to arrive: for that long the server refuses its attempt once it is
    /// released.
    pub(crate) fn tombstone(&self) -> Duration {
        self.options.access.timeout * 2 + Duration::from_secs(10)
    }

    pub(crate) async fn break_in(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let group = self.layout.group(name);
        let keys = self.keys(group, &[self.layout.key(name)]);
        let call = Call::new(&BREAK, &keys)
            .arg(self.layout.base(group))
            .arg(self.claim_ms())
            .arg(reason)
            .arg(self.floor());
        match call.run(&self.fleet, group.slot()).await? {
            Value::Int(fence) => self.seen(fence),
            _ => Err(odd()),
        }
    }

    /// Renews many, all in flight at once. A group whose node does not reply, while another's does, is *unknown* and harms
    /// no other group: neither by its error nor by its delay, which counts for a quarter of `shortest`, the shortest ttl,
    /// at most. An error if no group has an answer.
    pub(crate) async fn renew_all(
        &self,
        parts: &[(Group, &Claim)],
        shortest: Duration,
    ) -> Result<Vec<Renewal>> {
        let mut sorted: Vec<usize> = (0..parts.len()).collect();
        sorted.sort_by_key(|i| parts[*i].0);
        let batches =
            sorted.chunk_by(|a, b| parts[*a].0 == parts[*b].0).flat_map(|group| group.chunks(RENEWALS));
        let calls = batches.map(|batch| async move { (batch, self.renew_some(parts, batch).await) });
        let mut calls: FuturesUnordered<_> = calls.collect();
        let (mut answers, mut renewed, mut failed) =
            (vec![Renewal::Unknown; parts.len()], calls.is_empty(), None);
        let mut patience = std::pin::pin!(match calls.len() {
            // Nobody else is held up.
            0 | 1 => futures_util::future::Either::Left(std::future::pending()),
            _ => futures_util::future::Either::Right(self.fleet.pause(shortest / 4)),
        });
        let mut late = false;
        while !(late && renewed) {
            let next = tokio::select! {
                next = calls.next() => next,
                () = &mut patience, if !late => {
                    late = true;
                    continue;
                }
            };
            let Some((batch, answer)) = next else { break };
            match answer {
                Ok(each) => {
                    renewed = true;
                    batch.iter().zip(each).for_each(|(i, renewal)| answers[*i] = renewal);
                }
                Err(error) => {
                    tracing::warn!(%error, guards = batch.len(), "renewal failed for some guards, will be tried again");
                    failed = Some(error);
                }
            }
        }
        match failed {
            Some(error) if !renewed => Err(error),
            _ => Ok(answers),
        }
    }

    async fn renew_some(&self, parts: &[(Group, &Claim)], batch: &[usize]) -> Result<Vec<Renewal>> {
        let group = parts[batch[0]].0;
        let base = self.layout.base(group);
        let claims = || batch.iter().map(|i| parts[*i].1);
        let names = claims().flat_map(|claim| claim.names.iter()).map(|name| self.layout.key(name));
        let mut call = Call::new(&RENEW, &self.keys(group, names)).arg(base).arg(self.claim_ms());
        call = call.arg(&self.client);
        for claim in claims() {
            call = call.arg(claim.attempt.to_hex()).arg(claim.names.count());
        }
        let (answers, replicated) = match &self.grants {
            Some(grants) => run_replicated(self, grants, group, &call).await?,
            None => (call.run(&self.fleet, group.slot()).await?, Ok(())),
        };
        let Value::Array(answers) = answers else { return Err(odd()) };
        if answers.len() != batch.len() {
            return Err(odd());
        }
        if let Err(failure) = &replicated {
            tracing::warn!(
                ?failure,
                guards = batch.len(),
                "renewal not replicated; it does not count and is sent again"
            );
        }
        // A replica without the renewal ends the lease earlier, so a renewal that it does not have does not count.
        let renewed = |answer| match answer {
            Value::Int(1) if replicated.is_ok() => Renewal::Renewed,
            Value::Int(1) => Renewal::Unknown,
            Value::BulkString(reason) => Renewal::Revoked(String::from_utf8_lossy(&reason).into()),
            _ => Renewal::Lost,
        };
        Ok(answers.into_iter().map(renewed).collect())
    }
}

/// The holds of a lock, those that began first before the others; `None` stands for another client's.
pub(crate) fn stored_holds(values: &[Value]) -> Vec<Option<Hold>> {
    let packed = values.iter().filter_map(|value| match value {
        Value::BulkString(packed) if !packed.is_empty() => Some(packed),
        _ => None,
    });
    let mut holds: Vec<_> = packed.map(|packed| entry::hold(packed)).collect();
    holds.sort_by_key(|hold| hold.as_ref().map(|hold| hold.since_us));
    holds
}

/// The holders of a lock, as others may see them. `pttl`: how long the lock's key lives.
pub(crate) fn holders(holds: &[Option<Hold>], pttl: i64, now_ms: u64) -> Vec<Held> {
    let another_client = || Held {
        holder: entry::somebody_else(),
        // No fence came with it. The smallest there is: a resource that checks fences lets nothing of it pass.
        fence: Fence::MIN,
        mode: Mode::Exclusive,
        since: Wall::from_micros(now_ms * 1000),
        expires_in_ms: u64::try_from(pttl).unwrap_or(0),
        lingering: false,
        revoked: None,
    };
    holds
        .iter()
        .filter_map(|hold| hold.as_ref().map_or_else(|| Some(another_client()), |hold| hold.view(now_ms)))
        .collect()
}

/// The flags of a release, as `lua/release.lua` reads them.
pub(crate) mod release_flags {
    /// A guard exists, though the server did not hear the waiter confirm that it was let in.
    pub const GUARDED: u8 = 1;
    /// No caller ever learned of the grant: a minimum hold does not apply.
    pub const UNREPORTED: u8 = 2;
    /// A request of the attempt may still arrive: leave a tombstone.
    pub const UNANSWERED: u8 = 4;
    /// Only a queue entry, or a hold that is not confirmed.
    pub const UNCONFIRMED: u8 = 8;
}

/// A release on its way. Dropped without an answer, it is sent again later.
struct Unpaid<'a> {
    shared: &'a Shared,
    owed: Option<(Group, &'a Claim)>,
}

impl Drop for Unpaid<'_> {
    fn drop(&mut self) {
        if let Some((group, claim)) = self.owed {
            self.shared.unknown.owe(group, claim, 0);
        }
    }
}

pub(crate) fn odd() -> Error {
    Error::Unknown("Redis gave an answer that makes no sense".into())
}

pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
