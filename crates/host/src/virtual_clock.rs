//! A clock that a test advances.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockkeeper_core::{BootInstant, IgnorePoison, WallTime};

use crate::clock::{Clock, Timer};

/// A clock that stands still until a test advances it: time for tests.
#[derive(Clone)]
pub struct VirtualClock(Arc<Mutex<ClockState>>);

struct ClockState {
    now: BootInstant,
    wall: WallTime,
    calls: BTreeMap<(BootInstant, u64), Box<dyn FnOnce() + Send>>,
    count: u64,
}

impl Default for VirtualClock {
    fn default() -> Self {
        VirtualClock(Arc::new(Mutex::new(ClockState {
            now: BootInstant::from_nanos(86_400_000_000_000),
            wall: WallTime::from_micros(1_000_000_000_000_000),
            calls: BTreeMap::new(),
            count: 0,
        })))
    }
}

impl fmt::Debug for VirtualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtualClock({:?})", self.now())
    }
}

impl VirtualClock {
    fn hands(&self) -> std::sync::MutexGuard<'_, ClockState> {
        self.0.lock().ignore_poison()
    }

    /// Goes on to the next call that is due within `limit` from now, makes every call due then, and stands still
    /// again. Without one it goes on to the limit. Returns how much of the limit is left.
    pub fn step(&self, limit: Duration) -> Duration {
        let target = self.now() + limit;
        let at = self.hands().calls.first_key_value().map_or(target, |((at, _), _)| (*at).min(target));
        self.jump(at.since(self.now()));
        target.since(at)
    }

    /// Goes on by `by` in one leap, and makes every call that came due on the way only then: what a process sees that
    /// was stopped for that long.
    pub fn jump(&self, by: Duration) {
        let at = self.now() + by;
        self.turn_to(at);
        loop {
            let mut hands = self.hands();
            let due = hands.calls.first_entry().filter(|entry| entry.key().0 <= at);
            let Some(call) = due.map(|entry| entry.remove()) else { break };
            drop(hands);
            call();
        }
    }

    /// Goes on by `by`, making every call on the way at its own moment. Work that a call starts elsewhere, on another
    /// thread, may come to its turn only afterwards.
    pub fn advance(&self, by: Duration) {
        let mut left = by;
        while !left.is_zero() {
            left = self.step(left);
        }
    }

    fn turn_to(&self, at: BootInstant) {
        let mut hands = self.hands();
        let by = at.since(hands.now);
        hands.now = hands.now.max(at);
        hands.wall = WallTime::from_micros(hands.wall.as_micros() + by.as_micros() as u64);
    }

    /// Sets the wall clock, as an administrator might; the boot-time clock does not care.
    pub fn set_wall(&self, wall: WallTime) {
        self.hands().wall = wall;
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> BootInstant {
        self.hands().now
    }

    fn wall(&self) -> WallTime {
        self.hands().wall
    }

    fn start(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn call_at(&self, at: BootInstant, then: Box<dyn FnOnce() + Send>) -> Timer {
        let mut hands = self.hands();
        hands.count += 1;
        let key = (at, hands.count);
        hands.calls.insert(key, then);
        drop(hands);
        let clock = self.clone();
        Timer::new(move || {
            let call = clock.hands().calls.remove(&key);
            drop(call);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes_only_when_told_and_calls_see_their_own_moment() {
        let clock = VirtualClock::default();
        let start = clock.now();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let timers: Vec<_> = [30, 10, 20]
            .map(|s| {
                let (clock2, seen) = (clock.clone(), seen.clone());
                let then = move || seen.lock().unwrap().push(clock2.now().since(start).as_secs());
                clock.call_at(start + Duration::from_secs(s), Box::new(then))
            })
            .into_iter()
            .collect();
        clock.advance(Duration::from_secs(25));
        assert_eq!(*seen.lock().unwrap(), [10, 20]);
        drop(timers);
        clock.advance(Duration::from_secs(25));
        assert_eq!(*seen.lock().unwrap(), [10, 20]);
    }
}
