//! Locks of the standard library after a panic.

use std::sync::{LockResult, PoisonError};

/// Goes on after a thread has panicked while it held the lock.
///
/// The panic is a fault of one task. The renewals and releases of all other tasks use the same state, and have to go on.
pub trait IgnorePoison {
    /// The guard of the lock.
    type Guard;

    /// The guard, also if the lock is poisoned.
    fn ignore_poison(self) -> Self::Guard;
}

impl<G> IgnorePoison for LockResult<G> {
    type Guard = G;

    fn ignore_poison(self) -> G {
        self.unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn a_panic_of_one_holder_leaves_the_mutex_to_the_next() {
        let mutex = Mutex::new(1);
        let panics = catch_unwind(AssertUnwindSafe(|| {
            let mut value = mutex.lock().ignore_poison();
            *value = 2;
            panic!("while it holds the mutex");
        }));
        assert!(panics.is_err() && mutex.is_poisoned());
        assert_eq!(*mutex.lock().ignore_poison(), 2);
    }
}
