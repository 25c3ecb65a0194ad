//! Keeping a lock, giving it back, and taking it away.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use lockkeeper_core::{Claim, Error, Fence, Grant, LockName, Moment, Names, Release, Renewal, Result};
use lockkeeper_host::sleep_until;

use crate::book::{Hold, Witness, millis};
use crate::layout::mark;
use crate::revoke::why_revoked;
use crate::sight::Phase;
use crate::step::{Slot, Step, jitter};
use crate::store::Shared;

/// What we were granted, on our own clock: a holder knows the end of its lease before anybody else does.
#[derive(Debug, Default)]
pub struct Mine(Mutex<HashMap<String, Lease>>);

/// How many leases are kept before old ones are looked for.
const MANY: usize = 10_000;

#[derive(Clone, Copy, Debug)]
struct Lease {
    granted: Moment,
    sent: Moment,
    ttl: Duration,
}

impl Mine {
    fn leases(&self) -> MutexGuard<'_, HashMap<String, Lease>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lease counts from `sent`.
    pub fn granted(&self, mark: &str, sent: Moment, ttl: Duration) {
        let mut leases = self.leases();
        if leases.len() >= MANY {
            // Those that nobody gave back. What is forgotten is judged by what we see, like everybody else's.
            leases.retain(|_, lease| sent < lease.sent + lease.ttl + Duration::from_secs(3600));
        }
        let granted = leases.get(mark).map_or(sent, |lease| lease.granted);
        leases.insert(mark.to_owned(), Lease { granted, sent, ttl });
    }

    fn gone(&self, mark: &str) {
        self.leases().remove(mark);
    }

    fn get(&self, mark: &str) -> Option<Lease> {
        self.leases().get(mark).copied()
    }
}

impl Shared {
    /// Whether a hold is not over: by our own count if it is ours, else by what we saw.
    pub fn lives(&self, slot: &Slot, hold: &Hold) -> bool {
        match self.mine.get(&hold.mark) {
            Some(lease) => slot.sight.now < lease.sent + lease.ttl,
            None => matches!(slot.sight.phase(hold), Phase::Held(_)),
        }
    }

    /// Grants of the same names are one step, because all of them are in the same item. Different ones are steps of their own, all at once:
    /// one that cannot be renewed now does not take the others with it.
    pub async fn renew(&self, grants: &[Grant]) -> Result<Vec<Renewal>> {
        let clock = &*self.options.clock;
        let shortest = grants.iter().map(|grant| grant.ttl).min().unwrap_or_default();
        let until = clock.now() + shortest / 4;
        let mut groups: BTreeMap<&[LockName], Vec<usize>> = BTreeMap::new();
        for (i, grant) in grants.iter().enumerate() {
            groups.entry(grant.claim.names.as_slice()).or_default().push(i);
        }
        let one = async |group: Vec<usize>| {
            let these: Vec<&Grant> = group.iter().map(|i| &grants[*i]).collect();
            let answers = self.renew_until(&these, until).await;
            (group, answers)
        };
        let mut open: FuturesUnordered<_> = groups.into_values().map(one).collect();
        let mut answers = vec![Renewal::Unknown; grants.len()];
        let (mut heard, mut failed) = (false, None);
        loop {
            tokio::select! {
                next = open.next() => match next {
                    Some((group, Ok(told))) => {
                        heard = true;
                        group.into_iter().zip(told).for_each(|(i, renewal)| answers[i] = renewal);
                    }
                    Some((_, Err(error))) => failed = failed.or(Some(error)),
                    None => break,
                },
                // The others must hear in time that they were renewed: what stays open until now is given up.
                () = sleep_until(clock, until), if heard => break,
            }
        }
        match failed {
            Some(error) if !heard => Err(error),
            _ => Ok(answers),
        }
    }

    async fn renew_until(&self, grants: &[&Grant], until: Moment) -> Result<Vec<Renewal>> {
        let clock = &*self.options.clock;
        loop {
            match self.renew_group(grants).await {
                Err(Error::Unavailable(_) | Error::Unknown(_) | Error::Limited(_)) if clock.now() < until => {
                    sleep_until(clock, clock.now() + jitter(Duration::from_millis(100))).await;
                }
                answer => return answer,
            }
        }
    }

    /// Renews grants of the same names in one step.
    async fn renew_group(&self, grants: &[&Grant]) -> Result<Vec<Renewal>> {
        let Some(first) = grants.first() else { return Ok(Vec::new()) };
        let marks: Vec<String> = grants.iter().map(|grant| mark(&grant.claim.attempt)).collect();
        let decide = |slots: &mut [Slot]| {
            let told: Vec<Renewal> = marks.iter().map(|mark| self.renew_in(slots, mark)).collect();
            let any = slots.iter().any(|slot| slot.dirty);
            Ok(if any { Step::Write(told) } else { Step::Tell(told) })
        };
        let (told, sent_at) = self.step_as(true, &first.claim.names, decide).await?;
        for ((grant, mark), renewal) in grants.iter().zip(&marks).zip(&told) {
            match renewal {
                Renewal::Renewed => self.mine.granted(mark, sent_at, grant.ttl),
                // Still held, until the lease that runs is over.
                Renewal::Revoked(_) | Renewal::Unknown => {}
                Renewal::Lost => self.mine.gone(mark),
            }
        }
        Ok(told)
    }

    fn renew_in(&self, slots: &mut [Slot], mark: &str) -> Renewal {
        let lives = |slot: &Slot| slot.page.book.find(mark).is_some_and(|hold| self.lives(slot, hold));
        if !slots.iter().all(lives) {
            // What is left of it keeps others waiting for nobody.
            slots.iter_mut().for_each(|slot| slot.end_uncleanly(mark));
            return Renewal::Lost;
        }
        if let Some(reason) = why_revoked(slots, |hold| hold.mark == mark) {
            return Renewal::Revoked(reason.into());
        }
        slots.iter_mut().for_each(|slot| slot.renew(mark));
        Renewal::Renewed
    }

    pub async fn release(&self, claim: &Claim) -> Result<Release> {
        let asked = self.errands.withdraw(claim.attempt);
        let released = self.give_back(claim).await?;
        Ok(if asked { Release::Released } else { released })
    }

    pub async fn give_back(&self, claim: &Claim) -> Result<Release> {
        let mark = mark(&claim.attempt);
        let decide = |slots: &mut [Slot]| {
            let mut released = Release::AlreadyGone;
            let revoked = why_revoked(slots, |hold| hold.mark == mark).is_some();
            for slot in &mut *slots {
                slot.unwant(&mark);
                let Some(hold) = slot.page.book.find(&mark).cloned() else { continue };
                if self.lives(slot, &hold) {
                    self.let_go(slot, &hold, revoked);
                    released = Release::Released;
                } else {
                    slot.end_uncleanly(&mark);
                }
            }
            // A request of this ask may still be on its way. It has a condition: after this it is not met any more.
            slots[0].dirty |= released == Release::AlreadyGone;
            Ok(Step::Write(released))
        };
        let (released, _) = self.step(&claim.names, decide).await?;
        self.mine.gone(&mark);
        self.errands.freed(claim.names.iter());
        Ok(released)
    }

    /// Ends a hold, or lets it linger for what is left of its minimum. Who does not know when it began takes all of it. The minimum of a
    /// revoked hold is not kept: its operator wants the lock to be free.
    fn let_go(&self, slot: &mut Slot, hold: &Hold, revoked: bool) {
        let held =
            self.mine.get(&hold.mark).map_or(Duration::ZERO, |lease| slot.sight.now.since(lease.granted));
        let left = hold.min_hold_ms.saturating_sub(millis(held));
        slot.end(&hold.mark);
        if left > 0 && !revoked {
            let span = slot.span(left);
            slot.page.book.add(Hold { mark: String::new(), owner: None, span, ..hold.clone() });
        }
        slot.tidy();
    }

    pub async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let one = Names::from(name.clone());
        let decide = |slots: &mut [Slot]| {
            let fence = self.next_fence(slots)?;
            let slot = &mut slots[0];
            slot.page.fence = Some(fence);
            let holds = std::mem::take(&mut slot.page.book.holds);
            slot.page.book.delay = None;
            slot.page.book.seen = Vec::<Witness>::new();
            slot.page.book.drop_reasons();
            slot.dirty = true;
            let mut elsewhere = BTreeMap::new();
            for hold in holds {
                if matches!(slot.sight.phase(&hold), Phase::Held(_)) && !hold.lingers() {
                    slot.hold_back(hold.lock_delay_ms);
                    elsewhere.insert(hold.mark, hold.names);
                }
            }
            Ok(Step::Write((fence, elsewhere)))
        };
        let ((fence, elsewhere), _) = self.step(&one, decide).await?;
        tracing::info!(%name, reason, %fence, "a lock was broken");
        self.errands.freed(std::iter::once(name));
        // A grant of several names is lost as a whole. Its holder is told by the next renewal anyway.
        for (mark, names) in elsewhere {
            for other in names.into_iter().filter(|other| other != name) {
                self.end_elsewhere(&mark, &other).await;
            }
        }
        Ok(fence)
    }

    async fn end_elsewhere(&self, mark: &str, name: &LockName) {
        let decide = |slots: &mut [Slot]| {
            slots[0].end_uncleanly(mark);
            Ok(if slots[0].dirty { Step::Write(()) } else { Step::Tell(()) })
        };
        match self.step(&Names::from(name.clone()), decide).await {
            Ok(_) => self.errands.freed(std::iter::once(name)),
            Err(error) => {
                tracing::warn!(%name, %error, "part of a broken grant is left until its ttl is over")
            }
        }
    }
}
