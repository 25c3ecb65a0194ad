//! Key slots: keys that a process reuses. etcd keeps a deleted key in its index until it compacts, and the comparison
//! *no key has this prefix* visits all of them. With a new key for each request, a lock that is often acquired would
//! get slower and slower. So a grant of a free lock uses a slot of this process: the lowest number that is free for
//! all of its names.
//!
//! A slot is reused only if its key is known to be deleted and no transaction in flight can write it again. Only the
//! granting transaction writes it, and that one has a reply. If either is unknown, the whole generation of slots is
//! retired.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lockkeeper_core::{LockName, Names};
use lockkeeper_host::random_128;

use crate::keys::KeyId;

/// All slots of this process. Clones share them.
#[derive(Clone, Default)]
pub struct SlotPool(Arc<Mutex<SlotPoolState>>);

#[derive(Default)]
struct SlotPoolState {
    /// The first bytes of all slots' keys. A new generation is drawn when it is needed after one was retired.
    generation: Option<[u8; 12]>,
    in_use: HashMap<LockName, BTreeSet<u32>>,
}

/// A slot in use. Dropping a slot without releasing it retires the slot's generation, because its key may still exist.
pub struct KeySlot {
    pool: SlotPool,
    names: Names,
    generation: [u8; 12],
    number: u32,
    released: AtomicBool,
}

impl std::fmt::Debug for KeySlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Seat({})", self.number)
    }
}

impl SlotPool {
    fn state(&self) -> MutexGuard<'_, SlotPoolState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lowest slot that is free for all of these names.
    pub fn take(&self, names: &Names) -> KeySlot {
        let mut state = self.state();
        let generation = *state.generation.get_or_insert_with(|| {
            let random = random_128();
            std::array::from_fn(|i| random[i])
        });
        let is_free = |number: &u32| names.iter().all(|name| !state.has(name, *number));
        let number = (0..u32::MAX).find(is_free).unwrap_or(u32::MAX);
        for name in names {
            state.in_use.entry(name.clone()).or_default().insert(number);
        }
        KeySlot {
            pool: self.clone(),
            names: names.clone(),
            generation,
            number,
            released: AtomicBool::new(false),
        }
    }
}

impl SlotPoolState {
    fn has(&self, name: &LockName, number: u32) -> bool {
        self.in_use.get(name).is_some_and(|in_use| in_use.contains(&number))
    }

    fn free(&mut self, name: &LockName, number: u32) {
        let Some(in_use) = self.in_use.get_mut(name) else { return };
        in_use.remove(&number);
        if in_use.is_empty() {
            self.in_use.remove(name);
        }
    }
}

impl KeySlot {
    /// The last part of its keys.
    pub fn key_id(&self) -> KeyId {
        let mut key_id = [0; 16];
        key_id[..12].copy_from_slice(&self.generation);
        key_id[12..].copy_from_slice(&self.number.to_be_bytes());
        key_id
    }

    /// Its key is deleted, and no transaction in flight can write it: the slot may be reused.
    pub fn release(&self) {
        let mut state = self.pool.state();
        let first = !self.released.swap(true, Ordering::Relaxed);
        if first && state.generation == Some(self.generation) {
            self.names.iter().for_each(|name| state.free(name, self.number));
        }
    }
}

impl Drop for KeySlot {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        if !self.released.load(Ordering::Relaxed) && state.generation == Some(self.generation) {
            *state = SlotPoolState::default();
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
    fn a_released_slot_is_reused() {
        let pool = SlotPool::default();
        let (a, other) = (pool.take(&names(&["a"])), pool.take(&names(&["b"])));
        let (first, second) = (a.key_id(), pool.take(&names(&["a"])));
        assert_eq!(other.key_id(), first, "each name has its own slots");
        assert_ne!(second.key_id(), first);
        a.release();
        let third = pool.take(&names(&["a"]));
        assert_eq!(third.key_id(), first);
        a.release();
        assert_ne!(
            pool.take(&names(&["a"])).key_id(),
            first,
            "the third request has taken it, and a second release changes nothing"
        );
    }

    #[test]
    fn a_slot_of_several_names_is_free_for_all_of_them() {
        let pool = SlotPool::default();
        let a = pool.take(&names(&["a"]));
        let both = pool.take(&names(&["a", "b"]));
        assert_ne!(both.key_id(), a.key_id());
        let b = pool.take(&names(&["b"]));
        assert_eq!(b.key_id(), a.key_id());
        [&a, &both, &b].iter().for_each(|slot| slot.release());
        assert!(pool.state().in_use.is_empty());
    }

    #[test]
    fn a_dropped_slot_retires_its_generation() {
        let pool = SlotPool::default();
        let (a, b) = (pool.take(&names(&["a"])), pool.take(&names(&["b"])));
        let old = [a.key_id(), b.key_id()];
        drop(a);
        let next = pool.take(&names(&["a"]));
        assert!(!old.contains(&next.key_id()));
        // Releasing or dropping a slot of a retired generation changes nothing.
        b.release();
        drop(b);
        let more = pool.take(&names(&["a"]));
        assert_ne!(more.key_id(), next.key_id());
        assert_eq!(more.key_id()[..12], next.key_id()[..12]);
    }
}
