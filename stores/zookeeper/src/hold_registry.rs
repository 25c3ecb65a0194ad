//! The registry of what this process holds, and until when. All locks of a process use one session, which does not end
//! when one lock is not renewed. The registry releases such a lock itself; the session is for the death of the
//! process.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper_core::{BootInstant, Fence, IgnorePoison, LockRequest, Names};
use lockkeeper_store_kit::CancelSignal;
use tokio::sync::Notify;

use crate::codec::StoredRequest;
use crate::keys::AttemptHash;
use crate::session::Session;

/// How long a request with an unknown outcome is kept for a caller that retries it.
const KEEP_FOR_RETRY: Duration = Duration::from_secs(5);

/// A hold of this process, or a request that may become one.
#[derive(Clone)]
pub struct OwnHold {
    pub names: Names,
    pub ttl: Duration,
    /// The hold ends at this time unless it is renewed.
    pub expires: BootInstant,
    /// `None`: the outcome of the request is not known.
    pub grant: Option<SessionGrant>,
    /// The call of `acquire` that is still running for it.
    pub caller: Option<Arc<CancelSignal>>,
    /// An earlier request of the same attempt may have left nodes.
    pub outcome_unknown: bool,
}

impl OwnHold {
    /// The nodes that an attempt may have left, and that no caller will come back for.
    pub fn abandoned(names: Names, now: BootInstant) -> Self {
        let (ttl, grant, caller) = (Duration::ZERO, None, None);
        OwnHold { names, ttl, expires: now, grant, caller, outcome_unknown: true }
    }
}

/// A grant, and the session that it depends on.
#[derive(Clone)]
pub struct SessionGrant {
    pub session: Arc<Session>,
    /// The paths of its nodes, one for each name. All have this data version.
    pub paths: Vec<String>,
    pub version: i32,
    pub fence: Fence,
    pub since: BootInstant,
    pub stored: StoredRequest,
    /// Its hold-back nodes exist.
    pub has_hold_back: bool,
    /// Its hold-back nodes may exist: a renewal that creates them is in flight, or got no reply.
    pub writing_hold_back: bool,
}

#[derive(Default)]
pub struct HoldRegistry {
    table: Mutex<HoldTable>,
    changed: Notify,
}

#[derive(Default)]
pub struct HoldTable {
    pub holds: HashMap<AttemptHash, OwnHold>,
    /// Holds that have ended, and whose end the servers have not confirmed.
    pub ending: HashSet<AttemptHash>,
    next: Option<BootInstant>,
}

impl HoldRegistry {
    pub fn table(&self) -> MutexGuard<'_, HoldTable> {
        self.table.lock().ignore_poison()
    }

    /// Registers a grant. A retry that found the grant of an earlier call does not restart its minimum hold. `outcome_unknown` of the
    /// entry before is dropped, other than in etcd: the retry has replaced the request barrier, so a late request of that call fails.
    pub fn insert(&self, hash: AttemptHash, mut hold: OwnHold) {
        let mut table = self.table();
        let before = table.holds.get(&hash).and_then(|before| before.grant.as_ref());
        if let (Some(before), Some(grant)) = (before, &mut hold.grant)
            && before.fence == grant.fence
        {
            grant.since = before.since;
        }
        let sooner = table.next.is_none_or(|next| hold.expires < next);
        table.ending.remove(&hash);
        table.holds.insert(hash, hold);
        if sooner {
            self.changed.notify_one();
        }
    }

    /// Removes what is left of `hold` after `hold.expires`, unless the same attempt has another hold or request by
    /// then.
    pub fn schedule_cleanup(&self, hash: AttemptHash, hold: OwnHold) {
        let mut table = self.table();
        match table.holds.get_mut(&hash) {
            Some(again) => again.outcome_unknown = true,
            None => {
                table.holds.insert(hash, hold);
                self.changed.notify_one();
            }
        }
    }

    /// Removes the holds that have expired. They are *ending* from now on. Also returns when the next one expires.
    pub fn take_due(&self, now: BootInstant) -> (Vec<(AttemptHash, OwnHold)>, Option<BootInstant>) {
        let mut table = self.table();
        let is_due = |(_, hold): &(&AttemptHash, &OwnHold)| hold.expires <= now;
        let due: Vec<AttemptHash> = table.holds.iter().filter(is_due).map(|(hash, _)| *hash).collect();
        let mut taken = Vec::new();
        for hash in due {
            table.ending.insert(hash);
            taken.extend(table.holds.remove(&hash).map(|hold| (hash, hold)));
        }
        table.next = table.holds.values().map(|hold| hold.expires).min();
        (taken, table.next)
    }

    /// Whether it was granted the lock, and neither released nor ended.
    pub fn has_grant(&self, hash: &AttemptHash) -> bool {
        self.table().holds.get(hash).is_some_and(|hold| hold.grant.is_some())
    }

    /// Waits until a hold may expire sooner than [`take_due`](Self::take_due) said.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Makes the task look at the table again.
    pub fn wake(&self) {
        self.changed.notify_one();
    }

    /// Registers a running request. If its future is dropped before the outcome is known, the nodes that it may have
    /// are removed soon, unless the caller retries. `Some`: the attempt is known already, and its hold was to end at
    /// this time.
    pub fn begin(
        &self,
        hash: AttemptHash,
        request: &LockRequest,
        now: BootInstant,
    ) -> (Arc<CancelSignal>, Option<BootInstant>) {
        let caller = Arc::new(CancelSignal::default());
        let mut table = self.table();
        let before = match table.holds.get(&hash) {
            Some(hold) => Some(hold.expires),
            None => table.ending.contains(&hash).then_some(now),
        };
        match table.holds.get_mut(&hash) {
            // A retry of the same request: its lease begins again.
            Some(hold) => {
                hold.caller = Some(caller.clone());
                hold.expires = if hold.grant.is_some() { now + hold.ttl } else { BootInstant::NEVER };
            }
            None => {
                let names = request.key.names.clone();
                let (ttl, expires, grant) = (request.ttl, BootInstant::NEVER, None);
                let hold = OwnHold {
                    names,
                    ttl,
                    expires,
                    grant,
                    caller: Some(caller.clone()),
                    outcome_unknown: false,
                };
                table.holds.insert(hash, hold);
            }
        }
        (caller, before)
    }

    /// Makes a hold end at this time at the latest.
    pub fn expire_by(&self, hash: &AttemptHash, expires: BootInstant) {
        if let Some(hold) = self.table().holds.get_mut(hash).filter(|hold| hold.grant.is_some()) {
            hold.expires = hold.expires.min(expires);
        }
        self.changed.notify_one();
    }

    /// Ends a running request. `left_nothing`: it has no nodes.
    pub fn end(
        &self,
        hash: AttemptHash,
        names: &Names,
        caller: &Arc<CancelSignal>,
        left_nothing: bool,
        now: BootInstant,
    ) {
        let mut table = self.table();
        let Some(hold) = table.holds.get_mut(&hash) else {
            drop(table);
            if !left_nothing {
                // A release came meanwhile, perhaps before the nodes existed.
                self.schedule_cleanup(hash, OwnHold::abandoned(names.clone(), now));
            }
            return;
        };
        match &hold.caller {
            Some(registered) if Arc::ptr_eq(registered, caller) => {}
            // A call of the same attempt has replaced this one, and may have looked for nodes before this one sent
            // its request.
            Some(_) => {
                hold.outcome_unknown |= !left_nothing;
                return;
            }
            None => return,
        }
        hold.caller = None;
        if hold.grant.is_none() {
            if left_nothing && !hold.outcome_unknown {
                table.holds.remove(&hash);
            } else {
                hold.expires = now + hold.ttl.min(KEEP_FOR_RETRY);
                self.changed.notify_one();
            }
        }
    }
}

#[cfg(test)]
mod tests;
