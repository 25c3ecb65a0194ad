//! C1: no two grants that exclude each other overlap.

use std::collections::{BTreeMap, BTreeSet};

use lockkeeper_core::Mode;

use super::holds::{HeldInterval, holds};
use super::{History, Rule, Violation};

/// C1: no two holders believe to hold at once what only one may hold; no more than n hold one of n permits.
///
/// A hold lasts from its good answer to its release, its deadline or the news of its loss, whichever comes first. An
/// ask without a good answer was never believed to be held.
pub fn exclusion(history: &History) -> Vec<Violation> {
    holds(history).into_values().flat_map(|holds| Sweep::new(&holds).run()).collect()
}

/// Goes through the holds of one lock in the order of time.
struct Sweep<'a> {
    holds: &'a [HeldInterval<'a>],
    exclusive: BTreeSet<usize>,
    shared: BTreeSet<usize>,
    permits: BTreeSet<usize>,
    /// Holds per permit: the re-entrant holds of an owner are one.
    taken: BTreeMap<(Option<&'a str>, usize), usize>,
    /// The numbers that the present holders of permits named.
    limits: BTreeMap<u32, usize>,
}

impl<'a> Sweep<'a> {
    fn new(holds: &'a [HeldInterval<'a>]) -> Self {
        Sweep {
            holds,
            exclusive: BTreeSet::new(),
            shared: BTreeSet::new(),
            permits: BTreeSet::new(),
            taken: BTreeMap::new(),
            limits: BTreeMap::new(),
        }
    }

    fn run(mut self) -> Vec<Violation> {
        let lasting = self.holds.iter().enumerate().filter(|(_, hold)| hold.from() < hold.until());
        // At one moment the ends come first: the next holder may begin right then.
        let mut turns: Vec<(u64, bool, usize)> =
            lasting.flat_map(|(n, hold)| [(hold.from(), true, n), (hold.until(), false, n)]).collect();
        turns.sort_unstable();
        let mut found = Vec::new();
        for (_, begins, n) in turns {
            if begins {
                found.extend(self.begin(n));
            } else {
                self.end(n);
            }
        }
        found
    }

    fn begin(&mut self, n: usize) -> Option<Violation> {
        let mode = self.holds[n].mode();
        let against: &[&BTreeSet<usize>] = match mode {
            Mode::Exclusive => &[&self.exclusive, &self.shared, &self.permits],
            Mode::Shared => &[&self.exclusive, &self.permits],
            Mode::Permit(_) => &[&self.exclusive, &self.shared],
        };
        let foreign = |other: &&usize| !self.holds[**other].same_owner(&self.holds[n]);
        let conflict = against.iter().find_map(|set| set.iter().find(foreign)).copied();
        self.set(mode).insert(n);
        if let Some(other) = conflict {
            return Some(self.violation(other, n, format!("{:?} is held twice at once", self.lock(n))));
        }
        let Mode::Permit(limit) = mode else { return None };
        *self.taken.entry(self.permit(n)).or_default() += 1;
        *self.limits.entry(limit).or_default() += 1;
        let (depth, least) = (self.taken.len(), *self.limits.keys().next()?);
        let too_many = depth > least as usize;
        let text = format!("{depth} hold one of {least} permits of {:?}", self.lock(n));
        too_many.then(|| self.violation(*self.permits.first().unwrap_or(&n), n, text))
    }

    fn end(&mut self, n: usize) {
        let mode = self.holds[n].mode();
        self.set(mode).remove(&n);
        if let Mode::Permit(limit) = mode {
            let permit = self.permit(n);
            leave(&mut self.taken, permit);
            leave(&mut self.limits, limit);
        }
    }

    fn set(&mut self, mode: Mode) -> &mut BTreeSet<usize> {
        match mode {
            Mode::Exclusive => &mut self.exclusive,
            Mode::Shared => &mut self.shared,
            Mode::Permit(_) => &mut self.permits,
        }
    }

    fn permit(&self, n: usize) -> (Option<&'a str>, usize) {
        let owner = self.holds[n].owner();
        (owner, if owner.is_some() { 0 } else { n })
    }

    fn lock(&self, n: usize) -> &str {
        &self.holds[n].asked.lock
    }

    fn violation(&self, first: usize, second: usize, text: String) -> Violation {
        let both = [self.holds[first].granted, self.holds[second].granted];
        let left = self.holds[first].until().saturating_sub(self.holds[second].from());
        let text = format!("{text}: the first holder had {:.3} ms left", left as f64 / 1e6);
        Violation::new(Rule::Exclusion, text, both)
    }
}

fn leave<K: Ord>(counts: &mut BTreeMap<K, usize>, key: K) {
    if let Some(count) = counts.get_mut(&key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&key);
        }
    }
}
