//! The transactions of an ask: to try, to look, to take, and what is written down when it was granted.

use std::sync::Arc;

use lockkeeper_core::{Fence, Grant, LockName, Result};

use crate::acquire::{Asking, PAUSE, Step};
use crate::base::fence_at;
use crate::book::{Hold, Known};
use crate::entry::{Entry, Line, State};
use crate::fault::Failure;
use crate::lane::Answer;
use crate::lease::Lease;
use crate::proto::RequestOp;
use crate::script::{created, empty, get, head, nested, put, tail, txn, unwritten, written};

/// How much of a long line is read at its beginning, where the holders are.
const HEAD: i64 = 32;

impl Asking<'_> {
    fn about(&self) -> Vec<Vec<u8>> {
        self.ask.claim.names.iter().map(|name| self.shared.layout.queue(name)).collect()
    }

    fn key(&self, name: &LockName) -> Vec<u8> {
        self.shared.layout.key(name, &self.mark)
    }

    fn puts(&self, entry: &Entry, lease: i64) -> Vec<RequestOp> {
        let names = self.ask.claim.names.as_slice();
        names.iter().map(|name| put(&self.key(name), entry.under(name, names), lease)).collect()
    }

    fn entry(&self, state: State, fence: Option<Fence>) -> Entry {
        Entry::new(self.ask, state, fence, self.shared.clock.wall())
    }

    /// One transaction: granted if nobody is there; else in line if it may wait; and what the lines are then.
    pub async fn send(&self, lease: &Lease, base: u64) -> Result<Answer, Failure> {
        let shared = self.shared;
        let names = self.ask.claim.names.as_slice();
        let mut look = vec![get(&shared.layout.base())];
        // Of a long line its beginning and its end, with the one before ours.
        let read = |name: &LockName| {
            let prefix = shared.layout.queue(name);
            let limit = if self.all { 0 } else { HEAD };
            [head(&prefix, limit), tail(&prefix, if self.joined { self.created } else { 0 })]
        };
        if self.joined {
            // Each a transaction of its own, so that many names are not too many operations.
            let each = names.iter().map(|name| nested(txn(Vec::new(), read(name).to_vec(), Vec::new())));
            look.extend(each);
            // Read only: it need not stand behind what others of this process want of the name.
            return shared.lane.send(txn(Vec::new(), look, Vec::new()), Vec::new()).await;
        }
        let line = if self.joins { Some(shared.line_lease().await?) } else { None };
        let waiting = self.entry(State::Waiting, None);
        for name in names {
            let read = read(name);
            match &line {
                None => look.push(nested(txn(Vec::new(), read.to_vec(), Vec::new()))),
                Some(line) => {
                    let key = self.key(name);
                    let write = put(&key, waiting.under(name, names), line.id);
                    let join = [vec![write], read.to_vec()].concat();
                    look.push(nested(txn(vec![created(&key, 0)], join, read.to_vec())));
                }
            }
        }
        let mut free = vec![shared.base_stands(base)];
        free.extend(names.iter().map(|name| empty(&shared.layout.queue(name))));
        let grant = self.puts(&self.entry(State::Granted, None), lease.id);
        shared.lane.send(txn(free, grant, look), self.about()).await
    }

    /// Takes what was seen to be free at `revision`, unless anything was written there since. What was deleted since is
    /// nobody's loss but our own: so our own place is looked at, where a foreign client may have moved up behind it.
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
        let mut still = vec![shared.base_stands(base)];
        for (i, line) in lines.iter().enumerate() {
            let prefix = shared.layout.queue(&line.name);
            still.push(unwritten(&prefix, revision));
            if i == 0 || line.all.iter().any(|one| one.is_foreign()) {
                let place = line.mine(&self.mark).map_or(0, |one| one.created);
                still.push(created(&self.key(&line.name), place));
            }
        }
        let grant = self.puts(&self.entry(State::Granted, fence), lease.id);
        let order = txn(still, grant, vec![get(&shared.layout.base())]);
        let answer = match shared.lane.send(order, self.about()).await {
            Err(failure) if failure.lease_is_gone() => {
                shared.check_leases(lease).await?;
                return Ok(Step::Again);
            }
            answer => answer?,
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
        self.granted(lease, &answer, told, floor, fence).await
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
        let at = mine[0].written;
        if mine.iter().all(|one| one.lease == lease.id && one.written == at) {
            let explicit = mine[0].entry.as_ref().and_then(|entry| entry.fence);
            let answer = Answer { revision: at, ..answer.clone() };
            return self.granted(lease, &answer, fence, 0, explicit).await;
        }
        // Granted under a lease that is not ours, or not any more.
        let same = mine.iter().map(|one| written(&one.key, one.written)).collect();
        let order = txn(same, self.puts(&self.entry(State::Granted, Some(fence)), lease.id), Vec::new());
        let answer = self.shared.lane.send(order, self.about()).await?;
        match answer.txn.succeeded {
            true => self.granted(lease, &answer, fence, 0, Some(fence)).await,
            false => Ok(Step::Again),
        }
    }

    /// Writes it down, and makes sure that the lease lasts for as long as the guard will believe.
    pub async fn granted(
        &mut self,
        lease: &Arc<Lease>,
        answer: &Answer,
        fence: Fence,
        floor: u64,
        explicit: Option<Fence>,
    ) -> Result<Step> {
        let (shared, ask, sent_at) = (self.shared, self.ask, answer.sent_at);
        let entry = self.entry(State::Granted, explicit);
        let known = Known { written: answer.revision, fence, since: sent_at, lease: lease.clone(), entry };
        shared.book.write(
            self.mark,
            Hold {
                names: ask.claim.names.clone(),
                ttl: ask.ttl,
                expires: sent_at + ask.ttl,
                known: Some(known),
                caller: None,
            },
        );
        if fence.get() <= floor {
            // The cluster was put back to an older state. The base is raised, and this grant is not one.
            shared.release_mark(&ask.claim.names, self.mark).await?;
            shared.refresh_base().await?;
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
