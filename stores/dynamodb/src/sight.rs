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

use crate::book::{Hold, Page, Span, Witness};

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
        Sight { now: looker.now, wall: looker.wall, seen }
    }

    /// The page as we know it, which may have changed since.
    pub fn recall(&self, name: &LockName, looker: &Looker<'_>) -> Option<(Page, Sight)> {
        let known = self.known().get(name).filter(|known| !known.doubtful).cloned()?;
        let sight = Sight { now: looker.now, wall: looker.wall, seen: known.seen };
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
        lasts.saturating_sub(age)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::book::Book;

    const TTL: Duration = Duration::from_secs(10);

    fn span(beat: u64) -> Span {
        Span { beat, ms: 10_000, ends_us: 10_000_000 }
    }

    fn page(rev: u64, beat: u64) -> Page {
        let book = Book { delay: Some(span(beat)), ..Book::default() };
        Page { rev: Some(rev), fence: None, book }
    }

    /// Both clocks at this second.
    fn at(second: u64) -> Looker<'static> {
        let nanos = second * 1_000_000_000;
        Looker { now: Moment::from_nanos(nanos), wall: Wall::from_micros(nanos / 1000), boot: "here" }
    }

    fn name() -> LockName {
        LockName::new("x").unwrap()
    }

    #[test]
    fn what_is_seen_counts_from_the_first_look_and_anew_from_each_beat() {
        let eyes = Eyes::default();
        // An hour after it was written, and seen for the first time.
        assert!(eyes.look(&name(), &page(7, 7), &at(3600)).left(&span(7), 0) > TTL);
        assert!(
            !eyes.look(&name(), &page(8, 7), &at(3610)).left(&span(7), 0).is_zero(),
            "the margin is missing"
        );
        assert!(eyes.look(&name(), &page(8, 7), &at(3611)).left(&span(7), 0).is_zero());
        // It has moved: the holder lives.
        assert!(eyes.look(&name(), &page(9, 9), &at(3612)).left(&span(9), 0) > TTL);
        assert!(!eyes.look(&name(), &page(9, 9), &at(3621)).left(&span(9), 0).is_zero());
        // What was seen in between as gone is seen anew.
        eyes.look(&name(), &Page::default(), &at(3622));
        assert!(eyes.look(&name(), &page(9, 9), &at(3640)).left(&span(9), 0) > TTL);
    }

    #[test]
    fn what_may_have_changed_is_not_recalled_but_since_when_it_was_seen_is_kept() {
        let eyes = Eyes::default();
        eyes.look(&name(), &page(7, 7), &at(100));
        assert!(eyes.recall(&name(), &at(101)).is_some());
        eyes.doubt(&name());
        assert!(eyes.recall(&name(), &at(101)).is_none());
        assert!(eyes.look(&name(), &page(8, 7), &at(111)).left(&span(7), 0).is_zero());
    }

    #[test]
    fn processes_of_one_boot_see_for_each_other_if_both_clocks_agree() {
        let mut seen = page(7, 7);
        assert!(at(100).witness(&mut seen));
        assert!(!at(101).witness(&mut seen), "it is no news");
        let fresh = |looker: &Looker<'_>| Eyes::default().look(&name(), &seen, looker).left(&span(7), 0);
        assert!(fresh(&at(111)).is_zero());
        assert!(fresh(&Looker { boot: "elsewhere", ..at(111) }) > TTL);
        // A copy of the machine whose clock runs ahead, and a wall clock that was set forward: one of the two is not enough.
        assert!(fresh(&Looker { wall: Wall::from_micros(101_000_000), ..at(900) }) > Duration::from_secs(8));
        assert!(
            fresh(&Looker { now: Moment::from_nanos(101_000_000_000), ..at(900) }) > Duration::from_secs(8)
        );
        // A beat after the witness was there is not covered.
        let renewed = Page { book: Book { delay: Some(span(9)), ..seen.book.clone() }, ..seen.clone() };
        assert!(Eyes::default().look(&name(), &renewed, &at(111)).left(&span(9), 0) > TTL);
    }

    #[test]
    fn a_witness_of_what_is_silent_outlives_those_of_what_beats() {
        let mut page = page(7, 7);
        for beat in 8..40 {
            at(beat).witness(&mut page);
            // Somebody else beats beside the silent one, from write to write.
            let other = Hold {
                mark: "other".into(),
                owner: None,
                mode: lockkeeper_core::Mode::Shared,
                fence: lockkeeper_core::Fence::MIN,
                span: span(beat),
                lock_delay_ms: 0,
                min_hold_ms: 0,
                since: Wall::default(),
                holder: lockkeeper_core::Holder::new("host", 1, None).unwrap(),
                names: Vec::new(),
                revoked: None,
            };
            page.book.holds = vec![other];
            page.rev = Some(beat);
        }
        assert!(page.book.seen.len() <= 3, "{:?}", page.book.seen);
        let left = Eyes::default().look(&name(), &page, &at(19)).left(&span(7), 0);
        assert!(left.is_zero(), "{left:?}: it is not known since when the silent one is silent");
    }
}
