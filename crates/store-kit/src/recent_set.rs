//! A bounded set of recently seen values, for hints that may be forgotten.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard};

use lockkeeper_core::IgnorePoison;

/// The most values in the set.
const MOST: usize = 10_000;

/// A set of recently seen values. Callers must be correct without it: a full set is emptied.
#[derive(Debug)]
pub struct RecentSet<T>(Mutex<HashSet<T>>);

impl<T> Default for RecentSet<T> {
    fn default() -> Self {
        RecentSet(Mutex::default())
    }
}

impl<T: Eq + Hash + Clone> RecentSet<T> {
    fn lock(&self) -> MutexGuard<'_, HashSet<T>> {
        self.0.lock().ignore_poison()
    }

    /// Whether the set contains any of these values.
    pub fn has<'a>(&self, these: impl IntoIterator<Item = &'a T>) -> bool
    where
        T: 'a,
    {
        let known = self.lock();
        these.into_iter().any(|one| known.contains(one))
    }

    /// Adds these values.
    pub fn add<'a>(&self, these: impl IntoIterator<Item = &'a T>)
    where
        T: 'a,
    {
        let mut known = self.lock();
        if known.len() >= MOST {
            known.clear();
        }
        known.extend(these.into_iter().cloned());
    }

    /// Removes these values. Returns whether the set contained any of them.
    pub fn remove<'a>(&self, these: impl IntoIterator<Item = &'a T>) -> bool
    where
        T: 'a,
    {
        let mut known = self.lock();
        these.into_iter().filter(|one| known.remove(*one)).count() > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_known_until_it_is_removed_or_the_set_is_full() {
        let known = RecentSet::default();
        known.add(&[1, 2]);
        assert!(known.has(&[3, 2]) && !known.has(&[3]));
        assert!(known.remove(&[2, 3]) && !known.remove(&[2]));
        let many: Vec<usize> = (10..10 + MOST).collect();
        known.add(&many);
        known.add(&[3]);
        assert!(known.has(&[3]) && !known.has(&[1]) && !known.has(&many));
    }
}
