//! What many need and one of them makes: a lease, a connection.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Mutex;

use crate::fault::Failure;

pub struct Turns<T> {
    made: Mutex<(Option<T>, Option<Failure>)>,
    /// How often it could not be made.
    failures: AtomicU64,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Turns { made: Mutex::new((None, None)), failures: AtomicU64::new(0) }
    }
}

impl<T: Clone> Turns<T> {
    /// What is there, if it is `good`, or else what `make` makes. Whoever waits while another one fails is told the same: if each tried
    /// for itself, one after the other, the last would wait for as many timeouts as there are others.
    pub async fn get(
        &self,
        good: impl Fn(&T) -> bool,
        make: impl AsyncFnOnce() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let before = self.failures.load(Ordering::Relaxed);
        let mut made = self.made.lock().await;
        let (there, why) = &mut *made;
        if let Some(there) = there.as_ref().filter(|there| good(there)) {
            return Ok(there.clone());
        }
        if let Some(why) = why.as_ref().filter(|_| before != self.failures.load(Ordering::Relaxed)) {
            return Err(why.clone());
        }
        let done = make().await;
        match &done {
            Ok(new) => *there = Some(new.clone()),
            Err(failure) => {
                *why = Some(failure.clone());
                self.failures.fetch_add(1, Ordering::Relaxed);
            }
        }
        done
    }

    /// Forgets what is there, if it is this, and does `then` before the next one is made.
    pub async fn forget(&self, this: impl Fn(&T) -> bool, then: impl FnOnce()) {
        let mut made = self.made.lock().await;
        if made.0.take_if(|there| this(there)).is_some() {
            then();
        }
    }
}
