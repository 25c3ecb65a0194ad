//! The transactions of an ask: to try, to look, to take, and what is written down when it was granted.

use std::sync::Arc;

use lockkeeper_core::{Fence, Grant, LockName, Result};

use crate::acquire::{Asking, PAUSE, Step};
use crate::base::{base_stands, fence_at};
use crate::book::{Hold, Known, Place};
use crate::entry::{Entry, Line, One, State};
use crate::fault::Failure;
use crate::hold::Search;
use crate::judge;
use crate::layout::Mark;
use crate::lease::Lease;
use crate::order::{Answer, Topic};
use crate::proto::{Compare, RequestOp};
use crate::revoke::lost;
use crate::script::{created, empty, get, holders, nested, put, tail, txn, unwritten, written};
use crate::seat::Seat;

/// How many holders of a long line are read.
const HOLDERS: i64 = 32;

impl Asking<'_> {
    fn about(&self) -> Vec<Topic> {
        self.shared.about(&self.ask.claim.names)
    }

    fn key(&self, name: &LockName) -> Vec<u8> {
        self.shared.layout.key(name, &self.mark)
    }

    /// What is written under all keys of a place.
    fn puts(&self, place: &Mark, entry: Entry, lease: i64) -> Vec<RequestOp> {
        let names = self.ask.claim.names.as_slice();
        let entry = if *place == self.mark { entry } else { entry.of(&self.mark) };
        let key = |name| self.shared.layout.key(name, place);
        names.iter().map(|name| put(&key(name), entry.under(name, names), lease)).collect()
    }

    fn entry(&self, state: State, fence: Option<Fence>) -> Entry {
        Entry::new(self.ask, state, fence, self.shared.clock.wall())
    }

    /// Of a long line the holders, wherever they stand, and its end, with the one before ours. An owner that re-enters holds behind
    /// all who waited before it, so the beginning of the line would not be enough.
    fn read(&self, name: &LockName) -> Vec<RequestOp> {
        let prefix = self.shared.layout.queue(name);
        let limit = if self.all { 0 } else { HOLDERS };
        vec![holders(&prefix, limit), tail(&prefix, if self.joined { self.created } else { 0 })]
    }

    /// What the lines are, for one that stands there.
    pub async fn look(&self) -> Result<Answer, Failure> {
        let mut look = vec![get(&self.shared.layout.base())];
        // Each a transaction of its own, so that many names are not too many operations.
        let names = &self.ask.claim.names;
        look.extend(names.iter().map(|name| nested(txn(Vec::new(), self.read(name), Vec::new()))));
        // Read only: it need not stand behind what others of this process want of the name.
        self.shared.lane.send(txn(Vec::new(), look, Vec::new()), Vec::new()).await
    }

    /// In line, if it may wait, and what the lines are then.
    async fn join(&self) -> Result<Vec<RequestOp>, Failure> {
        let names = self.ask.claim.names.as_slice();
        let mut look = vec![get(&self.shared.layout.base())];
        let line = if self.joins { Some(self.shared.line_lease(self.ask.ttl).await?) } else { None };
        let waiting = self.entry(State::Waiting, None);
        for name in names {
            let read = self.read(name);
            look.push(nested(match &line {
                None => txn(Vec::new(), read, Vec::new()),
                Some(line) => {
                    let key = self.key(name);
                    let write = put(&key, waiting.under(name, names), line.id);
                    txn(vec![created(&key, 0)], [vec![write], read.clone()].concat(), read)
                }
            }));
        }
        Ok(look)
    }

    /// Granted, under a seat, if nobody is there.
    pub async fn try_seat(&self, lease: &Lease, base: u64) -> Result<(Answer, Option<Seat>), Failure> {
        let seat = self.shared.seats.take(&self.ask.claim.names);
        let (free, grant) = self.if_free(&seat, lease);
        // Dropped here, or never answered, the seat is spoilt.
        let answer = self.shared.lane.hope(free, grant, Some(base), self.about()).await;
        seated(answer, seat)
    }

    /// The same in one transaction with a place in line if somebody is there.
    pub async fn try_or_join(&self, lease: &Lease, base: u64) -> Result<(Answer, Option<Seat>), Failure> {
        let join = self.join().await?;
        let seat = self.shared.seats.take(&self.ask.claim.names);
        let (mut free, grant) = self.if_free(&seat, lease);
        free.push(base_stands(&self.shared.layout, base));
        let answer = self.shared.lane.send(txn(free, grant, join), self.about()).await;
        seated(answer, seat)
    }

    fn if_free(&self, seat: &Seat, lease: &Lease) -> (Vec<Compare>, Vec<RequestOp>) {
        let names = self.ask.claim.names.iter();
        let free = names.map(|name| empty(&self.shared.layout.queue(name))).collect();
        (free, self.puts(&seat.mark(), self.entry(State::Granted, None), lease.id))
    }

    /// Takes what was seen to be free at `revision`, unless anything was written there since. What was deleted since is
    /// nobody's loss but our own: so our own place is looked at, where a foreign client may have moved up behind it; and what an owner
    /// enters once more, with the `fence` of it, must still be there.
    pub async fn take(
        &mut self,
        lease: &Arc<Lease>,
        lines: &[Line],
        revision: i64,
        fence: Option<Fence>,
        floor: u64,
    ) -> Result<Step> {
        let shared = self.shared;
        let base = shared.base();
        let mut still = vec![base_stands(&shared.layout, base)];
        for (i, line) in lines.iter().enumerate() {
            let prefix = shared.layout.queue(&line.name);
            still.push(unwritten(&prefix, revision));
            if i == 0 || line.all.iter().any(|one| one.is_foreign()) {
                let place = line.mine(&self.mark).map_or(0, |one| one.created);
                still.push(created(&self.key(&line.name), place));
            }
        }
        still.extend(fence.map_or(Vec::new(), |fence| self.still_entered(lines, base, fence)));
        let grant = self.puts(&self.mark, self.entry(State::Granted, fence), lease.id);
        let order = txn(still, grant, vec![get(&shared.layout.base())]);
        let answer = match shared.lane.send(order, self.about()).await {
            Err(failure) if failure.lease_is_gone() => {
                shared.check_leases(lease).await?;
                return Ok(Step::Again);
            }
            answer => answer.map_err(|failure| self.failed(failure))?,
        };
        if !answer.txn.succeeded {
            return Ok(Step::Again);
        }
        let told = match fence {
            Some(fence) => fence,
            None => fence_at(base, answer.revision)?,
        };
        // A re-entry has the fence that it has.
        let floor = if fence.is_some() { 0 } else { floor };
        self.granted(lease, self.mark.into(), &answer, told, floor, fence).await
    }

    /// What this one enters once more is as it was. A grant of several names ends as a whole, so one of them stands for all: with
    /// 64 names, there would be more to compare than etcd takes.
    fn still_entered(&self, lines: &[Line], base: u64, fence: Fence) -> Vec<Compare> {
        let entered = lines.iter().filter_map(|line| judge::entered(self.ask, &self.mark, line, base, fence));
        let mut seen: Vec<(Option<Mark>, i64)> = Vec::new();
        let mut still = Vec::new();
        for one in entered {
            if !seen.contains(&(one.place, one.written)) {
                seen.push((one.place, one.written));
                still.push(written(&one.key, one.written));
            }
        }
        still
    }

    /// The same attempt has it already: its lease counts anew.
    pub async fn resume(
        &mut self,
        lease: &Arc<Lease>,
        answer: &Answer,
        lines: &[Line],
        fence: Fence,
    ) -> Result<Step> {
        if self.shared.book.open().ending.contains(&self.mark) {
            // Its time was over before it asked again, and its end is on its way.
            tokio::time::sleep(PAUSE).await;
            return Ok(Step::Again);
        }
        let mine: Vec<_> = lines.iter().filter_map(|line| line.mine(&self.mark)).collect();
        self.leave_behind(lines, &mine).await?;
        if let Some(reason) = mine.iter().find_map(|one| one.revoked()) {
            return Err(lost(reason));
        }
        let (at, place) = (mine[0].written, self.place(mine[0]));
        // Where something is in doubt, a request to end it may still be on its way: it is written anew, and that one comes to nothing.
        let doubted = self.shared.book.open().holds.get(&self.mark).is_some_and(|hold| hold.doubted);
        if !doubted && mine.iter().all(|one| one.lease == lease.id && one.written == at) {
            let explicit = mine[0].entry.as_ref().and_then(|entry| entry.fence);
            let answer = Answer { revision: at, ..answer.clone() };
            return self.granted(lease, place, &answer, fence, 0, explicit).await;
        }
        // Granted under a lease that is not ours, or not any more.
        let same = mine.iter().map(|one| written(&one.key, one.written)).collect();
        let grant = self.puts(&place.mark, self.entry(State::Granted, Some(fence)), lease.id);
        let answer = self.shared.lane.send(txn(same, grant, Vec::new()), self.about()).await;
        let answer = answer.map_err(|failure| self.failed(failure))?;
        match answer.txn.succeeded {
            true => self.granted(lease, place, &answer, fence, 0, Some(fence)).await,
            false => Ok(Step::Again),
        }
    }

    /// Where one of ours stands: the seat is still ours if it was before.
    fn place(&self, one: &One) -> Place {
        let mark = one.place.unwrap_or(self.mark);
        let pages = self.shared.book.open();
        let known = pages.holds.get(&self.mark).and_then(|hold| hold.known.as_ref());
        let place = known.map(|known| &known.place).filter(|place| place.mark == mark);
        place.cloned().unwrap_or_else(|| mark.into())
    }

    /// An ask that has it under a seat, and did not hear of it, has asked again and joined the line behind itself.
    async fn leave_behind(&self, lines: &[Line], mine: &[&One]) -> Result<(), Failure> {
        let mut behind = lines
            .iter()
            .flat_map(|line| &line.all)
            .filter(|one| one.mark == Some(self.mark) && mine.iter().all(|known| known.key != one.key));
        if behind.next().is_some() && mine.iter().all(|one| one.place != Some(self.mark)) {
            self.shared.take_out(&self.ask.claim.names, &self.mark, Search::Line).await?;
        }
        Ok(())
    }

    /// Writes it down, and makes sure that the lease lasts for as long as the guard will believe.
    pub async fn granted(
        &mut self,
        lease: &Arc<Lease>,
        place: Place,
        answer: &Answer,
        fence: Fence,
        floor: u64,
        explicit: Option<Fence>,
    ) -> Result<Step> {
        let (shared, ask, sent_at) = (self.shared, self.ask, answer.sent_at);
        let mut entry = self.entry(State::Granted, explicit);
        if place.mark != self.mark {
            entry = entry.of(&self.mark);
        }
        let (lasts, written) = (sent_at + ask.ttl, answer.revision);
        let known = Known { place, written, fence, since: sent_at, lasts, lease: lease.clone(), entry };
        shared.book.write(
            self.mark,
            Hold {
                names: ask.claim.names.clone(),
                ttl: ask.ttl,
                expires: sent_at + ask.ttl,
                known: Some(known),
                caller: None,
                doubted: false,
                looks: 0,
            },
        );
        if fence.get() <= floor {
            // The cluster was put back to an older state. The base is raised, and this grant is not one.
            Box::pin(shared.release_mark(&ask.claim.names, self.mark)).await?;
            Box::pin(shared.refresh_base()).await?;
            self.joined = false;
            return Ok(Step::Again);
        }
        if !shared.cover(lease, sent_at + ask.ttl + ask.lock_delay).await? {
            self.joined = false;
            return Ok(Step::Again);
        }
        shared.note(fence);
        let (claim, mode, ttl) = (ask.claim.clone(), ask.mode, ask.ttl);
        Ok(Step::Granted(Grant { claim, fence, mode, ttl, sent_at, lease: ttl }))
    }
}

/// Whether a try has got its seat. If it is not known, the seat is spoilt.
fn seated(answer: Result<Answer, Failure>, seat: Seat) -> Result<(Answer, Option<Seat>), Failure> {
    match answer {
        Ok(answer) if answer.txn.succeeded => Ok((answer, Some(seat))),
        Err(failure) if failure.may_have_happened() => Err(failure),
        answer => {
            seat.leave();
            Ok((answer?, None))
        }
    }
}
