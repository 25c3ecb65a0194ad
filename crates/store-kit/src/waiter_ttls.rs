//! How long a server is to keep the queue entries of a process that falls silent.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper_core::IgnorePoison;

/// A ttl from here on does not shorten the life of a queue entry.
const NOT_SHORT: Duration = Duration::from_secs(5);

/// The ttls of the waiters of this process.
///
/// A server keeps the queue entries of a silent process for the claim, a setting of the store. A waiter with a shorter ttl wants a dead
/// holder to be followed sooner than that, so a dead waiter with that ttl is not waited for any longer either.
///
/// It has a lock of its own, under which no other lock is taken.
#[derive(Debug, Default)]
pub struct WaiterTtls(Mutex<BTreeMap<Duration, usize>>);

impl WaiterTtls {
    fn open(&self) -> MutexGuard<'_, BTreeMap<Duration, usize>> {
        self.0.lock().ignore_poison()
    }

    /// A waiter joins.
    pub fn add(&self, ttl: Duration) {
        *self.open().entry(ttl).or_default() += 1;
    }

    /// A waiter that was added leaves.
    pub fn remove(&self, ttl: Duration) {
        let mut ttls = self.open();
        if let Some(count) = ttls.get_mut(&ttl) {
            *count -= 1;
            if *count == 0 {
                ttls.remove(&ttl);
            }
        }
    }

    /// How long the entries of this process are to last after its last message: for the claim, or for the shortest ttl of its waiters if
    /// that is a short one. A live process polls twice in that time.
    pub fn entry_life(&self, key: Duration, poll: Duration) -> Duration {
        let shortest = self.open().keys().next().copied();
        match shortest {
            Some(ttl) if ttl < NOT_SHORT => ttl.max(poll * 2).min(key),
            _ => key,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_ttl_counts_if_it_is_short() {
        let (key, poll) = (Duration::from_secs(5), Duration::from_secs(1));
        let ttls = WaiterTtls::default();
        let life = |ttls: &WaiterTtls| ttls.entry_life(key, poll).as_millis();
        assert_eq!(life(&ttls), 5000);
        ttls.add(Duration::from_secs(30));
        assert_eq!(life(&ttls), 5000);
        ttls.add(Duration::from_secs(3));
        ttls.add(Duration::from_secs(3));
        assert_eq!(life(&ttls), 3000);
        ttls.add(Duration::from_millis(100));
        assert_eq!(life(&ttls), 2000, "two polls");
        ttls.remove(Duration::from_millis(100));
        ttls.remove(Duration::from_secs(3));
        assert_eq!(life(&ttls), 3000);
        ttls.remove(Duration::from_secs(3));
        assert_eq!(life(&ttls), 5000);
        ttls.add(Duration::from_secs(10));
        assert_eq!(ttls.entry_life(Duration::from_secs(600), poll), Duration::from_secs(600));
    }
}
