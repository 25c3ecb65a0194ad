//! Asking, renewing, giving back.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use lockkeeper_core::{
    Acquired, Ask, Busy, Claim, Error, Fence, Grant, Held, LockName, LockView, Mode, Moment, Release,
    Renewal, Result, Wait, Wall,
};
use lockkeeper_host::sleep_until;
use redis::Value;

use crate::entry::{self, Stage};
use crate::fault::Failure;
use crate::lane::Kept;
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
}

/// How many holds one script renews: few enough not to keep the server from everybody else for long.
const RENEWALS: usize = 100;

impl Shared {
    /// Asks for names of one group and stands in line for as long as the ask says.
    pub(crate) async fn acquire_in(&self, group: Group, ask: &Ask) -> Result<Acquired> {
        let clock = &*self.options.clock;
        let until = match ask.wait {
            Wait::No => clock.now(),
            Wait::For(time) => clock.now() + time,
            Wait::Forever => Moment::NEVER,
        };
        let mut place = (ask.wait != Wait::No).then(|| self.line.join(ask.claim.attempt.to_hex()));
        let keys: Vec<String> = ask.claim.names.iter().map(|name| self.layout.key(name)).collect();
        let mut stands = false;
        let mut called = None;
        loop {
            let waits = place.is_some() && clock.now() < until;
            let mut lease = ask.ttl;
            let (sent_at, answer) = match called.take() {
                // Unless nobody looked at it for so long that it is better to ask.
                Some(Called::In { sent_at, lease: first, fence }) if clock.now() < sent_at + first / 2 => {
                    lease = first;
                    self.floor.fetch_max(fence.get(), Ordering::Relaxed);
                    (sent_at, Ok(Answer::Granted(fence)))
                }
                Some(Called::Asked(sent_at, answer)) => (sent_at, self.read(group, ask, answer)),
                _ => {
                    if let Some(place) = &place {
                        place.ask();
                    }
                    let stage = if waits { Stage::Patient } else { Stage::Hasty };
                    (clock.now(), self.ask(group, &keys, ask, stage, None).await)
                }
            };
            let ends = match answer {
                Ok(Answer::Granted(fence)) => {
                    if let Some(place) = &place {
                        place.keep();
                    }
                    let (claim, mode, ttl) = (ask.claim.clone(), ask.mode, ask.ttl);
                    return Ok(Acquired::Granted(Grant { claim, fence, mode, ttl, sent_at, lease }));
                }
                Ok(Answer::Busy(busy)) => return Ok(Acquired::Busy(busy)),
                Ok(Answer::InLine(fence, ends)) => Some((Since { sent_at, fence }, ends)),
                // Whoever waits goes on waiting while the server is away; the place may be kept all the same.
                Err(error @ (Error::Unavailable(_) | Error::Unknown(_))) if stands && waits => {
                    tracing::debug!(%error, "still in line, as far as we know");
                    self.fleet.pause(self.options.poll).await;
                    None
                }
                Err(error) => return Err(error),
            };
            stands = true;
            let Some(place) = &mut place else { return Err(odd()) };
            if let Some((since, ends)) = ends {
                let say = self.args(&keys, ask, Stage::Called, None);
                place.stand(group, ask, &keys, say, since, ends);
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
        ask: &Ask,
        stage: Stage,
        raise: Option<Fence>,
    ) -> Result<Answer> {
        let answer =
            self.asks.send(group, keys.to_vec(), self.args(keys, ask, stage, raise), Kept::default()).await;
        self.read(group, ask, answer)
    }

    /// What the script is to know of an ask.
    fn args(&self, keys: &[String], ask: &Ask, stage: Stage, raise: Option<Fence>) -> Vec<Vec<u8>> {
        let lives = millis(ask.ttl + ask.lock_delay).to_string();
        let attempt = ask.claim.attempt.to_hex();
        let (head, terms) = (entry::head(ask, keys, stage, raise), entry::terms(ask, keys));
        vec![attempt.into_bytes(), lives.into_bytes(), head, terms]
    }

    fn read(&self, group: Group, ask: &Ask, answer: Result<Value, Failure>) -> Result<Answer> {
        let parts = match answer? {
            Value::Int(fence) => return Ok(Answer::Granted(self.seen(fence)?)),
            Value::Array(parts) => parts,
            _ => return Err(odd()),
        };
        match &parts[..] {
            [Value::Int(12)] => Err(Error::Deadlock(ask.claim.names.iter().cloned().collect())),
            [Value::Int(14)] => Err(Error::invalid(format!(
                "this owner holds some of {} already, but not all of them under one fence: ask for all names at once, \
                 or for the missing ones alone",
                ask.claim.names
            ))),
            [Value::Int(15)] => {
                Err(Failure::Refused { code: "WRONGTYPE".into(), detail: String::new() }.into())
            }
            [Value::Int(16)] => Err(Failure::Refused { code: "OOM".into(), detail: String::new() }.into()),
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
            Value::BulkString(value),
            Value::Int(pttl),
            Value::BulkString(held),
            Value::Int(waiting),
            Value::Int(now),
            Value::Int(highest),
        ] = state
        else {
            return None;
        };
        let name = self.layout.name(key)?;
        let mut held = self.held(value, *pttl, held, u64::try_from(*now).ok()?);
        held.truncate(LockView::BUSY);
        let ends = u64::try_from(*pttl).ok().map(Duration::from_millis);
        Some((
            Busy { name, held, waiting: usize::try_from(*waiting).unwrap_or(0) },
            ends,
            u64::try_from(*highest).ok()?,
        ))
    }

    /// Those who hold a lock, as others may see them.
    pub(crate) fn held(&self, value: &[u8], pttl: i64, packed: &[u8], now_ms: u64) -> Vec<Held> {
        let holds = entry::holds(packed);
        let ours = value == b"lockkeeper" || holds.iter().any(|hold| entry::names(value, &hold.attempt));
        if value.is_empty() || ours {
            let all = if value.is_empty() { &[][..] } else { &holds[..] };
            return all.iter().filter_map(|hold| hold.view(now_ms)).collect();
        }
        // No fence came with it. The smallest there is: whoever checks fences lets nothing of it pass.
        vec![Held {
            holder: entry::somebody_else(),
            fence: Fence::MIN,
            mode: Mode::Exclusive,
            since: Wall::from_micros(now_ms * 1000),
            expires_in_ms: u64::try_from(pttl).unwrap_or(0),
            lingering: false,
        }]
    }

    /// Notes the highest fence that this client has seen: whatever happens to the server, the next one is higher.
    pub(crate) fn seen(&self, fence: i64) -> Result<Fence> {
        let fence = u64::try_from(fence).map_err(|_| odd())?;
        self.floor.fetch_max(fence, Ordering::Relaxed);
        Fence::new(fence)
    }

    pub(crate) async fn release_in(&self, group: Group, claim: &Claim) -> Result<Release> {
        let keys: Vec<String> = claim.names.iter().map(|name| self.layout.key(name)).collect();
        let args = vec![release_arg(claim.attempt.to_hex(), keys.len())];
        match self.releases.send(group, keys, args, Kept::default()).await? {
            Value::Int(1) => Ok(Release::Released),
            Value::Int(_) => Ok(Release::AlreadyGone),
            _ => Err(odd()),
        }
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

    /// Renews many, all on their way at once: one pipeline, whatever their number.
    pub(crate) async fn renew_all(&self, parts: &[(Group, &Claim)]) -> Result<Vec<Renewal>> {
        let mut sorted: Vec<usize> = (0..parts.len()).collect();
        sorted.sort_by_key(|i| parts[*i].0);
        let batches =
            sorted.chunk_by(|a, b| parts[*a].0 == parts[*b].0).flat_map(|group| group.chunks(RENEWALS));
        let calls = batches.map(|batch| async move { (batch, self.renew_some(parts, batch).await) });
        let mut answers = vec![Renewal::Lost; parts.len()];
        for (batch, answer) in join_all(calls).await {
            for (i, renewal) in batch.iter().zip(answer?) {
                answers[*i] = renewal;
            }
        }
        Ok(answers)
    }

    async fn renew_some(&self, parts: &[(Group, &Claim)], batch: &[usize]) -> Result<Vec<Renewal>> {
        let group = parts[batch[0]].0;
        let base = self.layout.base(group);
        let claims = || batch.iter().map(|i| parts[*i].1);
        let names = claims().flat_map(|claim| claim.names.iter()).map(|name| self.layout.key(name));
        let mut call = Call::new(&RENEW, &self.keys(group, names)).arg(base).arg(self.claim_ms());
        for claim in claims() {
            call = call.arg(claim.attempt.to_hex()).arg(claim.names.count());
        }
        let Value::Array(answers) = call.run(&self.fleet, group.slot()).await? else { return Err(odd()) };
        if answers.len() != batch.len() {
            return Err(odd());
        }
        let renewed = |answer| if answer == Value::Int(1) { Renewal::Renewed } else { Renewal::Lost };
        Ok(answers.into_iter().map(renewed).collect())
    }
}

/// What the script is to know of a release: the attempt, and the number of its names if there are several.
pub(crate) fn release_arg(attempt: String, names: usize) -> Vec<u8> {
    if names == 1 { attempt.into_bytes() } else { format!("{attempt}{names}").into_bytes() }
}

pub(crate) fn odd() -> Error {
    Error::Unknown("Redis gave an answer that makes no sense".into())
}

pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
