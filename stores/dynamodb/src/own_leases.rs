//! The leases that this process was granted, on its own clock: a holder knows the end of its lease before an observer does.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper_core::{BootInstant, IgnorePoison};

use crate::codec::StoredHold;
use crate::observation::{HoldPhase, Observation};

/// How many leases are kept before those that ended long ago are removed.
const MAX_LEASES: usize = 10_000;

/// The leases of this process, by the hash of the attempt.
#[derive(Debug, Default)]
pub struct OwnLeases(Mutex<HashMap<String, OwnLease>>);

#[derive(Clone, Copy, Debug)]
struct OwnLease {
    granted: BootInstant,
    sent: BootInstant,
    ttl: Duration,
}

impl OwnLeases {
    fn leases(&self) -> MutexGuard<'_, HashMap<String, OwnLease>> {
        self.0.lock().ignore_poison()
    }

    /// Records a grant or a renewal. The lease counts from `sent`.
    pub fn record(&self, attempt_hash: &str, sent: BootInstant, ttl: Duration) {
        let mut leases = self.leases();
        if leases.len() >= MAX_LEASES {
            // Leases that were never released. A removed lease is judged by observation, like a lease of another process.
            leases.retain(|_, lease| sent < lease.sent + lease.ttl + Duration::from_secs(3600));
        }
        let granted = leases.get(attempt_hash).map_or(sent, |lease| lease.granted);
        leases.insert(attempt_hash.to_owned(), OwnLease { granted, sent, ttl });
    }

    pub fn remove(&self, attempt_hash: &str) {
        self.leases().remove(attempt_hash);
    }

    fn get(&self, attempt_hash: &str) -> Option<OwnLease> {
        self.leases().get(attempt_hash).copied()
    }

    /// Whether a hold has not expired: by our own count if this process was granted it, else by observation.
    pub fn is_active(&self, hold: &StoredHold, observed: &Observation) -> bool {
        match self.get(&hold.attempt_hash) {
            Some(lease) => observed.now < lease.sent + lease.ttl,
            None => matches!(observed.phase(hold), HoldPhase::Held(_)),
        }
    }

    /// For how long the lock has been held. Zero if this process does not know: then the whole min-hold is still to come.
    pub fn held_for(&self, hold: &StoredHold, now: BootInstant) -> Duration {
        self.get(&hold.attempt_hash).map_or(Duration::ZERO, |lease| now.since(lease.granted))
    }
}
