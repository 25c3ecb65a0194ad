//! Keys that are used again and again. etcd keeps a deleted key in its index until it compacts, and "is anybody there" walks
//! over all of them: with a key of its own for each ask, a lock that is taken often would get slower and slower. So what is
//! granted at once stands under a seat of this process: the lowest number that is free for its names.
//!
//! A seat is given to the next only if its key is known to be gone, and nothing is on its way that could make it again: only
//! the transaction that grants does that, and it was answered. Where that is not known, no seat of today is used again.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lockkeeper_core::{LockName, Names};
use lockkeeper_host::random_128;

use crate::layout::Mark;

/// All seats of this process. Clones share them.
#[derive(Clone, Default)]
pub struct Seats(Arc<Mutex<Hall>>);

#[derive(Default)]
struct Hall {
    /// What the marks of all seats begin with, until one of them is spoilt. `None`: none was needed since.
    begins: Option<[u8; 12]>,
    taken: HashMap<LockName, BTreeSet<u32>>,
}

/// A seat that is taken. Dropping it spoils all: whoever does not know that its key is gone need not do anything.
pub struct Seat {
    seats: Seats,
    names: Names,
    begins: [u8; 12],
    number: u32,
    left: AtomicBool,
}

impl std::fmt::Debug for Seat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Seat({})", self.number)
    }
}

impl Seats {
    fn hall(&self) -> MutexGuard<'_, Hall> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lowest seat that is free for all of these names.
    pub fn take(&self, names: &Names) -> Seat {
        let mut hall = self.hall();
        let begins = *hall.begins.get_or_insert_with(|| {
            let random = random_128();
            std::array::from_fn(|i| random[i])
        });
        let is_free = |number: &u32| names.iter().all(|name| !hall.has(name, *number));
        let number = (0..u32::MAX).find(is_free).unwrap_or(u32::MAX);
        for name in names {
            hall.taken.entry(name.clone()).or_default().insert(number);
        }
        Seat { seats: self.clone(), names: names.clone(), begins, number, left: AtomicBool::new(false) }
    }
}

impl Hall {
    fn has(&self, name: &LockName, number: u32) -> bool {
        self.taken.get(name).is_some_and(|taken| taken.contains(&number))
    }

    fn free(&mut self, name: &LockName, number: u32) {
        let Some(taken) = self.taken.get_mut(name) else { return };
        taken.remove(&number);
        if taken.is_empty() {
            self.taken.remove(name);
        }
    }
}

impl Seat {
    /// What its keys are called.
    pub fn mark(&self) -> Mark {
        let mut mark = [0; 16];
        mark[..12].copy_from_slice(&self.begins);
        mark[12..].copy_from_slice(&self.number.to_be_bytes());
        mark
    }

    /// Its key is gone, and nothing that could make it is on its way.
    pub fn leave(&self) {
        let mut hall = self.seats.hall();
        let first = !self.left.swap(true, Ordering::Relaxed);
        if first && hall.begins == Some(self.begins) {
            self.names.iter().for_each(|name| hall.free(name, self.number));
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut hall = self.seats.hall();
        if !self.left.load(Ordering::Relaxed) && hall.begins == Some(self.begins) {
            *hall = Hall::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Names {
        Names::new(list.iter().map(|name| LockName::new(name).unwrap())).unwrap()
    }

    #[test]
    fn a_seat_that_was_left_is_the_next_ones() {
        let seats = Seats::default();
        let (a, other) = (seats.take(&names(&["a"])), seats.take(&names(&["b"])));
        let (first, second) = (a.mark(), seats.take(&names(&["a"])));
        assert_eq!(other.mark(), first, "another name has seats of its own");
        assert_ne!(second.mark(), first);
        a.leave();
        let third = seats.take(&names(&["a"]));
        assert_eq!(third.mark(), first);
        a.leave();
        assert_ne!(seats.take(&names(&["a"])).mark(), first, "it is left once, and taken by the third");
    }

    #[test]
    fn a_seat_of_several_names_is_free_for_all_of_them() {
        let seats = Seats::default();
        let a = seats.take(&names(&["a"]));
        let both = seats.take(&names(&["a", "b"]));
        assert_ne!(both.mark(), a.mark());
        let b = seats.take(&names(&["b"]));
        assert_eq!(b.mark(), a.mark());
        [&a, &both, &b].iter().for_each(|seat| seat.leave());
        assert!(seats.hall().taken.is_empty());
    }

    #[test]
    fn where_a_seat_is_spoilt_none_is_used_again() {
        let seats = Seats::default();
        let (a, b) = (seats.take(&names(&["a"])), seats.take(&names(&["b"])));
        let old = [a.mark(), b.mark()];
        drop(a);
        let next = seats.take(&names(&["a"]));
        assert!(!old.contains(&next.mark()));
        // One of before, left or dropped, is nobody's business now.
        b.leave();
        drop(b);
        let more = seats.take(&names(&["a"]));
        assert_ne!(more.mark(), next.mark());
        assert_eq!(more.mark()[..12], next.mark()[..12]);
    }
}
