//! Deadlock detection across processes: reads from the file which request waits for which holder, and refuses a request
//! that would wait for ever.

use std::collections::{BTreeMap, HashMap};

use lockkeeper_core::admission::{ActiveHold, refuse_self_wait};
use lockkeeper_core::deadlock::{QueuedRequest, find_cycle};
use lockkeeper_core::{Error, LockName, LockRequest, Owner, Result};
use rusqlite::params;

use crate::codec::{QueueTicket, StoredHold, StoredWaiter};
use crate::statements;
use crate::transaction::Tx;
use crate::wake_pipe::PeerState;

/// All holds and requests that a request waits for, directly or indirectly. Names are numbers here.
#[derive(Default)]
struct DeadlockScan {
    names: Vec<LockName>,
    numbers: HashMap<LockName, usize>,
    held: HashMap<usize, Vec<ActiveHold>>,
    queue: BTreeMap<QueueTicket, LockRequest>,
    waits: HashMap<Owner, Vec<StoredWaiter>>,
    open: Vec<StoredWaiter>,
}

impl Tx<'_> {
    /// Refuses a request with an owner that would wait for ever at the end of its queues.
    pub fn refuse_deadlock(&mut self, owner: Owner, request: &LockRequest) -> Result<()> {
        let mut scan = DeadlockScan::default();
        let waits = self.waits_of(&mut scan, owner)?;
        refuse_self_wait(waits.iter().map(|waiter| &waiter.request), request)?;
        let holds = self.one(statements::OWNER_HOLDS, [owner.as_bytes()], |row| row.get::<_, bool>(0))?;
        // An owner that holds nothing and waits for nothing blocks no other request. This is the usual case.
        if waits.is_empty() && holds != Some(true) {
            return Ok(());
        }
        self.add_blockers(&mut scan, owner, request, QueueTicket::MAX)?;
        while let Some(waiter) = scan.open.pop() {
            if scan.queue.insert(waiter.ticket, waiter.request.clone()).is_none() {
                if let Some(owner) = waiter.request.owner {
                    let more = self.waits_of(&mut scan, owner)?;
                    scan.open.extend(more);
                }
                self.add_blockers(&mut scan, owner, &waiter.request, waiter.ticket)?;
            }
        }
        match scan.find_cycle(request) {
            Some(names) => Err(Error::Deadlock(names)),
            None => Ok(()),
        }
    }

    /// Adds what a request with this ticket waits for: the holders of its names, and the waiter just ahead in each queue.
    /// The search continues from there.
    fn add_blockers(
        &mut self,
        scan: &mut DeadlockScan,
        owner: Owner,
        request: &LockRequest,
        ticket: QueueTicket,
    ) -> Result<()> {
        self.remove_dead_holders(&request.key.names)?;
        for name in &request.key.names {
            let mut ahead =
                self.all(statements::AHEAD, params![name.as_str(), ticket], |row| row.get(0))?.into_iter();
            let ahead = ahead.find_map(|ticket| self.present(ticket).transpose()).transpose()?;
            scan.open.extend(ahead);
            let number = scan.number(name);
            if scan.held.contains_key(&number) {
                continue;
            }
            let mut holds = Vec::new();
            for hold in self.live(name)?.iter().map(StoredHold::active_hold) {
                let Some(who) = hold.owner else { continue };
                let waits = self.waits_of(scan, who)?;
                if who == owner || !waits.is_empty() {
                    holds.push(hold);
                    scan.open.extend(waits);
                }
            }
            scan.held.insert(number, holds);
        }
        Ok(())
    }

    /// The waiting requests of an owner.
    fn waits_of(&mut self, scan: &mut DeadlockScan, owner: Owner) -> Result<Vec<StoredWaiter>> {
        if let Some(known) = scan.waits.get(&owner) {
            return Ok(known.clone());
        }
        let mut waits = self.all(statements::WAITERS_OF_OWNER, [owner.as_bytes()], StoredWaiter::read)?;
        waits.retain(|waiter| self.peer_state(&waiter.peer) != PeerState::Gone);
        scan.waits.insert(owner, waits.clone());
        Ok(waits)
    }

    /// A waiting request whose store is not gone.
    fn present(&mut self, ticket: QueueTicket) -> Result<Option<StoredWaiter>> {
        let waiter = self.entry(ticket)?;
        Ok(waiter.filter(|waiter| self.peer_state(&waiter.peer) != PeerState::Gone))
    }
}

impl DeadlockScan {
    fn number(&mut self, name: &LockName) -> usize {
        *self.numbers.entry(name.clone()).or_insert_with(|| {
            self.names.push(name.clone());
            self.names.len() - 1
        })
    }

    fn find_cycle(mut self, request: &LockRequest) -> Option<Vec<LockName>> {
        let requests: Vec<LockRequest> =
            std::mem::take(&mut self.queue).into_values().chain([request.clone()]).collect();
        let mut want = |request: &LockRequest| QueuedRequest {
            owner: request.owner,
            mode: request.mode,
            names: request.key.names.iter().map(|name| self.number(name)).collect(),
        };
        let queue = requests.iter().map(&mut want).collect();
        let names = find_cycle(self.held, queue)?;
        Some(names.into_iter().map(|number| self.names[number].clone()).collect())
    }
}
