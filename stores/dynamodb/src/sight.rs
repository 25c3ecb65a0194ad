//! What we have seen, and since when. This is what takes the place of a clock of the store's.
//!
//! A hold carries the number of the write that made or renewed it. Whoever sees the same number for a whole ttl, on its own
//! clock, knows that the holder was silent for at least that long: the first look was after the write, and the write was after
//! the holder had sent it, which is where the holder counts from.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::lease::margin;
use lockkeeper_core::{LockName, Moment, Wall};

use crate::book::{Hold, Page, Span, Witness, millis};

/// How many locks are remembered before those that nobody holds are forgotten.
const MANY: usize = 20_000;
/// How many witnesses an item has at most.
const WITNESSES: usize = 8;

/// What we remember of the locks that we looked at. Forgetting is safe: it makes us wait longer.
#[derive(Debug, Default)]
pub struct Eyes(Mutex<HashMap<LockName, Known>>);

#[derive(Clone, Debug, Default)]
struct Known {
    page: Page,
    /// When we first saw each write that is still there.
    seen: HashMap<u64, Moment>,
    /// It may have changed: it must be read again.
    doubtful: bool,
}

/// The page of a lock as somebody sees it at one moment.
#[derive(Clone, Debug)]
pub struct Sight {
    pub now: Moment,
    pub wall: Wall,
    skew: Option<Duration>,
    seen: HashMap<u64, Moment>,
}

/// What is left of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Held(Duration),
    /// It is over, and its lock-delay is not.
    Delayed(Duration),
    Over,
}

/// Who looks, and when.
#[derive(Clone, Debug)]
pub struct Looker<'a> {
    pub now: Moment,
    pub wall: Wall,
    pub skew: Option<Duration>,
    /// Which boot of which machine this is.
    pub boot: &'a str,
}

impl Eyes {
    fn known(&self) -> MutexGuard<'_, HashMap<LockName, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of a page that was there just now.
    pub fn look(&self, name: &LockName, page: &Page, looker: &Looker<'_>) -> Sight {
        let mut known = self.known();
        if known.len() >= MANY {
            known.retain(|_, known| known.page.book.spans().next().is_some());
            if known.len() >= MANY {
                known.clear();
            }
        }
        let old = known.remove(name).unwrap_or_default();
        let first = |span: &Span| {
            let seen = old.seen.get(&span.beat).copied().unwrap_or(looker.now);
            (span.beat, looker.told(&page.book.seen, span.beat).map_or(seen, |told| told.min(seen)))
        };
        let seen: HashMap<u64, Moment> = page.book.spans().map(first).collect();
        known.insert(name.clone(), Known { page: page.clone(), seen: seen.clone(), doubtful: false });
        Sight { now: looker.now, wall: looker.wall, skew: looker.skew, seen }
    }

    /// The page as we know it, which may have changed since.
    pub fn recall(&self, name: &LockName, looker: &Looker<'_>) -> Option<(Page, Sight)> {
        let known = self.known().get(name).filter(|known| !known.doubtful).cloned()?;
        let sight = Sight { now: looker.now, wall: looker.wall, skew: looker.skew, seen: known.seen };
        Some((known.page, sight))
    }

    /// The page may have changed. When we saw what is still there stays.
    pub fn doubt(&self, name: &LockName) {
        if let Some(known) = self.known().get_mut(name) {
            known.doubtful = true;
        }
    }
}

impl Looker<'_> {
    /// Since when a process of this boot is known to have seen a write.
    fn told(&self, seen: &[Witness], beat: u64) -> Option<Moment> {
        let here = seen.iter().filter(|one| one.boot == self.boot && one.rev >= beat);
        let age = |one: &Witness| {
            let ours = self.now.since(Moment::from_nanos(one.at_ns));
            let wall = Duration::from_micros(self.wall.as_micros().saturating_sub(one.at_us));
            ours.min(wall)
        };
        here.map(age).max().map(|age| self.now.before(age))
    }

    /// Notes that we saw this page, for other processes of this boot. Says whether that is news.
    pub fn witness(&self, page: &mut Page) -> bool {
        let book = &mut page.book;
        let beats: Vec<u64> = book.spans().map(|span| span.beat).collect();
        let newest = book.seen.iter().filter(|one| one.boot == self.boot).map(|one| one.rev).max();
        if !beats.iter().any(|beat| newest.is_none_or(|seen| seen < *beat)) {
            return false;
        }
        // Of each boot only those stay that are the first to have seen something that is still there.
        let all = std::mem::take(&mut book.seen);
        let first = |one: &Witness, beat: &u64| {
            let earlier =
                |other: &Witness| other.boot == one.boot && other.rev >= *beat && other.rev < one.rev;
            one.rev >= *beat && !all.iter().any(earlier)
        };
        book.seen = all.iter().filter(|one| beats.iter().any(|beat| first(one, beat))).cloned().collect();
        if book.seen.len() >= WITNESSES {
            book.seen.remove(0);
        }
        book.seen.push(Witness {
            boot: self.boot.to_owned(),
            at_ns: self.now.as_nanos(),
            at_us: self.wall.as_micros(),
            rev: page.rev.unwrap_or_default(),
        });
        true
    }
}

impl Sight {
    /// How much of this is left. The margin is for clocks that run at slightly different rates.
    pub fn left(&self, span: &Span, more_ms: u64) -> Duration {
        let lasts = Duration::from_millis(span.ms.saturating_add(more_ms));
        let lasts = lasts + margin(lasts);
        let age = self.seen.get(&span.beat).map_or(Duration::ZERO, |seen| self.now.since(*seen));
        let left = lasts.saturating_sub(age);
        let Some(skew) = self.skew else { return left };
        let ends = span.ends_us.saturating_add(more_ms * 1000).saturating_add(millis(skew) * 1000);
        left.min(Duration::from_micros(ends.saturating_sub(self.wall.as_micros())))
    }

    pub fn phase(&self, hold: &Hold) -> Phase {
        let (left, delayed) = (self.left(&hold.span, 0), self.left(&hold.span, hold.lock_delay_ms));
        match () {
            () if !left.is_zero() => Phase::Held(left),
            () if hold.lock_delay_ms > 0 && !hold.lingers() && !delayed.is_zero() => Phase::Delayed(delayed),
            () => Phase::Over,
        }
    }
}
