//! Key slots: keys that a process reuses. etcd keeps a deleted key in its index until it compacts, and the comparison
//! *no key has this prefix* visits all of them. With a new key for each request, a lock that is often acquired would
//! get slower and slower. So a grant of a free lock uses a slot of this process: a number that is free for all of its
//! names, the lowest one that was used before.
//!
//! A slot is reused only if its key is known to be deleted and no transaction in flight can write it again. Only the
//! granting transaction writes it, and that one has a reply. If either is unknown, the whole generation of slots is
//! retired.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use lockkeeper_core::{IgnorePoison, LockName, Names};
use lockkeeper_host::random_128;

use crate::keys::KeyId;

/// All slots of this process. Clones share them.
#[derive(Clone, Default)]
pub struct SlotPool(Arc<Mutex<SlotPoolState>>);

#[derive(Default)]
struct SlotPoolState {
    /// The first bytes of all slots' keys. A new generation is drawn when it is needed after one was retired.
    generation: Option<[u8; 12]>,
    in_use: HashMap<LockName, NameSlots>,
}

/// The numbers from here on belong to requests for several names. They look for a number that is free for all of their names, and the others take
/// the next one of their name.
const OF_SEVERAL: u32 = 1 << 31;

/// The slots of one name.
#[derive(Default)]
struct NameSlots {
    /// No number from here up to [`OF_SEVERAL`] is in use.
    next: u32,
    /// The numbers below `next` that are free.
    released: BTreeSet<u32>,
    /// The numbers from [`OF_SEVERAL`] on that are in use.
    of_several: BTreeSet<u32>,
}

impl NameSlots {
    fn take(&mut self) -> u32 {
        self.released.pop_first().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }

    fn free(&mut self, number: u32) {
        if number < OF_SEVERAL {
            self.released.insert(number);
        } else {
            self.of_several.remove(&number);
        }
    }

    fn is_unused(&self) -> bool {
        self.released.len() == self.next as usize && self.of_several.is_empty()
    }
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
        write!(f, "KeySlot({})", self.number)
    }
}

impl SlotPool {
    fn state(&self) -> MutexGuard<'_, SlotPoolState> {
        self.0.lock().ignore_poison()
    }

    /// Takes a slot that is free for all of these names, one that was used before if there is one.
    pub fn take(&self, names: &Names) -> KeySlot {
        let mut state = self.state();
        let generation = *state.generation.get_or_insert_with(|| {
            let random = random_128();
            std::array::from_fn(|i| random[i])
        });
        let number = match names.as_slice() {
            [name] => state.in_use.entry(name.clone()).or_default().take(),
            names => state.take_of_several(names),
        };
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
    fn take_of_several(&mut self, names: &[LockName]) -> u32 {
        let is_used = |number| {
            names
                .iter()
                .filter_map(|name| self.in_use.get(name))
                .any(|slots| slots.of_several.contains(&number))
        };
        let number = (OF_SEVERAL..u32::MAX).find(|number| !is_used(*number)).unwrap_or(u32::MAX);
        for name in names {
            self.in_use.entry(name.clone()).or_default().of_several.insert(number);
        }
        number
    }

    fn free(&mut self, name: &LockName, number: u32) {
        let Some(slots) = self.in_use.get_mut(name) else { return };
        slots.free(number);
        if slots.is_unused() {
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
    fn a_slot_of_several_names_takes_none_that_another_of_them_has() {
        let pool = SlotPool::default();
        let sets: [&[&str]; 5] = [&["a", "b"], &["b", "c"], &["a", "c"], &["a", "b"], &["c", "d"]];
        let taken: Vec<_> = sets.iter().map(|set| (set, pool.take(&names(set)))).collect();
        for (i, (set, slot)) in taken.iter().enumerate() {
            for (other, also) in &taken[..i] {
                let common = set.iter().any(|name| other.contains(name));
                assert!(!common || slot.key_id() != also.key_id(), "{set:?} {other:?}");
            }
        }
    }

    #[test]
    fn the_slots_of_many_holders_are_reused_lowest_first() {
        let pool = SlotPool::default();
        let many: Vec<_> = (0..1000).map(|_| pool.take(&names(&["a"]))).collect();
        let ids: BTreeSet<_> = many.iter().map(KeySlot::key_id).collect();
        assert_eq!(ids.len(), 1000);
        many[700].release();
        many[300].release();
        let again = [pool.take(&names(&["a"])), pool.take(&names(&["a"]))];
        assert_eq!(again.each_ref().map(KeySlot::key_id), [many[300].key_id(), many[700].key_id()]);
        assert!(!ids.contains(&pool.take(&names(&["a"])).key_id()));
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
