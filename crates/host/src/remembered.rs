use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many are remembered.
const MOST: usize = 10_000;

/// What was seen lately. Whoever asks must be able to live without it: when there are too many, all are forgotten.
#[derive(Debug)]
pub struct Remembered<T>(Mutex<HashSet<T>>);

impl<T> Default for Remembered<T> {
    fn default() -> Self {
        Remembered(Mutex::default())
    }
}

impl<T: Eq + Hash + Clone> Remembered<T> {
    fn open(&self) -> MutexGuard<'_, HashSet<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether any of these was seen.
    pub fn has<'a>(&self, these: impl IntoIterator<Item = &'a T>) -> bool
    where
        T: 'a,
    {
        let known = self.open();
        these.into_iter().any(|one| known.contains(one))
    }

    /// These were seen.
    pub fn add<'a>(&self, these: impl IntoIterator<Item = &'a T>)
    where
        T: 'a,
    {
        let mut known = self.open();
        if known.len() >= MOST {
            known.clear();
        }
        known.extend(these.into_iter().cloned());
    }

    /// These are no more. Whether any of them was known.
    pub fn remove<'a>(&self, these: impl IntoIterator<Item = &'a T>) -> bool
    where
        T: 'a,
    {
        let mut known = self.open();
        these.into_iter().filter(|one| known.remove(*one)).count() > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_is_known_until_it_is_no_more_or_there_are_too_many() {
        let known = Remembered::default();
        known.add(&[1, 2]);
        assert!(known.has(&[3, 2]) && !known.has(&[3]));
        assert!(known.remove(&[2, 3]) && !known.remove(&[2]));
        let many: Vec<usize> = (10..10 + MOST).collect();
        known.add(&many);
        known.add(&[3]);
        assert!(known.has(&[3]) && !known.has(&[1]) && !known.has(&many));
    }
}
