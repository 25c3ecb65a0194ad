//! Measures from the events of a lock whether its requests spend their time waiting or holding, and says what to do about it.

use std::collections::BTreeMap;
use std::time::Duration;

use lockkeeper::{Event, EventKind, Fence, Holder, LockView, WallTime};
use serde_json::{Value, json};

use crate::duration;
use crate::report::millis;
use crate::text::age;

/// Waiting is the problem if the median wait is this many times as long as the median hold.
const DOMINATES: f64 = 2.0;
/// The lock is handed over slowly if it was free for this part of the time in which requests waited.
const IDLE: f64 = 0.3;
/// Fewer ends than this decide nothing.
const ENOUGH: usize = 3;

/// The events of one lock, seen for a while. All times are by the clock of this process, from the beginning of the look.
#[derive(Debug, Default)]
pub struct ContentionMeter {
    /// Since when each request waits. Negative: since before the look.
    waiting: Vec<(Holder, f64)>,
    held: BTreeMap<Fence, f64>,
    /// The waiters that were there at the beginning, whose events may come late.
    known: Vec<(Holder, WallTime)>,
    waits: Vec<f64>,
    holds: Vec<f64>,
    grants: u32,
    /// How long requests waited for a lock that no process held.
    idle: f64,
    contended: f64,
    last: f64,
    missed: bool,
}

impl ContentionMeter {
    /// Begins with the lock as it is.
    pub fn new(view: Option<&LockView>) -> Self {
        let mut meter = ContentionMeter::default();
        if let Some(view) = view {
            let since = |since: WallTime| -age(since).as_secs_f64();
            meter.waiting = view.queue.iter().map(|w| (w.holder.clone(), since(w.since))).collect();
            meter.known = view.queue.iter().map(|w| (w.holder.clone(), w.since)).collect();
            let held = view.held.iter().filter(|held| !held.lingering);
            meter.held = held.map(|held| (held.fence, since(held.since))).collect();
        }
        meter
    }

    /// An event that arrived `now`.
    pub fn add(&mut self, event: &Event, now: Duration) {
        let now = now.as_secs_f64();
        self.pass(now);
        match (&event.kind, &event.holder) {
            (EventKind::Waiting, Some(holder)) if !self.is_known(holder, event.at) => {
                self.waiting.push((holder.clone(), now));
            }
            (EventKind::Left, Some(holder)) => _ = self.leave(holder),
            (EventKind::Granted { fence }, holder) if !self.held.contains_key(fence) => {
                let since = holder.as_ref().and_then(|holder| self.leave(holder));
                self.waits.push(now - since.unwrap_or(now));
                self.grants += 1;
                self.held.insert(*fence, now);
            }
            (EventKind::Released { fence } | EventKind::Expired { fence }, _) => {
                if let Some(since) = self.held.remove(fence) {
                    self.holds.push(now - since);
                }
            }
            (EventKind::Broken { .. }, _) => {
                let ended = std::mem::take(&mut self.held);
                self.holds.extend(ended.values().map(|since| now - since));
            }
            (EventKind::Missed, _) => self.missed = true,
            _ => {}
        }
    }

    /// Whether the event is about a waiter that was there at the beginning.
    fn is_known(&self, holder: &Holder, at: WallTime) -> bool {
        self.known.iter().any(|(known, since)| known == holder && at <= *since)
    }

    fn leave(&mut self, holder: &Holder) -> Option<f64> {
        let place = self.waiting.iter().position(|(waiting, _)| waiting == holder)?;
        Some(self.waiting.remove(place).1)
    }

    fn pass(&mut self, now: f64) {
        if !self.waiting.is_empty() {
            self.contended += now - self.last;
            if self.held.is_empty() {
                self.idle += now - self.last;
            }
        }
        self.last = now;
    }

    /// Ends the look. A wait and a hold that go on count with the time until now.
    pub fn end(mut self, now: Duration) -> Contention {
        let now = now.as_secs_f64();
        self.pass(now);
        let (ended_waits, ended_holds) = (self.waits.len(), self.holds.len());
        self.waits.extend(self.waiting.iter().map(|(_, since)| now - since));
        self.holds.extend(self.held.values().map(|since| now - since));
        Contention {
            looked: now,
            grants: self.grants,
            is_enough: ended_waits.min(ended_holds) >= ENOUGH,
            idle: if self.contended > 0.0 { self.idle / self.contended } else { 0.0 },
            missed: self.missed,
            waits: Spread::of(self.waits),
            holds: Spread::of(self.holds),
        }
    }
}

/// The middle and the end of some durations, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Spread {
    count: usize,
    median: f64,
    longest: f64,
}

impl Spread {
    fn of(mut all: Vec<f64>) -> Self {
        all.sort_by(f64::total_cmp);
        let (Some(median), Some(longest)) = (all.get(all.len() / 2), all.last()) else {
            return Spread::default();
        };
        Spread { count: all.len(), median: median.max(0.0), longest: longest.max(0.0) }
    }

    fn line(&self, what: &str) -> String {
        let (median, longest) = (seconds(self.median), seconds(self.longest));
        format!("  {what}  median {median}, longest {longest}, of {}", self.count)
    }

    fn json(&self) -> Value {
        let ms = |seconds: f64| millis(Duration::from_secs_f64(seconds));
        json!({ "count": self.count, "median_ms": ms(self.median), "longest_ms": ms(self.longest) })
    }
}

fn seconds(seconds: f64) -> String {
    duration::rough(Duration::from_secs_f64(seconds))
}

/// The measurements of one look.
#[derive(Debug)]
pub struct Contention {
    looked: f64,
    grants: u32,
    is_enough: bool,
    /// The part of the time with waiters in which no process held the lock.
    idle: f64,
    missed: bool,
    waits: Spread,
    holds: Spread,
}

/// Where the time goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TimeGoesTo {
    TooFew,
    HandOver,
    Waiting,
    Holding,
}

impl Contention {
    fn verdict(&self) -> TimeGoesTo {
        if !self.is_enough {
            TimeGoesTo::TooFew
        } else if self.waits.median <= DOMINATES * self.holds.median {
            TimeGoesTo::Holding
        } else if self.idle > IDLE {
            TimeGoesTo::HandOver
        } else {
            TimeGoesTo::Waiting
        }
    }

    /// For people.
    pub fn lines(&self) -> Vec<String> {
        let plural = if self.grants == 1 { "" } else { "s" };
        let mut lines = vec![format!("measured for {}: {} grant{plural}", seconds(self.looked), self.grants)];
        if self.waits.count > 0 {
            lines.push(self.waits.line("wait"));
        }
        if self.holds.count > 0 {
            lines.push(self.holds.line("hold"));
        }
        if self.missed {
            lines.push("  some events were missed".into());
        }
        let times = self.waits.median / self.holds.median.max(1e-6);
        let text = match self.verdict() {
            TimeGoesTo::TooFew => {
                return [
                    lines,
                    vec![
                        "too few grants to say whether waiting or holding is the problem: look for longer"
                            .into(),
                    ],
                ]
                .concat();
            }
            TimeGoesTo::Holding => {
                "waiting does not dominate holding: to be faster, shorten the work under the lock".to_owned()
            }
            TimeGoesTo::Waiting => format!(
                "waiting is the problem: a request waits {times:.0} times as long as a holder holds\n  next: finer names, such as one lock \
                 per order; a shorter hold, with less work under the lock; or partitions, which need no lock per item"
            ),
            TimeGoesTo::HandOver => format!(
                "waiting is the problem, and the lock was free for {:.0} % of that time\n  next: let requests wait in the queue instead of \
                 trying again, use a store that wakes the next waiter sooner, or look for a lock-delay",
                self.idle * 100.0
            ),
        };
        lines.extend(text.lines().map(str::to_owned));
        lines
    }

    /// For programs.
    pub fn json(&self) -> Value {
        let verdict = match self.verdict() {
            TimeGoesTo::TooFew => "too_few",
            TimeGoesTo::Holding => "holding",
            TimeGoesTo::Waiting => "waiting",
            TimeGoesTo::HandOver => "hand_over",
        };
        json!({
            "looked_ms": millis(Duration::from_secs_f64(self.looked)), "grants": self.grants, "wait": self.waits.json(),
            "hold": self.holds.json(), "idle": self.idle, "missed": self.missed, "dominates": verdict,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockkeeper::LockName;

    fn event(kind: EventKind, pid: u32) -> Event {
        let holder = Some(Holder::new("host", pid, None).unwrap());
        Event { at: WallTime::from_micros(1), name: LockName::new("x").unwrap(), kind, holder }
    }

    fn fence(number: u64) -> Fence {
        Fence::new(number).unwrap()
    }

    /// `clients` requests come at once, each holds for `hold` seconds, and the lock is free for `gap` seconds in between.
    fn queue(clients: u32, hold: f64, gap: f64) -> Contention {
        let mut meter = ContentionMeter::new(None);
        (1..=clients).for_each(|pid| meter.add(&event(EventKind::Waiting, pid), Duration::ZERO));
        let mut now = 0.0;
        for pid in 1..=clients {
            let fence = fence(pid.into());
            meter.add(&event(EventKind::Granted { fence }, pid), Duration::from_secs_f64(now));
            now += hold;
            meter.add(&event(EventKind::Released { fence }, pid), Duration::from_secs_f64(now));
            now += gap;
        }
        meter.end(Duration::from_secs_f64(now))
    }

    #[test]
    fn a_crowd_waits_and_a_pair_holds() {
        let crowd = queue(50, 0.5, 0.0);
        assert_eq!((crowd.verdict(), crowd.grants), (TimeGoesTo::Waiting, 50));
        assert_eq!(
            (crowd.waits.longest, crowd.holds.longest),
            (24.5, 0.5),
            "the last of 50 waits for 49 holds"
        );
        assert!(crowd.lines().iter().any(|line| line.contains("finer names")), "{:?}", crowd.lines());
        assert_eq!(queue(4, 0.5, 0.0).verdict(), TimeGoesTo::Holding);
        assert_eq!(queue(50, 0.1, 0.2).verdict(), TimeGoesTo::HandOver);
        assert_eq!(queue(2, 0.5, 0.0).verdict(), TimeGoesTo::TooFew);
    }

    #[test]
    fn unfinished_waits_and_broken_holds_count() {
        let mut meter = ContentionMeter::new(None);
        meter.add(&event(EventKind::Granted { fence: fence(1) }, 1), Duration::ZERO);
        meter.add(&event(EventKind::Waiting, 2), Duration::from_secs(1));
        meter.add(&event(EventKind::Waiting, 3), Duration::from_secs(1));
        meter.add(&event(EventKind::Left, 3), Duration::from_secs(2));
        let broken = EventKind::Broken { fence: fence(2), reason: "test".into() };
        meter.add(&Event { holder: None, ..event(broken, 1) }, Duration::from_secs(4));
        let seen = meter.end(Duration::from_secs(6));
        assert_eq!((seen.waits.count, seen.waits.longest), (2, 5.0), "one at once, one that goes on");
        assert_eq!((seen.holds.count, seen.holds.longest), (1, 4.0));
        assert!((seen.idle - 2.0 / 5.0).abs() < 1e-9, "free for 2 s of the 5 s with a waiter: {}", seen.idle);
    }
}
