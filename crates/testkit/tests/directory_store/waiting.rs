//! The requests of this process that poll, so that a release can withdraw one.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lockkeeper_core::Attempt;

/// Which attempts poll, each with the number of the call that does.
#[derive(Default)]
pub struct PollingRequests(Mutex<(u64, HashMap<Attempt, u64>)>);

/// One call that polls. Dropping it, which a cancelled caller does, takes the call off the list.
pub struct PollingCall<'a> {
    requests: &'a PollingRequests,
    attempt: Attempt,
    number: u64,
}

impl PollingRequests {
    fn lock(&self) -> MutexGuard<'_, (u64, HashMap<Attempt, u64>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a call; it takes the place of an earlier call with the same attempt.
    pub fn add(&self, attempt: Attempt) -> PollingCall<'_> {
        let mut state = self.lock();
        state.0 += 1;
        let number = state.0;
        state.1.insert(attempt, number);
        PollingCall { requests: self, attempt, number }
    }

    /// Withdraws the call of this attempt; false if none polls.
    pub fn withdraw(&self, attempt: &Attempt) -> bool {
        self.lock().1.remove(attempt).is_some()
    }
}

impl PollingCall<'_> {
    /// Whether the call may still be granted.
    pub fn is_wanted(&self) -> bool {
        self.requests.lock().1.get(&self.attempt) == Some(&self.number)
    }
}

impl Drop for PollingCall<'_> {
    fn drop(&mut self) {
        // In one step: a later call with the same attempt keeps its entry.
        let mut state = self.requests.lock();
        if state.1.get(&self.attempt) == Some(&self.number) {
            state.1.remove(&self.attempt);
        }
    }
}
