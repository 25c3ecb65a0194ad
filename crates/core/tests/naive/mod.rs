//! The lock table once more, as simply as possible: plain vectors, scanned in full for every question.
//!
//! It shares the words of the crate (`Ask`, `Mode`, `LockView`) and none of its rules.

mod bug;
mod show;

pub use bug::{Bug, Seen};

use lockkeeper_core::table::{Answer, Now};
use lockkeeper_core::{
    Acquired, Ask, Attempt, Claim, Event, EventKind, Fence, LockName, Mode, Moment, Outcome, Release,
    Renewal, Wait, Wall,
};

#[derive(Clone)]
pub struct Hold {
    pub ask: Ask,
    pub fence: Fence,
    pub granted: Moment,
    pub since: Wall,
    pub ends: Moment,
    pub lingering: bool,
}

#[derive(Clone)]
pub struct Waiter {
    pub ask: Ask,
    pub until: Moment,
    pub since: Wall,
}

/// What the driver is to pass on. Of an error only its kind counts.
#[derive(Clone, Debug, PartialEq)]
pub enum Told {
    Answer(Attempt, Result<Acquired, Outcome>),
    Event(Event),
}

/// What the rule says about one ask.
#[derive(Clone, Copy, PartialEq)]
enum Say {
    Free,
    Reenter(Fence),
    Upgrade,
    /// Its owner has a part of it.
    Mixed,
    Blocked,
}

#[derive(Clone, Default)]
pub struct Naive {
    pub bug: Option<Bug>,
    /// Oldest first.
    pub holds: Vec<Hold>,
    /// First come first.
    pub line: Vec<Waiter>,
    pub delays: Vec<(LockName, Moment)>,
    pub fence: Option<Fence>,
    pub told: Vec<Told>,
    pub seen: Seen,
}

fn has(ask: &Ask, name: &LockName) -> bool {
    ask.claim.names.iter().any(|n| n == name)
}

fn same_owner(a: &Ask, b: &Ask) -> bool {
    a.owner.is_some() && a.owner == b.owner
}

/// Whoever holds like `held` needs nothing more for `asked`.
fn enough(held: Mode, asked: Mode) -> bool {
    match held {
        Mode::Exclusive => true,
        Mode::Shared => asked == Mode::Shared,
        Mode::Permit(held) => matches!(asked, Mode::Permit(n) if n >= held),
    }
}

impl Naive {
    fn is(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    fn next_fence(&mut self, wall: Wall) -> Result<Fence, Outcome> {
        let next = self.fence.map_or(1, |f| f.get() + 1).max(wall.as_micros());
        let fence = Fence::new(next).map_err(|_| Outcome::Limited)?;
        self.fence = Some(fence);
        Ok(fence)
    }

    fn held(&self, attempt: &Attempt) -> Option<usize> {
        self.holds.iter().position(|h| h.ask.claim.attempt == *attempt && !h.lingering)
    }

    fn queued(&self, attempt: &Attempt) -> Option<usize> {
        self.line.iter().position(|w| w.ask.claim.attempt == *attempt)
    }

    /// Whether those who hold `name` keep this ask out, its own holds left aside.
    pub fn conflict(&self, ask: &Ask, name: &LockName) -> bool {
        let holds: Vec<&Hold> = self.holds.iter().filter(|h| has(&h.ask, name)).collect();
        match ask.mode {
            Mode::Exclusive => !holds.is_empty(),
            Mode::Shared => holds.iter().any(|h| h.ask.mode != Mode::Shared),
            Mode::Permit(mine) => {
                let mut fences: Vec<Fence> = holds.iter().map(|h| h.fence).collect();
                fences.sort();
                fences.dedup();
                let sizes: Vec<Option<u32>> = holds
                    .iter()
                    .map(|h| if let Mode::Permit(n) = h.ask.mode { Some(n) } else { None })
                    .collect();
                let smallest = sizes.iter().flatten().copied().min().unwrap_or(mine).min(mine) as usize;
                sizes.contains(&None) || (fences.len() >= smallest && !self.is(Bug::PermitLimitIgnored))
            }
        }
    }

    /// What stands in the way of an ask for this one name, its own owner's holds left aside. `ahead` is the part of
    /// the line that came before it.
    pub fn in_the_way(&self, ask: &Ask, name: &LockName, ahead: &[Waiter]) -> bool {
        let behind = !self.is(Bug::Barges) && ahead.iter().any(|w| has(&w.ask, name));
        behind || self.conflict(ask, name) || self.delays.iter().any(|(n, _)| n == name)
    }

    fn say(&self, ask: &Ask, ahead: &[Waiter]) -> Say {
        let mine = |name: &LockName| -> Vec<&Hold> {
            let own = |h: &&Hold| has(&h.ask, name) && same_owner(&h.ask, ask) && !h.lingering;
            self.holds.iter().filter(own).collect()
        };
        let names = &ask.claim.names;
        let owned: Vec<&LockName> = names.iter().filter(|n| !mine(n).is_empty()).collect();
        if owned.iter().any(|n| !mine(n).iter().any(|h| enough(h.ask.mode, ask.mode))) {
            return Say::Upgrade;
        }
        if let Some(first) = owned.first() {
            let fence = mine(first)[0].fence;
            let whole = owned.len() == names.count() && owned.iter().all(|n| mine(n)[0].fence == fence);
            return if whole { Say::Reenter(fence) } else { Say::Mixed };
        }
        let stuck = |n: &&LockName| self.in_the_way(ask, n, ahead);
        let count = names.iter().filter(stuck).count();
        let free = if self.is(Bug::PartIsEnough) { count < names.count() } else { count == 0 };
        if free { Say::Free } else { Say::Blocked }
    }

    pub fn ask(&mut self, now: Now, ask: Ask) -> Result<Answer, Outcome> {
        self.settle(now);
        let attempt = ask.claim.attempt;
        if let Some(i) = self.held(&attempt) {
            self.seen.asked_again_when_held += 1;
            if !self.is(Bug::RetryLeavesTheLease) {
                self.holds[i].ends = now.moment + self.holds[i].ask.ttl;
            }
            return Ok(Answer::Granted(self.holds[i].grant(now)));
        }
        if self.queued(&attempt).is_some() && !self.is(Bug::RetryDoubles) {
            self.seen.asked_again_in_line += 1;
            return Ok(Answer::Waiting);
        }
        match self.say(&ask, &self.line) {
            Say::Free => {
                let fence = self.next_fence(now.wall)?;
                Ok(Answer::Granted(self.admit(now, ask, fence)))
            }
            Say::Reenter(fence) => {
                self.seen.reentries += 1;
                let fence = if self.is(Bug::ReentryNewFence) { self.next_fence(now.wall)? } else { fence };
                Ok(Answer::Granted(self.admit(now, ask, fence)))
            }
            Say::Upgrade => {
                self.seen.upgrades += 1;
                Err(Outcome::Deadlock)
            }
            Say::Mixed => Err(Outcome::Invalid),
            Say::Blocked if ask.wait == Wait::No => {
                self.seen.busy += 1;
                Ok(Answer::Busy(self.busy(now, &ask, &self.line)))
            }
            Say::Blocked => self.join(now, ask),
        }
    }

    fn join(&mut self, now: Now, ask: Ask) -> Result<Answer, Outcome> {
        if self.waits_for_itself(&ask) || self.never_granted(now, &ask) {
            self.seen.deadlocks += 1;
            return Err(Outcome::Deadlock);
        }
        let until = match ask.wait {
            Wait::No => now.moment,
            Wait::For(d) => now.moment + d,
            Wait::Forever => Moment::NEVER,
        };
        self.event(now, &ask, EventKind::Waiting);
        self.line.push(Waiter { ask, until, since: now.wall });
        Ok(Answer::Waiting)
    }

    /// Two asks of one owner may stand in line for one name only if the later re-enters whatever the earlier gets.
    fn waits_for_itself(&self, ask: &Ask) -> bool {
        let touches = |w: &&Waiter| ask.claim.names.iter().any(|n| has(&w.ask, n));
        let inside =
            |w: &Waiter| ask.claim.names.iter().all(|n| has(&w.ask, n)) && enough(w.ask.mode, ask.mode);
        self.line.iter().filter(|w| same_owner(&w.ask, ask)).filter(touches).any(|w| !inside(w))
    }

    /// Suppose that everyone who waits for nothing lets go of everything, again and again. Would this ask be let in?
    fn never_granted(&self, now: Now, ask: &Ask) -> bool {
        if self.is(Bug::DeadlockNeverTold) {
            return false;
        }
        // An owner that has nothing and wants nothing else keeps nobody waiting: it cannot close a circle.
        let same = |other: &Ask| same_owner(other, ask);
        if !self.line.iter().any(|w| same(&w.ask)) && !self.holds.iter().any(|h| same(&h.ask) && !h.lingering)
        {
            return false;
        }
        let mut world = Naive {
            bug: self.bug,
            holds: self.holds.clone(),
            line: self.line.clone(),
            // New fences for new grants, and no end to them.
            fence: self.fence.filter(|fence| fence.get() < Fence::MAX.get() / 2),
            ..Naive::default()
        };
        world.line.push(Waiter { ask: ask.clone(), until: Moment::NEVER, since: now.wall });
        loop {
            let before = (world.holds.len(), world.line.len());
            let Naive { holds, line, .. } = &mut world;
            holds.retain(|h| !h.lingering && line.iter().any(|w| same_owner(&w.ask, &h.ask)));
            world.serve(now);
            if before == (world.holds.len(), world.line.len()) {
                return world.queued(&ask.claim.attempt).is_some();
            }
        }
    }

    fn admit(&mut self, now: Now, ask: Ask, fence: Fence) -> lockkeeper_core::Grant {
        self.seen.grants += 1;
        self.seen.several += usize::from(ask.claim.names.count() > 1);
        self.event(now, &ask, EventKind::Granted { fence });
        let (ends, granted, since) = (now.moment + ask.ttl, now.moment, now.wall);
        let hold = Hold { ask, fence, granted, since, ends, lingering: false };
        let grant = hold.grant(now);
        self.holds.push(hold);
        grant
    }

    pub fn renew(&mut self, now: Now, attempt: &Attempt) -> Renewal {
        if self.is(Bug::RenewsTheExpired)
            && let Some(i) = self.held(attempt)
        {
            self.holds[i].ends = now.moment + self.holds[i].ask.ttl;
        }
        self.settle(now);
        let Some(i) = self.held(attempt) else { return Renewal::Lost };
        self.seen.renewals += 1;
        self.holds[i].ends = now.moment + self.holds[i].ask.ttl;
        Renewal::Renewed
    }

    pub fn release(&mut self, now: Now, claim: &Claim) -> Release {
        self.settle(now);
        if let Some(i) = self.queued(&claim.attempt) {
            self.seen.left += 1;
            let w = self.line.remove(i);
            self.event(now, &w.ask, EventKind::Left);
            self.serve(now);
            return Release::Released;
        }
        let anybody =
            |h: &Hold| self.is(Bug::ReleaseByAnyone) && h.ask.claim.names == claim.names && !h.lingering;
        let found = self.held(&claim.attempt).or_else(|| self.holds.iter().position(anybody));
        let Some(i) = found else { return Release::AlreadyGone };
        let stays = self.holds[i].granted + self.holds[i].ask.min_hold;
        let (ask, fence) = (self.holds[i].ask.clone(), self.holds[i].fence);
        self.event(now, &ask, EventKind::Released { fence });
        if stays > now.moment && !self.is(Bug::LingeringIgnored) {
            self.seen.lingerings += 1;
            self.holds[i].ends = stays;
            self.holds[i].lingering = true;
        } else {
            self.holds.remove(i);
            if self.is(Bug::DelayAfterCleanEnd) {
                self.delay(&ask, now.moment);
            }
            self.serve(now);
        }
        Release::Released
    }

    pub fn break_lock(&mut self, now: Now, name: &LockName, reason: &str) -> Result<Fence, Outcome> {
        self.settle(now);
        let last = self.fence;
        let fence = self.next_fence(now.wall)?;
        if self.is(Bug::BreakKeepsTheFence) {
            self.fence = last;
        }
        self.delays.retain(|(n, _)| n != name);
        let (gone, kept) =
            std::mem::take(&mut self.holds).into_iter().partition(|h: &Hold| has(&h.ask, name));
        self.holds = kept;
        self.seen.breaks += usize::from(!gone.is_empty());
        // The grants are lost as a whole, so the news is for all their names; the broken one first.
        let mut others: Vec<&LockName> = gone.iter().flat_map(|h| h.ask.claim.names.iter()).collect();
        others.sort();
        others.dedup();
        others.retain(|n| *n != name);
        for name in std::iter::once(name).chain(others) {
            self.news(now, name, EventKind::Broken { fence, reason: reason.to_owned() }, None);
        }
        gone.iter().filter(|h| !h.lingering).for_each(|h| self.delay(&h.ask, now.moment));
        self.serve(now);
        Ok(fence)
    }

    fn delay(&mut self, ask: &Ask, from: Moment) {
        if !ask.lock_delay.is_zero() {
            self.seen.delays += 1;
            let until = from + ask.lock_delay;
            self.delays.extend(ask.claim.names.iter().map(|n| (n.clone(), until)));
        }
    }

    /// Everything that is due.
    pub fn settle(&mut self, now: Now) {
        let due = |h: &Hold| h.ends <= now.moment;
        let (mut gone, kept): (Vec<Hold>, Vec<Hold>) =
            std::mem::take(&mut self.holds).into_iter().partition(due);
        self.holds = kept;
        gone.sort_by_key(|h| (h.ends, h.fence, h.ask.claim.attempt));
        for h in gone.iter().filter(|h| !h.lingering) {
            self.seen.expiries += 1;
            self.event(now, &h.ask, EventKind::Expired { fence: h.fence });
            self.delay(&h.ask, if self.is(Bug::DelayFromNotice) { now.moment } else { h.ends });
        }
        self.delays.retain(|(_, until)| *until > now.moment);
        self.serve(now);
        let impatient = |line: &[Waiter]| {
            let due = line.iter().enumerate().filter(|(_, w)| w.until <= now.moment);
            due.min_by_key(|(i, w)| (w.until, *i)).map(|(i, _)| i)
        };
        while let Some(i) = impatient(&self.line) {
            self.seen.out_of_patience += 1;
            let w = self.line.remove(i);
            let busy = self.busy(now, &w.ask, &self.line[..i]);
            self.told.push(Told::Answer(w.ask.claim.attempt, Ok(Acquired::Busy(busy))));
            self.event(now, &w.ask, EventKind::Left);
            self.serve(now);
        }
    }

    /// Lets in whoever may come in, in the order in which they came, until nobody may.
    fn serve(&mut self, now: Now) {
        let turn = |naive: &Naive| -> Option<(usize, Say)> {
            let say = |i: usize| (i, naive.say(&naive.line[i].ask, &naive.line[..i]));
            let may = |(_, say): &(usize, Say)| matches!(say, Say::Free | Say::Reenter(_));
            let order = 0..naive.line.len();
            if naive.is(Bug::LastComeFirst) {
                order.rev().map(say).find(may)
            } else {
                order.map(say).find(may)
            }
        };
        while let Some((i, say)) = turn(self) {
            let w = self.line.remove(i);
            let names = w.ask.claim.names.clone();
            let fence = if let Say::Reenter(fence) = say { Ok(fence) } else { self.next_fence(now.wall) };
            let Some(fence) = self.let_in(now, w.ask.clone(), fence) else { continue };
            // Its owner's other asks for the same names come in with it.
            let mut k = 0;
            while let Some(other) = self.line.get(k) {
                let inside = other.ask.claim.names.iter().all(|n| names.iter().any(|m| m == n));
                let again = self.say(&other.ask, &self.line[..k]) == Say::Reenter(fence);
                if same_owner(&other.ask, &w.ask) && inside && again {
                    self.seen.reentries_from_line += 1;
                    let other = self.line.remove(k);
                    self.let_in(now, other.ask, Ok(fence));
                } else {
                    k += 1;
                }
            }
        }
    }

    fn let_in(&mut self, now: Now, ask: Ask, fence: Result<Fence, Outcome>) -> Option<Fence> {
        let attempt = ask.claim.attempt;
        let answer = fence.map(|fence| Acquired::Granted(self.admit(now, ask, fence)));
        self.seen.from_the_line += usize::from(answer.is_ok());
        self.told.push(Told::Answer(attempt, answer));
        fence.ok()
    }
}
