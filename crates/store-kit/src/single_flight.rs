//! Single flight: many tasks need a value (a session, a lease, a channel), and one of them creates it.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Mutex;

/// A value that is created when it is needed, by one task at a time.
#[derive(Debug)]
pub struct SingleFlight<T, F> {
    state: Mutex<(Option<T>, Option<F>)>,
    /// How often creating it failed.
    failures: AtomicU64,
}

impl<T, F> Default for SingleFlight<T, F> {
    fn default() -> Self {
        SingleFlight { state: Mutex::new((None, None)), failures: AtomicU64::new(0) }
    }
}

impl<T: Clone, F: Clone> SingleFlight<T, F> {
    /// Returns the value if it `is_valid`, or creates one. A task that waits while another one fails gets the same failure: if each
    /// retried after the other, the last would wait for as many timeouts as there are tasks.
    ///
    /// # Errors
    /// The failure of `create`.
    pub async fn get(
        &self,
        is_valid: impl Fn(&T) -> bool,
        create: impl AsyncFnOnce() -> Result<T, F>,
    ) -> Result<T, F> {
        let before = self.failures.load(Ordering::Relaxed);
        let mut state = self.state.lock().await;
        let (value, last_failure) = &mut *state;
        if let Some(value) = value.as_ref().filter(|value| is_valid(value)) {
            return Ok(value.clone());
        }
        let has_failed = before != self.failures.load(Ordering::Relaxed);
        if let Some(failure) = last_failure.as_ref().filter(|_| has_failed) {
            return Err(failure.clone());
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

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::join_all;

    #[tokio::test]
    async fn tasks_that_wait_share_one_failure_and_a_later_one_tries_again() {
        let (flight, tries) = (SingleFlight::<u32, &str>::default(), AtomicU64::new(0));
        let get = async |result: Result<u32, &'static str>| {
            let create = async || {
                tries.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
                result
            };
            flight.get(|_| true, create).await
        };
        assert_eq!(join_all((0..5).map(|_| get(Err("away")))).await, [Err("away"); 5]);
        assert_eq!(tries.load(Ordering::Relaxed), 1);
        assert_eq!(join_all((0..5).map(|_| get(Ok(7)))).await, [Ok(7); 5]);
        assert_eq!(tries.load(Ordering::Relaxed), 2);
        flight.forget(|value| *value == 8, || panic!("another value")).await;
        flight.forget(|value| *value == 7, || ()).await;
        assert_eq!(get(Ok(9)).await, Ok(9));
    }
}
