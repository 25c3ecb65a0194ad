//! The holds and requests of this process, with their expiry. All locks with the same lease length share one etcd
//! lease, so etcd does not end a single hold that is not renewed. The process ends it (`unknown.rs`); the etcd lease
//! ends all of them when the process dies.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper_core::{BootInstant, Fence, IgnorePoison, Names};
use lockkeeper_host::Clock;
use lockkeeper_store_kit::CancelSignal;
use tokio::sync::Notify;

use crate::client::EtcdClient;
use crate::codec::EntryValue;
use crate::key_slots::KeySlot;
use crate::keys::KeyId;
use crate::lease::EtcdLease;

/// How long a request with an unknown outcome is kept for a caller that sends it again.
const KEEP_FOR_CALLER: Duration = Duration::from_secs(5);
/// How late a request without a reply is usually applied, at most.
const MAX_DELAY: Duration = Duration::from_secs(10);
/// How often the process looks for such a request: with a timeout of 3 s, for the last time after 22 minutes.
const MAX_RECHECKS: u32 = 4;

/// A hold of this process, or a request that may become one.
#[derive(Clone, Debug)]
pub struct HoldEntry {
    pub names: Names,
    pub ttl: Duration,
    /// When the process ends the hold, unless it is renewed.
    pub expires: BootInstant,
    /// `None`: a request whose outcome is not known.
    pub grant: Option<GrantRecord>,
    /// When the minimum hold ends, on the boot-time clock. `None`: this process did not acquire the hold.
    pub min_hold_until: Option<BootInstant>,
    /// The call that still waits for the outcome.
    pub caller: Option<Arc<CancelSignal>>,
    /// A request had no reply: etcd may have applied it, or may still do so.
    pub outcome_unknown: bool,
    /// How often the process has looked for it after its end.
    pub rechecks: u32,
}

impl HoldEntry {
    /// A request without a grant, as far as this process knows.
    pub fn new(names: &Names, ttl: Duration, expires: BootInstant) -> Self {
        let (grant, min_hold_until, caller) = (None, None, None);
        let names = names.clone();
        HoldEntry { names, ttl, expires, grant, min_hold_until, caller, outcome_unknown: false, rechecks: 0 }
    }
}

/// The facts that this process knows of a grant.
#[derive(Clone, Debug)]
pub struct GrantRecord {
    pub location: KeyLocation,
    /// The revision that wrote its keys.
    pub written: i64,
    pub fence: Fence,
    /// How long its holder may rely on it.
    pub valid_until: BootInstant,
    pub lease: Arc<EtcdLease>,
    pub value: EntryValue,
}

/// Where the keys of a grant are.
#[derive(Clone, Debug)]
pub struct KeyLocation {
    /// The last part of its keys.
    pub key_id: KeyId,
    /// `Some`: a key slot of this process.
    pub slot: Option<Arc<KeySlot>>,
}

impl KeyLocation {
    /// Its keys are gone, so the slot can be reused.
    pub fn release(&self) {
        if let Some(slot) = &self.slot {
            slot.release();
        }
    }
}

impl From<KeyId> for KeyLocation {
    fn from(key_id: KeyId) -> Self {
        KeyLocation { key_id, slot: None }
    }
}

impl From<KeySlot> for KeyLocation {
    fn from(slot: KeySlot) -> Self {
        KeyLocation { key_id: slot.key_id(), slot: Some(Arc::new(slot)) }
    }
}

#[derive(Default)]
pub struct HoldRegistry {
    state: Mutex<RegistryState>,
    changed: Notify,
}

#[derive(Default)]
pub struct RegistryState {
    pub holds: HashMap<KeyId, HoldEntry>,
    /// Holds that have expired, until etcd has confirmed their end.
    pub ending: HashSet<KeyId>,
    next: Option<BootInstant>,
}

impl HoldRegistry {
    pub fn lock(&self) -> MutexGuard<'_, RegistryState> {
        self.state.lock().ignore_poison()
    }

    pub fn insert(&self, attempt: KeyId, mut hold: HoldEntry) {
        let mut state = self.lock();
        if let Some(before) = state.holds.get(&attempt) {
            hold.outcome_unknown |= before.outcome_unknown;
            let fence = |hold: &HoldEntry| hold.grant.as_ref().map(|grant| grant.fence);
            hold.min_hold_until =
                before.min_hold_until.filter(|_| fence(before) == fence(&hold)).or(hold.min_hold_until);
        }
        let sooner = state.next.is_none_or(|next| hold.expires < next);
        state.ending.remove(&attempt);
        state.holds.insert(attempt, hold);
        if sooner {
            self.changed.notify_one();
        }
    }

    /// Registers a request. If its call is dropped before the outcome is known, the process soon releases what it may
    /// have acquired, unless a caller sends it again. [`end`](Self::end) is the counterpart.
    fn begin(&self, attempt: KeyId, names: &Names, ttl: Duration, now: BootInstant) -> Arc<CancelSignal> {
        let caller = Arc::new(CancelSignal::default());
        let mut state = self.lock();
        match state.holds.get_mut(&attempt) {
            // The same request again: renew the lease of its grant.
            Some(hold) => {
                hold.caller = Some(caller.clone());
                hold.expires = if hold.grant.is_some() { now + hold.ttl } else { BootInstant::NEVER };
            }
            None => {
                let hold = HoldEntry::new(names, ttl, BootInstant::NEVER);
                state.holds.insert(attempt, HoldEntry { caller: Some(caller.clone()), ..hold });
            }
        }
        caller
    }

    /// Removes the holds that have expired. They are *ending* from now on. Also returns when the next one expires.
    pub fn take_due(&self, now: BootInstant) -> (Vec<(KeyId, HoldEntry)>, Option<BootInstant>) {
        let mut state = self.lock();
        let is_due = |(_, hold): &(&KeyId, &HoldEntry)| hold.expires <= now;
        let due: Vec<KeyId> = state.holds.iter().filter(is_due).map(|(attempt, _)| *attempt).collect();
        let mut taken = Vec::new();
        for attempt in due {
            state.ending.insert(attempt);
            taken.extend(state.holds.remove(&attempt).map(|hold| (attempt, hold)));
        }
        state.next = state.holds.values().map(|hold| hold.expires).min();
        (taken, state.next)
    }

    /// Waits until a hold may expire sooner than [`take_due`](Self::take_due) said.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Whether a caller waits for it or holds it.
    pub fn is_wanted(&self, attempt: &KeyId) -> bool {
        self.lock().holds.get(attempt).is_some_and(|hold| hold.grant.is_some() || hold.caller.is_some())
    }

    /// Whether it was granted the lock, and neither released nor ended.
    pub fn has_grant(&self, attempt: &KeyId) -> bool {
        self.lock().holds.get(attempt).is_some_and(|hold| hold.grant.is_some())
    }

    /// Whether a call of this process waits for its outcome.
    pub fn has_waiters(&self) -> bool {
        self.lock().holds.values().any(|hold| hold.caller.is_some())
    }

    /// Removes whatever exists of this attempt at `hold.expires`.
    pub fn schedule_cleanup(&self, attempt: KeyId, hold: HoldEntry) {
        let mut state = self.lock();
        match state.holds.get_mut(&attempt) {
            // A caller has sent it again meanwhile.
            Some(hold) => hold.outcome_unknown = true,
            None => {
                state.holds.insert(attempt, HoldEntry { grant: None, caller: None, ..hold });
                self.changed.notify_one();
            }
        }
    }

    /// Schedules another look for a request without a reply. etcd may apply it after its end: TCP delivers what a
    /// closed connection has left to send for minutes. So the process looks for it again, each time later, until that
    /// is practically impossible.
    pub fn schedule_recheck(&self, client: &EtcdClient, attempt: KeyId, hold: HoldEntry) {
        let (rechecks, outcome_unknown) = (hold.rechecks + 1, hold.rechecks + 1 < MAX_RECHECKS);
        let timeout = client.connection.timeout();
        let expires =
            client.clock.now() + (timeout * 2 + MAX_DELAY) * 4u32.pow(hold.rechecks.min(MAX_RECHECKS));
        self.lock().ending.remove(&attempt);
        self.schedule_cleanup(attempt, HoldEntry { outcome_unknown, expires, rechecks, ..hold });
    }

    /// Ends a call. A call that got nothing proves nothing if an earlier call of the same attempt had no reply.
    fn end(&self, request: &EndedCall<'_>, now: BootInstant) {
        let EndedCall { attempt, names, ttl, caller, got_nothing } = *request;
        let mut state = self.lock();
        let Some(hold) = state.holds.get_mut(&attempt) else {
            drop(state);
            if !got_nothing {
                // Another call released it meanwhile, perhaps before the grant existed.
                let hold = HoldEntry { outcome_unknown: true, ..HoldEntry::new(names, ttl, now) };
                self.schedule_cleanup(attempt, hold);
            }
            return;
        };
        match &hold.caller {
            Some(registered) if Arc::ptr_eq(registered, caller) => {}
            // A call of the same attempt has replaced this one, and may have looked for keys before this one sent them.
            Some(_) => {
                hold.outcome_unknown |= !got_nothing;
                return;
            }
            None => return,
        }
        hold.caller = None;
        if hold.grant.is_none() {
            if got_nothing && !hold.outcome_unknown {
                state.holds.remove(&attempt);
            } else {
                (hold.expires, hold.outcome_unknown) = (now + hold.ttl.min(KEEP_FOR_CALLER), true);
                self.changed.notify_one();
            }
        }
    }
}

/// The report of a call of `acquire` to the registry at its end.
struct EndedCall<'a> {
    attempt: KeyId,
    names: &'a Names,
    ttl: Duration,
    caller: &'a Arc<CancelSignal>,
    got_nothing: bool,
}

/// A request in progress. Dropping this ends its registration, also when the caller drops the acquire call.
pub struct RequestGuard<'a> {
    registry: &'a HoldRegistry,
    clock: &'a dyn Clock,
    attempt: KeyId,
    names: &'a Names,
    ttl: Duration,
    pub caller: Arc<CancelSignal>,
    /// The call got no grant and no queue entry.
    pub got_nothing: bool,
}

impl<'a> RequestGuard<'a> {
    pub fn new(
        registry: &'a HoldRegistry,
        clock: &'a dyn Clock,
        attempt: KeyId,
        names: &'a Names,
        ttl: Duration,
    ) -> Self {
        let caller = registry.begin(attempt, names, ttl, clock.now());
        RequestGuard { registry, clock, attempt, names, ttl, caller, got_nothing: false }
    }

    /// Undoes the renewal of an existing grant by this call.
    pub fn restore_expiry(&self) {
        let mut state = self.registry.lock();
        if let Some(hold) = state.holds.get_mut(&self.attempt) {
            hold.expires = hold.grant.as_ref().map_or(hold.expires, |grant| grant.valid_until);
        }
        self.registry.changed.notify_one();
    }
}

impl Drop for RequestGuard<'_> {
    fn drop(&mut self) {
        let RequestGuard { registry, clock, attempt, names, ttl, ref caller, got_nothing } = *self;
        registry.end(&EndedCall { attempt, names, ttl, caller, got_nothing }, clock.now());
    }
}

#[cfg(test)]
mod tests;
