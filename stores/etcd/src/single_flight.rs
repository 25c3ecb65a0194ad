//! Single flight: many tasks need a value (a lease, a channel), and one of them creates it.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Mutex;

use crate::error::Failure;

pub struct SingleFlight<T> {
    state: Mutex<(Option<T>, Option<Failure>)>,
    /// How often creating it failed.
    failures: AtomicU64,
}

impl<T> Default for SingleFlight<T> {
    fn default() -> Self {
        SingleFlight { state: Mutex::new((None, None)), failures: AtomicU64::new(0) }
    }
}

impl<T: Clone> SingleFlight<T> {
    /// Returns the value if it `is_valid`, or creates one. A task that waits while another one fails gets the same
    /// failure: if each retried after the other, the last would wait for as many timeouts as there are tasks.
    pub async fn get(
        &self,
        is_valid: impl Fn(&T) -> bool,
        create: impl AsyncFnOnce() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let before = self.failures.load(Ordering::Relaxed);
        let mut state = self.state.lock().await;
        let (value, last_failure) = &mut *state;
        if let Some(value) = value.as_ref().filter(|value| is_valid(value)) {
            return Ok(value.clone());
        }
        if let Some(last_failure) =
            last_failure.as_ref().filter(|_| before != self.failures.load(Ordering::Relaxed))
        {
            return Err(last_failure.clone());
        }
        let done = create().await;
        match &done {
            Ok(new) => *value = Some(new.clone()),
            Err(failure) => {
                *last_failure = Some(failure.clone());
                self.failures.fetch_add(1, Ordering::Relaxed);
            }
        }
        done
    }

    /// Forgets the value if it matches, and calls `then` before the next one is created.
    pub async fn forget(&self, this: impl Fn(&T) -> bool, then: impl FnOnce()) {
        let mut state = self.state.lock().await;
        if state.0.take_if(|value| this(value)).is_some() {
            then();
        }
    }
}
