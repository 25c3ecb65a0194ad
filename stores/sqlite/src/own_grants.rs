//! The grants of this open store that no caller has released.

use std::collections::HashMap;
use std::sync::Mutex;

use lockkeeper_core::{Attempt, BootInstant, IgnorePoison};

/// Each attempt with the end of its lease, as far as this store knows it.
#[derive(Debug, Default)]
pub(crate) struct OwnGrants(Mutex<HashMap<Attempt, BootInstant>>);

impl OwnGrants {
    /// Adds a grant, before its caller learns of it.
    pub fn add(&self, attempt: Attempt, expires: BootInstant) {
        self.0.lock().ignore_poison().insert(attempt, expires);
    }

    /// The lease of a grant begins again.
    pub fn renew(&self, attempt: &Attempt, expires: BootInstant) {
        if let Some(known) = self.0.lock().ignore_poison().get_mut(attempt) {
            *known = expires;
        }
    }

    /// Removes a grant that is released or lost.
    pub fn remove(&self, attempt: &Attempt) {
        self.0.lock().ignore_poison().remove(attempt);
    }

    /// Whether a grant was neither released nor lost. Its lease may be over.
    pub fn has(&self, attempt: &Attempt) -> bool {
        self.0.lock().ignore_poison().contains_key(attempt)
    }

    /// Whether the store holds a lock for another attempt than this one.
    pub fn has_others(&self, attempt: &Attempt, now: BootInstant) -> bool {
        let mut grants = self.0.lock().ignore_poison();
        loop {
            let Some((other, expires)) = grants.iter().find(|(other, _)| *other != attempt) else {
                return false;
            };
            if *expires > now {
                return true;
            }
            let other = *other;
            grants.remove(&other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_leases_that_last_count_as_other_locks() {
        let grants = OwnGrants::default();
        let [mine, other] = [1, 2].map(|byte| Attempt::from_bytes([byte; 16]));
        let at = BootInstant::from_nanos;
        assert!(!grants.has_others(&mine, at(0)));
        grants.add(mine, at(10));
        assert!(!grants.has_others(&mine, at(0)) && grants.has_others(&other, at(0)));
        grants.add(other, at(10));
        grants.renew(&other, at(20));
        assert!(grants.has_others(&mine, at(10)));
        assert!(!grants.has_others(&mine, at(20)), "its lease is over");
        assert!(grants.has(&mine) && !grants.has(&other));
        grants.remove(&mine);
        grants.renew(&mine, at(30));
        assert!(!grants.has(&mine), "a late renewal brings no released grant back");
    }
}
