//! Asking once: what is there, what the rule says about it, and what is written then.

use std::time::Duration;

use lockkeeper_core::rules::{Verdict, judge, judge_all};
use lockkeeper_core::{Busy, Error, Fence, LockView, Mode, Result};

use crate::book::{Hold, Intent, millis, millis_up};
use crate::layout::owner_mark;
use crate::revoke::refuse_revoked;
use crate::sight::Phase;
use crate::step::{Slot, Step, after};
use crate::store::Shared;
use crate::wait::Asking;

/// What came of asking once.
pub enum Got {
    Granted {
        fence: Fence,
        mode: Mode,
        ttl: Duration,
    },
    /// Who is in the way, and for how long at most if they stay silent.
    Busy(Busy, Duration),
}

impl Shared {
    pub fn decide(&self, asking: &Asking<'_>, slots: &mut [Slot]) -> Result<Step<Got>> {
        if let Some(got) = self.again(&asking.mark, slots)? {
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
            Verdict::Reenter(fence) => {
                refuse_revoked(slots, |hold| hold.fence == fence)?;
                Ok(Step::Write(self.admit(asking, slots, fence)))
            }
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
    fn again(&self, mark: &str, slots: &mut [Slot]) -> Result<Option<Got>> {
        let first = slots[0].page.book.find(mark).cloned();
        let alive = |slot: &Slot| {
            let hold = slot.page.book.find(mark)?;
            (first.as_ref().is_some_and(|first| first.fence == hold.fence) && self.lives(slot, hold))
                .then_some(())
        };
        if let (Some(first), Some(())) = (&first, slots.iter().map(alive).collect::<Option<()>>()) {
            refuse_revoked(slots, |hold| hold.mark == mark)?;
            slots.iter_mut().for_each(|slot| slot.renew(mark));
            let ttl = Duration::from_millis(first.span.ms);
            return Ok(Some(Got::Granted { fence: first.fence, mode: first.mode, ttl }));
        }
        for slot in slots {
            match slot.page.book.find(mark) {
                Some(hold) if self.lives(slot, hold) => slot.end(mark),
                Some(_) => slot.end_uncleanly(mark),
                None => {}
            }
        }
        Ok(None)
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
                span: slot.span(millis_up(ask.ttl)),
                lock_delay_ms: millis(ask.lock_delay),
                min_hold_ms: millis(ask.min_hold),
                since: slot.sight.wall,
                holder: (*ask.holder).clone(),
                names: if several { ask.claim.names.iter().cloned().collect() } else { Vec::new() },
                revoked: None,
            };
            slot.page.book.add(hold);
        }
        Got::Granted { fence, mode: ask.mode, ttl: ask.ttl }
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
