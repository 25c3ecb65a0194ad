//! Observations of lock items: since when this process has seen each revision. They take the place of a clock in the table.
//!
//! A hold carries the revision of the write that made or renewed it. An observer that has seen the same revision for a whole
//! ttl, on its own clock, knows that the holder was silent for at least that long: the first observation was after the write,
//! and the write after the moment at which the holder sent it, from which the holder counts its lease.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper_core::lease::margin;
use lockkeeper_core::{BootInstant, IgnorePoison, LockName, WallTime};

use crate::codec::{LockItem, SharedObservation, StoredHold, StoredTimer};

/// How many locks are cached before those without a timer are removed.
const MAX_CACHED: usize = 20_000;
/// How many shared observations an item has at most.
const MAX_SHARED: usize = 8;

/// The items that this process has seen. Removing an entry is safe: the process then waits longer.
#[derive(Debug, Default)]
pub struct ObservationCache(Mutex<HashMap<LockName, CachedItem>>);

#[derive(Clone, Debug, Default)]
struct CachedItem {
    item: LockItem,
    /// When this process first saw the revision of each timer.
    first_seen: HashMap<u64, BootInstant>,
    /// The item may have changed and must be read again.
    stale: bool,
}

/// An item as this process sees it at one moment.
#[derive(Clone, Debug)]
pub struct Observation {
    pub now: BootInstant,
    pub wall: WallTime,
    first_seen: HashMap<u64, BootInstant>,
}

/// The rest of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldPhase {
    Held(Duration),
    /// The lease has expired, and the lock-delay has not.
    LockDelay(Duration),
    Ended,
}

/// The clocks of an observer at one moment.
#[derive(Clone, Debug)]
pub struct ObserverClock<'a> {
    pub now: BootInstant,
    pub wall: WallTime,
    /// The boot of the machine.
    pub boot: &'a str,
}

impl ObservationCache {
    fn items(&self) -> MutexGuard<'_, HashMap<LockName, CachedItem>> {
        self.0.lock().ignore_poison()
    }

    /// Records an item that was read or written just now.
    pub fn record(&self, name: &LockName, item: &LockItem, observer: &ObserverClock<'_>) -> Observation {
        let mut items = self.items();
        if items.len() >= MAX_CACHED {
            items.retain(|_, cached| cached.item.state.timers().next().is_some());
            if items.len() >= MAX_CACHED {
                items.clear();
            }
        }
        let old = items.remove(name).unwrap_or_default();
        let first = |timer: &StoredTimer| {
            let own = old.first_seen.get(&timer.revision).copied().unwrap_or(observer.now);
            let shared = observer.shared_first_seen(&item.state.observations, timer.revision);
            (timer.revision, shared.map_or(own, |shared| shared.min(own)))
        };
        let first_seen: HashMap<u64, BootInstant> = item.state.timers().map(first).collect();
        let cached = CachedItem { item: item.clone(), first_seen: first_seen.clone(), stale: false };
        items.insert(name.clone(), cached);
        Observation { now: observer.now, wall: observer.wall, first_seen }
    }

    /// The item as this process last saw it. Another process may have changed it since.
    pub fn cached(&self, name: &LockName, observer: &ObserverClock<'_>) -> Option<(LockItem, Observation)> {
        let cached = self.items().get(name).filter(|cached| !cached.stale).cloned()?;
        let observed = Observation { now: observer.now, wall: observer.wall, first_seen: cached.first_seen };
        Some((cached.item, observed))
    }

    /// Notes that the item may have changed. The moments at which its revisions were first seen stay.
    pub fn invalidate(&self, name: &LockName) {
        if let Some(cached) = self.items().get_mut(name) {
            cached.stale = true;
        }
    }
}

impl ObserverClock<'_> {
    /// Since when a process of this boot is known to have seen a revision.
    fn shared_first_seen(&self, shared: &[SharedObservation], revision: u64) -> Option<BootInstant> {
        let same_boot = shared.iter().filter(|one| one.boot == self.boot && one.revision >= revision);
        let age = |one: &SharedObservation| {
            let by_boot = self.now.since(BootInstant::from_nanos(one.at_ns));
            let by_wall = Duration::from_micros(self.wall.as_micros().saturating_sub(one.at_us));
            by_boot.min(by_wall)
        };
        same_boot.map(age).max().map(|age| self.now.before(age))
    }

    /// Adds to the item that this process has seen it, for other processes of this boot. Returns whether that adds anything.
    pub fn share(&self, item: &mut LockItem) -> bool {
        let state = &mut item.state;
        let revisions: Vec<u64> = state.timers().map(|timer| timer.revision).collect();
        let same_boot = state.observations.iter().filter(|one| one.boot == self.boot);
        let newest = same_boot.map(|one| one.revision).max();
        if !revisions.iter().any(|revision| newest.is_none_or(|seen| seen < *revision)) {
            return false;
        }
        // For each boot and each running timer the first observation stays.
        let all = std::mem::take(&mut state.observations);
        let first = |one: &SharedObservation, revision: &u64| {
            let earlier = |other: &SharedObservation| {
                other.boot == one.boot && other.revision >= *revision && other.revision < one.revision
            };
            one.revision >= *revision && !all.iter().any(earlier)
        };
        let is_first = |one: &&SharedObservation| revisions.iter().any(|revision| first(one, revision));
        state.observations = all.iter().filter(is_first).cloned().collect();
        if state.observations.len() >= MAX_SHARED {
            state.observations.remove(0);
        }
        state.observations.push(SharedObservation {
            boot: self.boot.to_owned(),
            at_ns: self.now.as_nanos(),
            at_us: self.wall.as_micros(),
            revision: item.revision.unwrap_or_default(),
        });
        true
    }
}

impl Observation {
    /// The rest of a timer, and of `more_ms` after it. The margin is for clocks that run at slightly different rates.
    pub fn remaining(&self, timer: &StoredTimer, more_ms: u64) -> Duration {
        let lasts = Duration::from_millis(timer.ms.saturating_add(more_ms));
        let lasts = lasts + margin(lasts);
        let seen = self.first_seen.get(&timer.revision);
        lasts.saturating_sub(seen.map_or(Duration::ZERO, |seen| self.now.since(*seen)))
    }

    pub fn phase(&self, hold: &StoredHold) -> HoldPhase {
        let lease = self.remaining(&hold.lease, 0);
        let with_delay = self.remaining(&hold.lease, hold.lock_delay_ms);
        match () {
            () if !lease.is_zero() => HoldPhase::Held(lease),
            () if hold.lock_delay_ms > 0 && !hold.is_lingering() && !with_delay.is_zero() => {
                HoldPhase::LockDelay(with_delay)
            }
            () => HoldPhase::Ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::LockState;

    const TTL: Duration = Duration::from_secs(10);

    fn timer(revision: u64) -> StoredTimer {
        StoredTimer { revision, ms: 10_000, ends_us: 10_000_000 }
    }

    fn item(item_revision: u64, revision: u64) -> LockItem {
        let state = LockState { lock_delay: Some(timer(revision)), ..LockState::default() };
        LockItem { revision: Some(item_revision), fence: None, state }
    }

    /// Both clocks at this second.
    fn at(second: u64) -> ObserverClock<'static> {
        let nanos = second * 1_000_000_000;
        ObserverClock {
            now: BootInstant::from_nanos(nanos),
            wall: WallTime::from_micros(nanos / 1000),
            boot: "here",
        }
    }

    fn name() -> LockName {
        LockName::new("x").unwrap()
    }

    #[test]
    fn a_timer_counts_from_the_first_observation_of_its_revision() {
        let observations = ObservationCache::default();
        // Observed for the first time, an hour after the write.
        assert!(observations.record(&name(), &item(7, 7), &at(3600)).remaining(&timer(7), 0) > TTL);
        assert!(
            !observations.record(&name(), &item(8, 7), &at(3610)).remaining(&timer(7), 0).is_zero(),
            "the margin is missing"
        );
        assert!(observations.record(&name(), &item(8, 7), &at(3611)).remaining(&timer(7), 0).is_zero());
        // A new revision: the holder is alive.
        assert!(observations.record(&name(), &item(9, 9), &at(3612)).remaining(&timer(9), 0) > TTL);
        assert!(!observations.record(&name(), &item(9, 9), &at(3621)).remaining(&timer(9), 0).is_zero());
        // The item was absent in between, so the count starts again.
        observations.record(&name(), &LockItem::default(), &at(3622));
        assert!(observations.record(&name(), &item(9, 9), &at(3640)).remaining(&timer(9), 0) > TTL);
    }

    #[test]
    fn an_invalidated_item_is_not_cached_but_its_first_observations_are() {
        let observations = ObservationCache::default();
        observations.record(&name(), &item(7, 7), &at(100));
        assert!(observations.cached(&name(), &at(101)).is_some());
        observations.invalidate(&name());
        assert!(observations.cached(&name(), &at(101)).is_none());
        assert!(observations.record(&name(), &item(8, 7), &at(111)).remaining(&timer(7), 0).is_zero());
    }

    #[test]
    fn processes_of_one_boot_share_observations_if_both_clocks_agree() {
        let mut seen = item(7, 7);
        assert!(at(100).share(&mut seen));
        assert!(!at(101).share(&mut seen), "the second observation adds nothing");
        let fresh = |observer: &ObserverClock<'_>| {
            ObservationCache::default().record(&name(), &seen, observer).remaining(&timer(7), 0)
        };
        assert!(fresh(&at(111)).is_zero());
        assert!(fresh(&ObserverClock { boot: "elsewhere", ..at(111) }) > TTL);
        // A copy of the machine whose boot clock runs ahead, and a wall clock that was set forward: one clock alone does not count.
        assert!(
            fresh(&ObserverClock { wall: WallTime::from_micros(101_000_000), ..at(900) })
                > Duration::from_secs(8)
        );
        assert!(
            fresh(&ObserverClock { now: BootInstant::from_nanos(101_000_000_000), ..at(900) })
                > Duration::from_secs(8)
        );
        // A renewal after the shared observation is not covered by it.
        let renewed = LockItem {
            state: LockState { lock_delay: Some(timer(9)), ..seen.state.clone() },
            ..seen.clone()
        };
        assert!(
            ObservationCache::default().record(&name(), &renewed, &at(111)).remaining(&timer(9), 0) > TTL
        );
    }

    #[test]
    fn the_first_observation_of_a_silent_timer_outlives_those_of_renewed_ones() {
        let mut item = item(7, 7);
        for revision in 8..40 {
            at(revision).share(&mut item);
            // Another holder renews beside the silent timer, from write to write.
            let other = StoredHold {
                attempt_hash: "other".into(),
                owner: None,
                mode: lockkeeper_core::Mode::Shared,
                fence: lockkeeper_core::Fence::MIN,
                lease: timer(revision),
                lock_delay_ms: 0,
                min_hold_ms: 0,
                since: WallTime::default(),
                holder: lockkeeper_core::Holder::new("host", 1, None).unwrap(),
                names: Vec::new(),
                revoked: None,
            };
            item.state.holds = vec![other];
            item.revision = Some(revision);
        }
        assert!(item.state.observations.len() <= 3, "{:?}", item.state.observations);
        let left = ObservationCache::default().record(&name(), &item, &at(19)).remaining(&timer(7), 0);
        assert!(left.is_zero(), "{left:?}: the first observation of the silent timer was dropped");
    }
}
