//! Asking, renewing, giving back.

use lockkeeper_core::lease::Why;
use lockkeeper_core::{
    Acquired, Ask, Busy, Claim, Error, Fence, Grant, LockName, Moment, Release, Renewal, Result, Wait,
};
use lockkeeper_host::sleep_until;
use serde::Deserialize;
use std::time::Duration;

use crate::doubt::{AGAIN, Doubts, RETRY};
use crate::entry::{self, Shown, hash, holder_text, micros, odd, terms};
use crate::fault::Failure;
use crate::lane::{self, Kind, Order};
use crate::line::{Place, Spot};
use crate::link::first;
use crate::script::{BREAK, RENEW, REVOKE};
use crate::store::Shared;

/// What is said to an ask.
enum Said {
    Granted(Fence),
    Busy(Busy),
    /// It stands in line.
    InLine(Spot),
}

/// What is neither a grant nor busy.
#[derive(Deserialize)]
struct Other {
    waits: Option<bool>,
    ends: Option<u64>,
    since: Option<i64>,
    refused: Option<String>,
    reason: Option<String>,
    names: Option<Vec<String>>,
}

/// How many holds one statement renews: few enough not to keep others from their rows for long.
const RENEWALS: usize = 10_000;

impl Shared {
    pub(crate) async fn acquire(&self, ask: &Ask) -> Result<Acquired> {
        let doubted = self.doubts.revive(&ask.claim.attempt)?;
        let mut stands = false;
        let answer = self.ask(ask, &mut stands).await;
        match &answer {
            // A server that is away says nothing of what went before.
            Err(error) if doubted || matches!(error, Error::Unknown(_)) => {
                self.doubts.add(&ask.claim, ask.ttl.min(RETRY));
            }
            // The queue entry is still there, and nobody waits any more.
            Err(_) if stands => self.doubts.add(&ask.claim, AGAIN),
            _ => {}
        }
        match answer {
            Err(Error::Unavailable(why)) if stands => Err(Error::Unknown(why)),
            answer => answer,
        }
    }

    /// Asks, and stands in line for as long as the ask says. `stands`: it has been told that it does.
    async fn ask(&self, ask: &Ask, stands: &mut bool) -> Result<Acquired> {
        let clock = &*self.options.clock;
        let until = ask.wait.deadline(clock.now());
        let mut place = (ask.wait != Wait::No).then(|| self.line.join(&ask.claim));
        let mut told = None;
        let (usual, crowded) = (is_usual(ask), self.crowded.has(&ask.claim.names));
        let mut quick = usual && !crowded;
        loop {
            let waits = place.is_some() && clock.now() < until;
            let kind = match waits {
                true if *stands => Kind::Called,
                true => Kind::Patient,
                false => Kind::Hasty,
            };
            let answer = match told.take() {
                Some(answer) => answer,
                None => {
                    let order = Order { quick: std::mem::take(&mut quick), ..order(ask, kind) };
                    match &place {
                        Some(place) => place.send(self, order).await.ok_or_else(left)?,
                        None => self.send(order).await,
                    }
                }
            };
            if answer.as_ref().is_ok_and(|answer| answer.text.is_empty()) {
                self.crowded.add(&ask.claim.names);
                // Somebody may have taken the ask back meanwhile: all of it begins anew.
                continue;
            }
            let spot = match answer.map_err(Error::from).and_then(|answer| read(answer, ask)) {
                Ok((sent_at, lease, Said::Granted(fence))) => {
                    let (claim, mode, ttl) = (ask.claim.clone(), ask.mode, ask.ttl);
                    let lease = lease.unwrap_or(ttl);
                    if usual {
                        self.plain.add([&claim.attempt]);
                    }
                    if crowded && !*stands {
                        _ = self.crowded.remove(&claim.names);
                    }
                    return Ok(Acquired::Granted(Grant { claim, fence, mode, ttl, sent_at, lease }));
                }
                Ok((_, _, Said::Busy(busy))) => return Ok(Acquired::Busy(busy)),
                Ok((_, _, Said::InLine(spot))) => spot,
                // Whoever waits goes on waiting while the server is away; the place may be kept all the same.
                Err(error @ (Error::Unavailable(_) | Error::Unknown(_))) if *stands && waits => {
                    tracing::debug!(%error, "still in line, as far as we know");
                    let pause = self.options.poll.min(Duration::from_millis(250));
                    sleep_until(clock, clock.now() + pause).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            *stands = true;
            let Some(place) = &mut place else { return Err(odd()) };
            place.stand(order(ask, Kind::Called), spot);
            told = self.wait(place, ask, until).await;
            if place.left() {
                return Err(left());
            }
        }
    }

    /// Waits until it is worth asking again, or somebody has asked for us, with this answer.
    async fn wait(
        &self,
        place: &Place<'_>,
        ask: &Ask,
        until: Moment,
    ) -> Option<Result<lane::Answer, Failure>> {
        let clock = &*self.options.clock;
        // An owner may get in past the line once it has the lock elsewhere, and nobody tells it.
        let look = if ask.owner.is_some() { clock.now() + self.options.poll } else { Moment::NEVER };
        tokio::select! {
            () = place.called() => {}
            () = sleep_until(clock, until.min(look)) => {}
        }
        loop {
            let answer = place.answer();
            if answer.is_some() || place.left() || place.ask() {
                return answer;
            }
            place.called().await;
        }
    }

    pub(crate) async fn release(&self, claim: &Claim) -> Result<Release> {
        let mut ending = Ending { doubts: &self.doubts, claim, told: false };
        let done = self.give_back(claim).await;
        ending.told = done.is_ok();
        done
    }

    pub(crate) async fn give_back(&self, claim: &Claim) -> Result<Release> {
        self.line.leave(claim);
        let mut order = Order {
            kind: Kind::Release,
            quick: self.plain.remove([&claim.attempt]),
            names: claim.names.iter().map(|name| name.as_str().to_owned()).collect(),
            attempt: hash(&claim.attempt),
            ttl: None,
            terms: None,
            holder: None,
        };
        let mut text = self.send(order.clone()).await?.text;
        if text.is_empty() {
            order.quick = false;
            text = self.send(order).await?.text;
        }
        match text.as_str() {
            "+" => Ok(Release::Released),
            "-" => Ok(Release::AlreadyGone),
            _ => Err(odd()),
        }
    }

    /// Renews many in one statement. A grant of several names is lost as a whole.
    pub(crate) async fn renew(&self, grants: &[Grant]) -> Result<Vec<Renewal>> {
        let mut stakes: Vec<(&LockName, usize)> = Vec::with_capacity(grants.len());
        for (i, grant) in grants.iter().enumerate() {
            stakes.extend(grant.claim.names.iter().map(|name| (name, i)));
        }
        // In the order of names, as everybody has it.
        stakes.sort();
        let hashes: Vec<Vec<u8>> = grants.iter().map(|grant| hash(&grant.claim.attempt)).collect();
        let mut answers = vec![Renewal::Renewed; grants.len()];
        for batch in stakes.chunks(RENEWALS) {
            let names: Vec<&str> = batch.iter().map(|(name, _)| name.as_str()).collect();
            let attempts: Vec<&[u8]> = batch.iter().map(|(_, i)| &hashes[*i][..]).collect();
            let rows = self.link.rows(&RENEW, &[&names, &attempts]).await?;
            if rows.len() != batch.len() {
                return Err(odd());
            }
            for ((_, i), row) in batch.iter().zip(rows) {
                let said: Option<String> = row.try_get(0).map_err(|_| odd())?;
                match said {
                    None => answers[*i] = Renewal::Lost,
                    Some(reason) if !reason.is_empty() && answers[*i] != Renewal::Lost => {
                        answers[*i] = Renewal::Revoked(reason.into());
                    }
                    Some(_) => {}
                }
            }
        }
        Ok(answers)
    }

    pub(crate) async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let rows = self.link.rows(&REVOKE, &[&name.as_str(), &reason]).await?;
        entry::fence(first(&rows, 0)?)
    }

    pub(crate) async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let rows = self.link.rows(&BREAK, &[&name.as_str(), &reason]).await?;
        entry::fence(first(&rows, 0)?)
    }
}

/// A release that is under way. Also if nobody waits for its answer any more, it is to happen.
struct Ending<'a> {
    doubts: &'a Doubts,
    claim: &'a Claim,
    told: bool,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        match self.told {
            true => self.doubts.released(&self.claim.attempt),
            false => self.doubts.add(self.claim, AGAIN),
        }
    }
}

fn left() -> Error {
    Error::Unknown("the ask left the line".into())
}

/// Whether it may be granted by what is usual.
fn is_usual(ask: &Ask) -> bool {
    ask.claim.names.count() == 1 && terms(ask).is_none()
}

fn order(ask: &Ask, kind: Kind) -> Order {
    Order {
        kind,
        quick: false,
        names: ask.claim.names.iter().map(|name| name.as_str().to_owned()).collect(),
        attempt: hash(&ask.claim.attempt),
        ttl: Some(micros(ask.ttl)),
        terms: terms(ask),
        holder: Some(holder_text(&ask.holder)),
    }
}

fn read(
    lane::Answer { sent_at, text, lease }: lane::Answer,
    ask: &Ask,
) -> Result<(Moment, Option<Duration>, Said)> {
    Ok((sent_at, lease, understand(&text, ask)?))
}

fn understand(text: &str, ask: &Ask) -> Result<Said> {
    if let Ok(fence) = text.parse::<i64>() {
        return Ok(Said::Granted(entry::fence(fence)?));
    }
    let other: Other = serde_json::from_str(text).map_err(|_| odd())?;
    match other.refused.as_deref() {
        Some("upgrade") => return Err(Error::Deadlock(ask.claim.names.iter().cloned().collect())),
        Some("self") => {
            let names = other.names.unwrap_or_default();
            return Err(Error::Deadlock(names.iter().map(LockName::new).collect::<Result<_>>()?));
        }
        Some("mixed") => {
            return Err(Error::invalid(format!(
                "this owner holds some of {} already, but not all of them under one fence: ask for all names at once, \
                 or for the missing ones alone",
                ask.claim.names
            )));
        }
        Some("revoked") => {
            let reason = other.reason.unwrap_or_default();
            return Err(Error::Lost(Why::Revoked(reason.into()).to_string()));
        }
        Some("stale") => return Err(Failure::Unheard("a newer connection took over".into()).into()),
        Some(_) => return Err(odd()),
        None => {}
    }
    if other.waits == Some(true) {
        return Ok(Said::InLine(Spot { since: other.since, ends: other.ends.map(Duration::from_micros) }));
    }
    Shown::read(text)?.busy().map(Said::Busy)
}
