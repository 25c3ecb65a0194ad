//! One step: read, decide, write on condition that nothing has changed; and again, if something has.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::try_join_all;
use lockkeeper_core::{Error, Fence, LockName, Moment, Names, Result, Wall};
use lockkeeper_host::{random_128, sleep_until};

use crate::book::{Page, Span, millis};
use crate::fault::Failure;
use crate::layout;
use crate::script::{Item, Op};
use crate::sight::{Looker, Phase, Sight};
use crate::store::Shared;

/// How often others may be faster before we say so.
const TRIES: u32 = 60;

/// One lock, as a step finds it and leaves it.
#[derive(Clone, Debug)]
pub struct Slot {
    pub name: LockName,
    pub page: Page,
    pub sight: Sight,
    /// The number that our write will have.
    pub next: u64,
    /// It is to be written.
    pub dirty: bool,
}

impl Slot {
    fn new(name: &LockName, page: Page, sight: Sight) -> Slot {
        // An item that was deleted and is made again does not repeat a number.
        let next = page.rev.map_or(sight.wall.as_micros(), |rev| rev + 1);
        Slot { name: name.clone(), page, sight, next, dirty: false }
    }

    /// Something that lasts from our write on.
    pub fn span(&self, ms: u64) -> Span {
        let ends_us = self.sight.wall.as_micros().saturating_add(ms.saturating_mul(1000));
        Span { beat: self.next, ms, ends_us }
    }

    /// Ends a hold whose holder did not let go, and holds the lock back if it asked for that.
    pub fn end_uncleanly(&mut self, mark: &str) {
        let Some(hold) = self.page.book.find(mark) else { return };
        let ms = hold.lock_delay_ms;
        self.end(mark);
        self.hold_back(ms);
    }

    /// Ends a hold.
    pub fn end(&mut self, mark: &str) {
        self.page.book.holds.retain(|hold| hold.mark != mark);
        self.page.book.drop_reasons();
        self.dirty = true;
    }

    pub fn hold_back(&mut self, ms: u64) {
        let now = self.page.book.delay.as_ref().map_or(Duration::ZERO, |delay| self.sight.left(delay, 0));
        if ms > 0 && now < Duration::from_millis(ms) {
            self.page.book.delay = Some(self.span(ms));
            self.dirty = true;
        }
    }

    /// Forgets what is over.
    pub fn tidy(&mut self) {
        let (sight, book) = (&self.sight, &mut self.page.book);
        book.holds.retain(|hold| sight.phase(hold) != Phase::Over);
        book.drop_reasons();
        book.delay.take_if(|delay| sight.left(delay, 0).is_zero());
        book.intent.take_if(|intent| intent.ends_us <= sight.wall.as_micros());
        let beats: Vec<u64> = book.spans().map(|span| span.beat).collect();
        book.seen.retain(|one| beats.iter().any(|beat| one.rev >= *beat));
        self.dirty = true;
    }
}

/// What comes of looking.
pub enum Step<T> {
    /// This is the answer, and nothing needs to be written for it.
    Tell(T),
    /// This is the answer once the slots that were changed are written.
    Write(T),
}

impl Shared {
    pub fn looker(&self) -> Looker<'_> {
        let (now, wall) = (self.options.clock.now(), self.wall.now());
        Looker { now, wall, boot: &self.boot }
    }

    /// Does one step with the locks of these names. Returns the answer, and the moment from which it counts.
    pub async fn step<T>(
        &self,
        names: &Names,
        decide: impl FnMut(&mut [Slot]) -> Result<Step<T>>,
    ) -> Result<(T, Moment)> {
        self.step_as(false, names, decide).await
    }

    /// The same, `urgent` or not. Steps of one process write one after another: each of them is a condition on the item that the others
    /// change, and they would only refuse each other. What is urgent is the next to write.
    pub async fn step_as<T>(
        &self,
        urgent: bool,
        names: &Names,
        mut decide: impl FnMut(&mut [Slot]) -> Result<Step<T>>,
    ) -> Result<(T, Moment)> {
        let clock = &*self.options.clock;
        let gate = self.errands.gate(names.first());
        let mut turn = None;
        let mut known = self.recall(names);
        let mut fresh = false;
        let (mut conflicts, mut backoff) = (0, Backoff::new(self));
        loop {
            let mut slots = match known.take() {
                Some(slots) => slots,
                None => {
                    fresh = true;
                    match self.read(names).await {
                        Ok(slots) => slots?,
                        Err(failure) => {
                            // Others need not bear the pause.
                            turn = None;
                            backoff.pause(self, failure).await?;
                            continue;
                        }
                    }
                }
            };
            let before = clock.now();
            let answer = match decide(&mut slots) {
                Ok(Step::Write(answer)) if slots.iter().any(|slot| slot.dirty) => answer,
                // What we remember may be out of date: nothing is said before we have looked.
                _ if !fresh => continue,
                Ok(Step::Write(answer) | Step::Tell(answer)) => return Ok((answer, before)),
                Err(error) => return Err(error),
            };
            if turn.is_none() {
                turn = gate.try_write();
                if turn.is_none() {
                    turn = Some(gate.write(urgent).await);
                    // Those in front have changed it.
                    (known, fresh) = (self.recall(names), false);
                    continue;
                }
            }
            // From before the wall clock was read for what is written: a pause in between must not make the lease look longer
            // to us than to others.
            let sent_at = slots.iter().map(|slot| slot.sight.now).min().unwrap_or(before);
            let mut commit = pin!(self.commit(&slots));
            let committed = tokio::select! {
                committed = &mut commit => committed,
                // An answer that does not come delays the others for a while and no longer: the condition keeps the steps apart.
                () = sleep_until(clock, clock.now() + self.options.timeout / 4), if turn.is_some() => {
                    turn = None;
                    commit.await
                }
            };
            match committed? {
                Ok(()) => return Ok((answer, sent_at)),
                Err(Failure::Conflict(found)) => {
                    conflicts += 1;
                    if conflicts >= TRIES {
                        return Err(Failure::Conflict(None).into());
                    }
                    if let (Some(found), [name]) = (found, names.as_slice()) {
                        known = Some(vec![self.slot(name, found.as_ref())?]);
                        fresh = true;
                    }
                    // Twice in a row is a crowd: not all at once again.
                    let crowd = Duration::from_millis(4 << conflicts.min(6));
                    sleep_until(clock, clock.now() + jitter(crowd)).await;
                }
                Err(failure) => {
                    turn = None;
                    backoff.pause(self, failure).await?;
                }
            }
        }
    }

    fn recall(&self, names: &Names) -> Option<Vec<Slot>> {
        let looker = self.looker();
        let recall = |name: &LockName| {
            let (page, sight) = self.eyes.recall(name, &looker)?;
            Some(Slot::new(name, page, sight))
        };
        names.iter().map(recall).collect()
    }

    /// Reads all of them. Each is as it is at its own moment: what is written then has a condition on every one.
    async fn read(&self, names: &Names) -> Result<Result<Vec<Slot>>, Failure> {
        let keys: Vec<String> = names.iter().map(layout::lock).collect();
        let items = try_join_all(keys.iter().map(|key| self.script.get(key))).await?;
        Ok(names.iter().zip(&items).map(|(name, item)| self.slot(name, item.as_ref())).collect())
    }

    pub fn slot(&self, name: &LockName, item: Option<&Item>) -> Result<Slot> {
        let page = Page::read(item)?;
        let sight = self.eyes.look(name, &page, &self.looker());
        Ok(Slot::new(name, page, sight))
    }

    async fn commit(&self, slots: &[Slot]) -> Result<Result<(), Failure>> {
        let dirty = || slots.iter().filter(|slot| slot.dirty);
        let put = |slot: &Slot| {
            let item = slot.page.item(layout::lock(&slot.name), slot.next)?;
            Ok(Op::Put { item, over: slot.page.rev })
        };
        let ops = dirty().map(put).collect::<Result<Vec<Op>>>()?;
        // Whatever becomes of it, also if nobody waits for the answer: what we know is out of date now.
        dirty().for_each(|slot| self.eyes.doubt(&slot.name));
        let answer = self.script.write(ops).await;
        if answer.is_ok() {
            for slot in dirty() {
                let page = Page { rev: Some(slot.next), ..slot.page.clone() };
                self.eyes.look(&slot.name, &page, &self.looker());
            }
        }
        Ok(answer)
    }

    /// The fence after all of these locks' last ones.
    pub fn next_fence(&self, slots: &[Slot]) -> Result<Fence> {
        Fence::after(slots.iter().filter_map(|slot| slot.page.fence).max(), self.wall.now())
    }
}

/// The pauses after being told to slow down.
pub struct Backoff {
    until: Moment,
    next: Duration,
}

impl Backoff {
    pub fn new(shared: &Shared) -> Self {
        Backoff {
            until: shared.options.clock.now() + shared.options.timeout,
            next: Duration::from_millis(25),
        }
    }

    /// Waits, if that is what helps: what was throttled did not happen. Everything else is told at once.
    pub async fn pause(&mut self, shared: &Shared, failure: Failure) -> Result<()> {
        let clock = &*shared.options.clock;
        if !matches!(failure, Failure::Throttled(_)) || clock.now() >= self.until {
            return Err(Error::from(failure));
        }
        tracing::debug!(?failure, "slower");
        sleep_until(clock, clock.now() + self.next / 2 + jitter(self.next / 2)).await;
        self.next = (self.next * 2).min(Duration::from_secs(1));
        Ok(())
    }
}

/// A random time up to this.
pub fn jitter(most: Duration) -> Duration {
    let [a, b, c, d, ..] = random_128();
    most.mul_f64(f64::from(u32::from_be_bytes([a, b, c, d])) / f64::from(u32::MAX))
}

/// The wall clock this much later, in µs.
pub fn after(wall: Wall, time: Duration) -> u64 {
    wall.as_micros().saturating_add(millis(time).saturating_mul(1000))
}
