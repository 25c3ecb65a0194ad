//! Asking, and waiting for the lock.

use std::time::Duration;

use lockkeeper_core::rules::{Verdict, judge, judge_all};
use lockkeeper_core::{Acquired, Ask, Busy, Error, Fence, Grant, LockView, Mode, Moment, Result, Wait};
use lockkeeper_host::sleep_until;

use crate::book::{Hold, Intent, millis};
use crate::errand::Errand;
use crate::layout::{mark, owner_mark};
use crate::sight::Phase;
use crate::step::{Slot, Step, after, jitter};
use crate::store::Shared;

/// What came of asking once.
enum Got {
    Granted {
        fence: Fence,
        mode: Mode,
        ttl: Duration,
    },
    /// Who is in the way, and for how long at most if they stay silent.
    Busy(Busy, Duration),
}

/// One ask, on its way.
struct Asking<'a> {
    ask: &'a Ask,
    mark: String,
    until: Moment,
    /// It was blocked before, and waits.
    waits: bool,
}

impl Shared {
    pub async fn acquire(&self, ask: &Ask) -> Result<Acquired> {
        let clock = &*self.options.clock;
        let until = match ask.wait {
            Wait::No => clock.now(),
            Wait::For(time) => clock.now() + time,
            Wait::Forever => Moment::NEVER,
        };
        let errand = self.errands.begin(ask.claim.attempt);
        let mut asking = Asking { ask, mark: mark(&ask.claim.attempt), until, waits: false };
        let busy = match self.ask_once(&asking).await? {
            Ok(grant) => return self.hand_over(&errand, grant).await,
            Err((busy, _)) if ask.wait == Wait::No => busy,
            Err(first) => {
                asking.waits = true;
                match self.wait(&asking, &errand, first).await? {
                    Ok(grant) => return self.hand_over(&errand, grant).await,
                    Err(busy) => busy,
                }
            }
        };
        self.bear_witness(ask).await;
        Ok(Acquired::Busy(busy))
    }

    /// A grant that was taken back while it came is nobody's.
    async fn hand_over(&self, errand: &Errand, grant: Grant) -> Result<Acquired> {
        if !errand.is_withdrawn() {
            return Ok(Acquired::Granted(grant));
        }
        _ = self.give_back(&grant.claim).await;
        Err(left())
    }

    async fn wait(
        &self,
        asking: &Asking<'_>,
        errand: &Errand,
        (mut busy, mut lasts): (Busy, Duration),
    ) -> Result<Result<Grant, Busy>> {
        let clock = &*self.options.clock;
        let gate = self.errands.gate(asking.ask.claim.names.first());
        let mut turn = None;
        let mut tried = false;
        loop {
            if turn.is_none() {
                tokio::select! {
                    got = gate.turn() => turn = Some(got),
                    () = errand.withdrawn() => return Err(left()),
                    () = sleep_until(clock, asking.until) => {}
                }
                // Those in front have looked a moment ago: whoever comes next tries at once.
                lasts = if tried { lasts } else { Duration::ZERO };
            }
            if turn.is_some() && !lasts.is_zero() {
                let poll = self.options.poll / 2 + jitter(self.options.poll / 2);
                let at = clock.now() + poll.min(lasts + Duration::from_millis(1));
                tokio::select! {
                    () = gate.hint() => {}
                    () = errand.withdrawn() => return Err(left()),
                    () = sleep_until(clock, at.min(asking.until)) => {}
                }
            }
            tried = true;
            let last = clock.now() >= asking.until;
            match self.ask_once(asking).await {
                Ok(Ok(grant)) => return Ok(Ok(grant)),
                Ok(Err(now)) => (busy, lasts) = now,
                // Whoever waits goes on waiting while DynamoDB is away.
                Err(error @ (Error::Unavailable(_) | Error::Unknown(_) | Error::Limited(_)))
                    if !last && !errand.is_withdrawn() =>
                {
                    tracing::debug!(%error, "still waiting");
                    lasts = self.options.poll;
                }
                Err(error) => return Err(error),
            }
            if errand.is_withdrawn() {
                return Err(left());
            }
            if last {
                self.withdraw_intent(asking).await;
                return Ok(Err(busy));
            }
        }
    }

    async fn ask_once(&self, asking: &Asking<'_>) -> Result<Result<Grant, (Busy, Duration)>> {
        let ask = asking.ask;
        let (got, sent_at) = self.step(&ask.claim.names, |slots| self.decide(asking, slots)).await?;
        match got {
            Got::Busy(busy, lasts) => Ok(Err((busy, lasts))),
            Got::Granted { fence, mode, ttl } => {
                self.mine.granted(&asking.mark, sent_at, ttl);
                let claim = ask.claim.clone();
                Ok(Ok(Grant { claim, fence, mode, ttl, sent_at, lease: ttl }))
            }
        }
    }

    fn decide(&self, asking: &Asking<'_>, slots: &mut [Slot]) -> Result<Step<Got>> {
        if let Some(got) = self.again(&asking.mark, slots) {
            return Ok(Step::Write(got));
        }
        let ask = asking.ask;
        let owner = ask.owner.as_ref().map(owner_mark);
        let verdicts: Vec<Verdict> = slots
            .iter()
            .map(|slot| {
                let held = slot.page.book.holds.iter();
                let held = held.filter(|hold| matches!(slot.sight.phase(hold), Phase::Held(_)));
                match judge(owner, ask.mode, held.map(Hold::stake)) {
                    Verdict::Free if slot.is_held_back() || slot.is_wanted(ask.mode) => Verdict::Blocked,
                    verdict => verdict,
                }
            })
            .collect();
        match judge_all(ask, asking.waits, verdicts.iter().copied().map(Ok))? {
            Verdict::Free => {
                let fence = self.next_fence(slots)?;
                Ok(Step::Write(self.admit(asking, slots, fence)))
            }
            Verdict::Reenter(fence) => Ok(Step::Write(self.admit(asking, slots, fence))),
            Verdict::Upgrade => Err(Error::Deadlock(ask.claim.names.iter().cloned().collect())),
            Verdict::Blocked => {
                let first = verdicts.iter().position(|verdict| *verdict != Verdict::Free).unwrap_or(0);
                self.want(asking, slots);
                let busy = Got::Busy(slots[first].busy(), slots[first].lasts());
                Ok(if slots.iter().any(|slot| slot.dirty) { Step::Write(busy) } else { Step::Tell(busy) })
            }
        }
    }

    /// The same attempt again is the same ask, if it has all of its names still; its lease counts anew. Else what is left of it
    /// goes, and it asks like any other.
    fn again(&self, mark: &str, slots: &mut [Slot]) -> Option<Got> {
        let first = slots[0].page.book.find(mark).cloned();
        let alive = |slot: &Slot| {
            let hold = slot.page.book.find(mark)?;
            (first.as_ref().is_some_and(|first| first.fence == hold.fence) && self.lives(slot, hold))
                .then_some(())
        };
        if let (Some(first), Some(())) = (&first, slots.iter().map(alive).collect::<Option<()>>()) {
            slots.iter_mut().for_each(|slot| slot.renew(mark));
            let ttl = Duration::from_millis(first.span.ms);
            return Some(Got::Granted { fence: first.fence, mode: first.mode, ttl });
        }
        for slot in slots {
            match slot.page.book.find(mark) {
                Some(hold) if self.lives(slot, hold) => slot.end(mark),
                Some(_) => slot.end_uncleanly(mark),
                None => {}
            }
        }
        None
    }

    fn admit(&self, asking: &Asking<'_>, slots: &mut [Slot], fence: Fence) -> Got {
        let ask = asking.ask;
        let several = ask.claim.names.count() > 1;
        for slot in slots {
            slot.tidy();
            if ask.mode == Mode::Exclusive {
                // Others who still want it alone will say so again.
                slot.page.book.intent = None;
            }
            slot.page.fence = slot.page.fence.max(Some(fence));
            let hold = Hold {
                mark: asking.mark.clone(),
                owner: ask.owner.as_ref().map(|owner| owner_mark(owner).to_hex()),
                mode: ask.mode,
                fence,
                span: slot.span(millis(ask.ttl)),
                lock_delay_ms: millis(ask.lock_delay),
                min_hold_ms: millis(ask.min_hold),
                since: slot.sight.wall,
                holder: (*ask.holder).clone(),
                names: if several { ask.claim.names.iter().cloned().collect() } else { Vec::new() },
            };
            slot.page.book.add(hold);
        }
        Got::Granted { fence, mode: ask.mode, ttl: Duration::from_millis(millis(ask.ttl)) }
    }

    /// Whoever waits to have a lock alone says so, or those who share it could go on for ever.
    fn want(&self, asking: &Asking<'_>, slots: &mut [Slot]) {
        if asking.ask.mode != Mode::Exclusive || !asking.waits {
            return;
        }
        let lasts = (self.options.poll * 4).max(Duration::from_secs(2));
        for slot in slots {
            let soon = after(slot.sight.wall, lasts / 2);
            let shared = slot.page.book.holds.iter().any(|hold| hold.mode != Mode::Exclusive);
            if shared && slot.page.book.intent.as_ref().is_none_or(|intent| intent.ends_us < soon) {
                let ends_us = after(slot.sight.wall, lasts);
                slot.page.book.intent = Some(Intent { mark: asking.mark.clone(), ends_us });
                slot.dirty = true;
            }
        }
    }

    async fn withdraw_intent(&self, asking: &Asking<'_>) {
        if asking.ask.mode != Mode::Exclusive {
            return;
        }
        let drop = |slots: &mut [Slot]| {
            slots.iter_mut().for_each(|slot| slot.unwant(&asking.mark));
            Ok(if slots.iter().any(|slot| slot.dirty) { Step::Write(()) } else { Step::Tell(()) })
        };
        if let Err(error) = self.step(&asking.ask.claim.names, drop).await {
            tracing::debug!(%error, "it goes by itself");
        }
    }

    /// Leaves a note of what we saw, for the next process of this machine: one that never waits would else never see anything
    /// for long enough.
    async fn bear_witness(&self, ask: &Ask) {
        let note = |slots: &mut [Slot]| {
            let looker = self.looker();
            slots.iter_mut().for_each(|slot| slot.dirty |= looker.witness(&mut slot.page));
            Ok(if slots.iter().any(|slot| slot.dirty) { Step::Write(()) } else { Step::Tell(()) })
        };
        if let Err(error) = self.step(&ask.claim.names, note).await {
            tracing::debug!(%error, "nobody will know that we were here");
        }
    }
}

impl Slot {
    /// A lock-delay keeps everybody from it.
    fn is_held_back(&self) -> bool {
        let book = &self.page.book;
        book.delay.as_ref().is_some_and(|delay| !self.sight.left(delay, 0).is_zero())
            || book.holds.iter().any(|hold| matches!(self.sight.phase(hold), Phase::Delayed(_)))
    }

    /// Somebody else waits to have it alone.
    fn is_wanted(&self, mode: Mode) -> bool {
        let wall = self.sight.wall.as_micros();
        mode != Mode::Exclusive && self.page.book.intent.as_ref().is_some_and(|intent| intent.ends_us > wall)
    }

    /// The lease of a hold counts from our write.
    pub fn renew(&mut self, mark: &str) {
        let Some(i) = self.page.book.holds.iter().position(|hold| hold.mark == mark) else { return };
        self.page.book.holds[i].span = self.span(self.page.book.holds[i].span.ms);
        self.dirty = true;
    }

    /// Takes back that somebody wants it alone.
    pub fn unwant(&mut self, mark: &str) {
        self.dirty |= self.page.book.intent.take_if(|intent| intent.mark == mark).is_some();
    }

    fn busy(&self) -> Busy {
        let mut held = self.held();
        held.truncate(LockView::BUSY);
        Busy { name: self.name.clone(), held, waiting: 0 }
    }

    /// How long it takes until something here is over, if nobody does anything.
    fn lasts(&self) -> Duration {
        let holds = self.page.book.holds.iter().map(|hold| match self.sight.phase(hold) {
            Phase::Held(left) | Phase::Delayed(left) => left,
            Phase::Over => Duration::MAX,
        });
        let delay = self.page.book.delay.iter().map(|delay| self.sight.left(delay, 0));
        holds
            .chain(delay)
            .filter(|left| !left.is_zero())
            .min()
            .unwrap_or(Duration::MAX / 4)
            .min(Duration::MAX / 4)
    }
}

fn left() -> Error {
    Error::Unknown("the ask was taken back".into())
}
