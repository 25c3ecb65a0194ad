//! The lock table once more, as simply as possible: plain vectors, scanned in full for every question.
//!
//! It shares the words of the crate (`LockRequest`, `Mode`, `LockView`) and none of its rules.

mod bug;
mod show;

pub use bug::{Bug, Seen};

use lockkeeper_core::table::{Answer, Now};
use lockkeeper_core::{
    AcquireOutcome, Attempt, BootInstant, Event, EventKind, Fence, LockName, LockRequest, Mode, Outcome,
    ReleaseOutcome, RenewOutcome, RequestKey, Wait, WallTime,
};

#[derive(Clone)]
pub struct Hold {
    pub request: LockRequest,
    pub fence: Fence,
    pub granted: BootInstant,
    pub since: WallTime,
    pub ends: BootInstant,
    pub lingering: bool,
}

#[derive(Clone)]
pub struct Waiter {
    pub request: LockRequest,
    pub until: BootInstant,
    pub since: WallTime,
}

/// What the driver is to pass on. Of an error only its kind counts.
#[derive(Clone, Debug, PartialEq)]
pub enum Told {
    Answer(Attempt, Result<AcquireOutcome, Outcome>),
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
    pub delays: Vec<(LockName, BootInstant)>,
    pub fence: Option<Fence>,
    pub told: Vec<Told>,
    pub seen: Seen,
}

fn has(request: &LockRequest, name: &LockName) -> bool {
    request.key.names.iter().any(|n| n == name)
}

fn same_owner(a: &LockRequest, b: &LockRequest) -> bool {
    a.owner.is_some() && a.owner == b.owner
}

/// A hold in mode `held` covers `asked`.
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

    fn next_fence(&mut self, wall: WallTime) -> Result<Fence, Outcome> {
        let next = self.fence.map_or(1, |f| f.get() + 1).max(wall.as_micros());
        let fence = Fence::new(next).map_err(|_| Outcome::Limited)?;
        self.fence = Some(fence);
        Ok(fence)
    }

    fn held(&self, attempt: &Attempt) -> Option<usize> {
        self.holds.iter().position(|h| h.request.key.attempt == *attempt && !h.lingering)
    }

    fn queued(&self, attempt: &Attempt) -> Option<usize> {
        self.line.iter().position(|w| w.request.key.attempt == *attempt)
    }

    /// Whether the holders of `name` exclude this request, its own owner's holds left aside.
    pub fn conflict(&self, request: &LockRequest, name: &LockName) -> bool {
        let holds: Vec<&Hold> = self.holds.iter().filter(|h| has(&h.request, name)).collect();
        match request.mode {
            Mode::Exclusive => !holds.is_empty(),
            Mode::Shared => holds.iter().any(|h| h.request.mode != Mode::Shared),
            Mode::Permit(mine) => {
                let mut fences: Vec<Fence> = holds.iter().map(|h| h.fence).collect();
                fences.sort();
                fences.dedup();
                let sizes: Vec<Option<u32>> = holds
                    .iter()
                    .map(|h| if let Mode::Permit(n) = h.request.mode { Some(n) } else { None })
                    .collect();
                let smallest = sizes.iter().flatten().copied().min().unwrap_or(mine).min(mine) as usize;
                sizes.contains(&None) || (fences.len() >= smallest && !self.is(Bug::PermitLimitIgnored))
            }
        }
    }

    /// What blocks a request for this one name, its own owner's holds left aside. `ahead` is the part of
    /// the line that came before it.
    pub fn in_the_way(&self, request: &LockRequest, name: &LockName, ahead: &[Waiter]) -> bool {
        let behind = !self.is(Bug::Barges) && ahead.iter().any(|w| has(&w.request, name));
        behind || self.conflict(request, name) || self.delays.iter().any(|(n, _)| n == name)
    }

    fn say(&self, request: &LockRequest, ahead: &[Waiter]) -> Say {
        let mine = |name: &LockName| -> Vec<&Hold> {
            let own = |h: &&Hold| has(&h.request, name) && same_owner(&h.request, request) && !h.lingering;
            self.holds.iter().filter(own).collect()
        };
        let names = &request.key.names;
        let owned: Vec<&LockName> = names.iter().filter(|n| !mine(n).is_empty()).collect();
        if owned.iter().any(|n| !mine(n).iter().any(|h| enough(h.request.mode, request.mode))) {
            return Say::Upgrade;
        }
        if let Some(first) = owned.first() {
            let fence = mine(first)[0].fence;
            let whole = owned.len() == names.count() && owned.iter().all(|n| mine(n)[0].fence == fence);
            return if whole { Say::Reenter(fence) } else { Say::Mixed };
        }
        let stuck = |n: &&LockName| self.in_the_way(request, n, ahead);
        let count = names.iter().filter(stuck).count();
        let free = if self.is(Bug::PartIsEnough) { count < names.count() } else { count == 0 };
        if free { Say::Free } else { Say::Blocked }
    }

    pub fn request(&mut self, now: Now, request: LockRequest) -> Result<Answer, Outcome> {
        self.settle(now);
        let attempt = request.key.attempt;
        if let Some(i) = self.held(&attempt) {
            self.seen.asked_again_when_held += 1;
            if !self.is(Bug::RetryLeavesTheLease) {
                self.holds[i].ends = now.moment + self.holds[i].request.ttl;
            }
            return Ok(Answer::Granted(self.holds[i].grant(now)));
        }
        if self.queued(&attempt).is_some() && !self.is(Bug::RetryDoubles) {
            self.seen.asked_again_in_line += 1;
            return Ok(Answer::Waiting);
        }
        match self.say(&request, &self.line) {
            Say::Free => {
                let fence = self.next_fence(now.wall)?;
                Ok(Answer::Granted(self.admit(now, request, fence)))
            }
            Say::Reenter(fence) => {
                self.seen.reentries += 1;
                let fence = if self.is(Bug::ReentryNewFence) { self.next_fence(now.wall)? } else { fence };
                Ok(Answer::Granted(self.admit(now, request, fence)))
            }
            Say::Upgrade => {
                self.seen.upgrades += 1;
                Err(Outcome::Deadlock)
            }
            Say::Mixed => Err(Outcome::Invalid),
            Say::Blocked if request.wait == Wait::No => {
                self.seen.busy += 1;
                Ok(Answer::Busy(self.busy(now, &request, &self.line)))
            }
            Say::Blocked => self.join(now, request),
        }
    }

    fn join(&mut self, now: Now, request: LockRequest) -> Result<Answer, Outcome> {
        if self.waits_for_itself(&request) || self.never_granted(now, &request) {
            self.seen.deadlocks += 1;
            return Err(Outcome::Deadlock);
        }
        let until = match request.wait {
            Wait::No => now.moment,
            Wait::For(d) => now.moment + d,
            Wait::Forever => BootInstant::NEVER,
        };
        self.event(now, &request, EventKind::Waiting);
        self.line.push(Waiter { request, until, since: now.wall });
        Ok(Answer::Waiting)
    }

    /// Two requests of one owner may be queued for one name only if the later re-enters whatever the earlier gets.
    fn waits_for_itself(&self, request: &LockRequest) -> bool {
        let touches = |w: &&Waiter| request.key.names.iter().any(|n| has(&w.request, n));
        let inside = |w: &Waiter| {
            request.key.names.iter().all(|n| has(&w.request, n)) && enough(w.request.mode, request.mode)
        };
        self.line.iter().filter(|w| same_owner(&w.request, request)).filter(touches).any(|w| !inside(w))
    }

    /// Suppose that every owner that waits for nothing releases all its holds, again and again. Would this request be granted?
    fn never_granted(&self, now: Now, request: &LockRequest) -> bool {
        if self.is(Bug::DeadlockNeverTold) {
            return false;
        }
        // An owner without holds and other requests blocks nothing: it cannot close a cycle.
        let same = |other: &LockRequest| same_owner(other, request);
        if !self.line.iter().any(|w| same(&w.request))
            && !self.holds.iter().any(|h| same(&h.request) && !h.lingering)
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
        world.line.push(Waiter { request: request.clone(), until: BootInstant::NEVER, since: now.wall });
        loop {
            let before = (world.holds.len(), world.line.len());
            let Naive { holds, line, .. } = &mut world;
            holds.retain(|h| !h.lingering && line.iter().any(|w| same_owner(&w.request, &h.request)));
            world.serve(now);
            if before == (world.holds.len(), world.line.len()) {
                return world.queued(&request.key.attempt).is_some();
            }
        }
    }

    fn admit(&mut self, now: Now, request: LockRequest, fence: Fence) -> lockkeeper_core::Grant {
        self.seen.grants += 1;
        self.seen.several += usize::from(request.key.names.count() > 1);
        self.event(now, &request, EventKind::Granted { fence });
        let (ends, granted, since) = (now.moment + request.ttl, now.moment, now.wall);
        let hold = Hold { request, fence, granted, since, ends, lingering: false };
        let grant = hold.grant(now);
        self.holds.push(hold);
        grant
    }

    pub fn renew(&mut self, now: Now, attempt: &Attempt) -> RenewOutcome {
        if self.is(Bug::RenewsTheExpired)
            && let Some(i) = self.held(attempt)
        {
            self.holds[i].ends = now.moment + self.holds[i].request.ttl;
        }
        self.settle(now);
        let Some(i) = self.held(attempt) else { return RenewOutcome::Lost };
        self.seen.renewals += 1;
        self.holds[i].ends = now.moment + self.holds[i].request.ttl;
        RenewOutcome::Renewed
    }

    pub fn release(&mut self, now: Now, key: &RequestKey) -> ReleaseOutcome {
        self.settle(now);
        if let Some(i) = self.queued(&key.attempt) {
            self.seen.left += 1;
            let w = self.line.remove(i);
            self.event(now, &w.request, EventKind::Left);
            self.serve(now);
            return ReleaseOutcome::Released;
        }
        let any_hold =
            |h: &Hold| self.is(Bug::ReleaseByAnyone) && h.request.key.names == key.names && !h.lingering;
        let found = self.held(&key.attempt).or_else(|| self.holds.iter().position(any_hold));
        let Some(i) = found else { return ReleaseOutcome::AlreadyGone };
        let stays = self.holds[i].granted + self.holds[i].request.min_hold;
        let (request, fence) = (self.holds[i].request.clone(), self.holds[i].fence);
        self.event(now, &request, EventKind::Released { fence });
        if stays > now.moment && !self.is(Bug::LingeringIgnored) {
            self.seen.lingerings += 1;
            self.holds[i].ends = stays;
            self.holds[i].lingering = true;
        } else {
            self.holds.remove(i);
            if self.is(Bug::DelayAfterCleanEnd) {
                self.delay(&request, now.moment);
            }
            self.serve(now);
        }
        ReleaseOutcome::Released
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
            std::mem::take(&mut self.holds).into_iter().partition(|h: &Hold| has(&h.request, name));
        self.holds = kept;
        self.seen.breaks += usize::from(!gone.is_empty());
        // The grants are lost as a whole, so the news is for all their names; the broken one first.
        let mut others: Vec<&LockName> = gone.iter().flat_map(|h| h.request.key.names.iter()).collect();
        others.sort();
        others.dedup();
        others.retain(|n| *n != name);
        for name in std::iter::once(name).chain(others) {
            self.news(now, name, EventKind::Broken { fence, reason: reason.to_owned() }, None);
        }
        gone.iter().filter(|h| !h.lingering).for_each(|h| self.delay(&h.request, now.moment));
        self.serve(now);
        Ok(fence)
    }

    fn delay(&mut self, request: &LockRequest, from: BootInstant) {
        if !request.lock_delay.is_zero() {
            self.seen.delays += 1;
            let until = from + request.lock_delay;
            self.delays.extend(request.key.names.iter().map(|n| (n.clone(), until)));
        }
    }

    /// Everything that is due.
    pub fn settle(&mut self, now: Now) {
        let due = |h: &Hold| h.ends <= now.moment;
        let (mut gone, kept): (Vec<Hold>, Vec<Hold>) =
            std::mem::take(&mut self.holds).into_iter().partition(due);
        self.holds = kept;
        gone.sort_by_key(|h| (h.ends, h.fence, h.request.key.attempt));
        for h in gone.iter().filter(|h| !h.lingering) {
            self.seen.expiries += 1;
            self.event(now, &h.request, EventKind::Expired { fence: h.fence });
            self.delay(&h.request, if self.is(Bug::DelayFromNotice) { now.moment } else { h.ends });
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
            let busy = self.busy(now, &w.request, &self.line[..i]);
            self.told.push(Told::Answer(w.request.key.attempt, Ok(AcquireOutcome::Busy(busy))));
            self.event(now, &w.request, EventKind::Left);
            self.serve(now);
        }
    }

    /// Grants the requests that may be granted, in the order of their arrival, until none may.
    fn serve(&mut self, now: Now) {
        let turn = |naive: &Naive| -> Option<(usize, Say)> {
            let say = |i: usize| (i, naive.say(&naive.line[i].request, &naive.line[..i]));
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
            let names = w.request.key.names.clone();
            let fence = if let Say::Reenter(fence) = say { Ok(fence) } else { self.next_fence(now.wall) };
            let Some(fence) = self.let_in(now, w.request.clone(), fence) else { continue };
            // Its owner's other asks for the same names come in with it.
            let mut k = 0;
            while let Some(other) = self.line.get(k) {
                let inside = other.request.key.names.iter().all(|n| names.iter().any(|m| m == n));
                let again = self.say(&other.request, &self.line[..k]) == Say::Reenter(fence);
                if same_owner(&other.request, &w.request) && inside && again {
                    self.seen.reentries_from_line += 1;
                    let other = self.line.remove(k);
                    self.let_in(now, other.request, Ok(fence));
                } else {
                    k += 1;
                }
            }
        }
    }

    fn let_in(&mut self, now: Now, request: LockRequest, fence: Result<Fence, Outcome>) -> Option<Fence> {
        let attempt = request.key.attempt;
        let answer = fence.map(|fence| AcquireOutcome::Granted(self.admit(now, request, fence)));
        self.seen.from_the_line += usize::from(answer.is_ok());
        self.told.push(Told::Answer(attempt, answer));
        fence.ok()
    }
}
