//! Whether an ask that joins a line would wait for ever.
//!
//! Suppose that every owner that waits for nothing lets go of all it holds, and that the lines are served; again and
//! again, until nothing moves. Whoever still stands in line then waits in a circle. Nothing else will do: with permits
//! one of several has to go and not a certain one, a reader behind a reader waits for its turn and not for its end, and
//! an ask without an owner keeps those behind it waiting too.
//!
//! It is enough to look when an ask joins: grants, releases and ends only ever turn "waits behind you" into "waits for
//! you", or end it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::Hash;

use crate::rules::{Stake, Verdict, judge};
use crate::{Fence, Mode, Owner};

/// An ask in line, or one that is about to join it. `N` stands for a name.
#[derive(Clone, Debug)]
pub struct Want<N> {
    /// Whose it is; without one it is its own, and holds nothing else.
    pub owner: Option<Owner>,
    /// How it is to be held.
    pub mode: Mode,
    /// What for.
    pub names: Vec<N>,
}

/// Tells whether the last ask of `line` would wait for ever, given who holds what: the names around the circle, one
/// that it asks for first.
///
/// `line` is in the order of arrival. Holders that stand in no line may be left out: they are not in anybody's way for
/// ever.
pub fn circle<N: Copy + Eq + Hash>(held: HashMap<N, Vec<Stake>>, line: Vec<Want<N>>) -> Option<Vec<N>> {
    let mut waits = HashMap::new();
    for owner in line.iter().filter_map(|want| want.owner) {
        *waits.entry(owner).or_insert(0) += 1;
    }
    let used: HashSet<Fence> = held.values().flatten().map(|stake| stake.fence).collect();
    let unused = (1..).map_while(|n| Fence::new(n).ok()).filter(move |fence| !used.contains(fence));
    let mut scene = Scene { in_line: vec![true; line.len()], held, line, waits, unused: Box::new(unused) };
    while scene.serve() {}
    scene.in_line.last()?.then(|| scene.names_around())
}

struct Scene<N> {
    held: HashMap<N, Vec<Stake>>,
    line: Vec<Want<N>>,
    /// Which of the line still stand in it.
    in_line: Vec<bool>,
    /// For how many asks an owner waits. One that waits for none is gone, with all it held.
    waits: HashMap<Owner, usize>,
    /// Fences that nobody has: permits are told apart by them.
    unused: Box<dyn Iterator<Item = Fence>>,
}

impl<N: Copy + Eq + Hash> Scene<N> {
    /// Goes along the line once, and lets in whoever may come in.
    fn serve(&mut self) -> bool {
        let mut moved = false;
        let mut behind = HashSet::new();
        for i in 0..self.line.len() {
            if !self.in_line[i] {
                continue;
            }
            let names = &self.line[i].names;
            let free = |name: &N| !behind.contains(name) && self.judge(i, *name) == Verdict::Free;
            if self.again(i) || names.iter().all(free) {
                moved = true;
                self.let_in(i);
                self.let_in_with(i);
            } else {
                behind.extend(names.iter().copied());
            }
        }
        moved
    }

    fn again(&self, i: usize) -> bool {
        self.line[i].names.iter().all(|name| matches!(self.judge(i, *name), Verdict::Reenter(_)))
    }

    /// As in the table, other asks of the same owner re-enter at once, past the line.
    fn let_in_with(&mut self, i: usize) {
        let owner = self.line[i].owner;
        for k in i + 1..self.line.len() {
            if !self.stuck(owner) {
                return;
            }
            if self.in_line[k] && self.line[k].owner == owner && self.again(k) {
                self.let_in(k);
            }
        }
    }

    fn let_in(&mut self, i: usize) {
        self.in_line[i] = false;
        let Want { owner, mode, names } = &self.line[i];
        let Some(waits) = owner.and_then(|owner| self.waits.get_mut(&owner)) else { return };
        *waits -= 1;
        if *waits == 0 {
            return;
        }
        let Some(new) = self.unused.next() else { return };
        for name in names {
            let stakes = self.held.entry(*name).or_default();
            // As in the table: holds of one owner share a fence and stand beside each other.
            let beside = stakes.iter().rposition(|stake| stake.owner == *owner);
            let fence = beside.map_or(new, |at| stakes[at].fence);
            let stake = Stake { owner: *owner, mode: *mode, fence };
            stakes.insert(beside.map_or(stakes.len(), |at| at + 1), stake);
        }
    }

    fn stuck(&self, owner: Option<Owner>) -> bool {
        owner.is_some_and(|owner| self.waits.get(&owner).is_some_and(|n| *n > 0))
    }

    fn holders(&self, name: N) -> impl Iterator<Item = Stake> + '_ {
        self.held.get(&name).into_iter().flatten().copied().filter(|stake| self.stuck(stake.owner))
    }

    fn judge(&self, i: usize, name: N) -> Verdict {
        judge(self.line[i].owner, self.line[i].mode, self.holders(name))
    }

    /// The shortest way from the last ask over what keeps it waiting, and what keeps that waiting, back to its owner.
    fn names_around(&self) -> Vec<N> {
        let last = self.line.len() - 1;
        let mut from: HashMap<usize, (usize, N)> = HashMap::new();
        let mut open = VecDeque::from([last]);
        while let Some(i) = open.pop_front() {
            for (name, owner, next) in self.in_the_way_of(i) {
                if owner.is_some() && owner == self.line[last].owner {
                    return way_back(&from, i, name);
                }
                for next in next {
                    if next != last && !from.contains_key(&next) {
                        from.insert(next, (i, name));
                        open.push_back(next);
                    }
                }
            }
        }
        self.line[last].names.clone()
    }

    /// At which name, whose, and what those wait for in turn.
    fn in_the_way_of(&self, i: usize) -> Vec<(N, Option<Owner>, Vec<usize>)> {
        let mut found = Vec::new();
        let waiting = |i: &usize| self.in_line[*i];
        for name in &self.line[i].names {
            if self.judge(i, *name) == Verdict::Blocked {
                for stake in self.holders(*name) {
                    let theirs =
                        (0..self.line.len()).filter(waiting).filter(|k| self.line[*k].owner == stake.owner);
                    found.push((*name, stake.owner, theirs.collect()));
                }
            }
            // Those further ahead are in the way of the one just ahead.
            let ahead = (0..i).rev().filter(waiting).find(|k| self.line[*k].names.contains(name));
            found.extend(ahead.map(|k| (*name, self.line[k].owner, vec![k])));
        }
        found
    }
}

fn way_back<N: Copy + Eq>(from: &HashMap<usize, (usize, N)>, mut at: usize, closing: N) -> Vec<N> {
    let mut way = vec![closing];
    while let Some((before, name)) = from.get(&at) {
        way.push(*name);
        at = *before;
    }
    let mut names = Vec::new();
    for name in way.into_iter().rev() {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn o(n: u8) -> Option<Owner> {
        (n > 0).then(|| Owner::from_bytes([n; 16]))
    }

    /// Holders as (name, owner, mode), and the line as (owner, mode, names).
    fn look(held: &[(char, u8, Mode)], line: &[(u8, Mode, &str)]) -> Option<String> {
        let mut all: HashMap<char, Vec<Stake>> = HashMap::new();
        for (i, (name, owner, mode)) in held.iter().enumerate() {
            let fence = Fence::new(i as u64 + 1).unwrap();
            all.entry(*name).or_default().push(Stake { owner: o(*owner), mode: *mode, fence });
        }
        let want = |(owner, mode, names): &(u8, Mode, &str)| Want {
            owner: o(*owner),
            mode: *mode,
            names: names.chars().collect(),
        };
        circle(all, line.iter().map(want).collect()).map(|names| names.iter().collect())
    }

    const X: Mode = Mode::Exclusive;
    const R: Mode = Mode::Shared;
    const P: Mode = Mode::Permit(2);

    #[test]
    fn a_circle_of_three_is_found_with_its_names() {
        let held = [('a', 1, X), ('b', 2, X), ('c', 3, X), ('x', 9, X)];
        let line = [(2, X, "x"), (2, X, "c"), (3, X, "a"), (1, X, "b")];
        assert_eq!(look(&held, &line), Some("bca".into()));
        assert_eq!(look(&held, &line[..3]), None);
    }

    #[test]
    fn a_permit_that_somebody_free_may_give_back_is_no_deadlock() {
        let held = |other| [('a', 1, X), ('p', 2, P), ('p', other, P)];
        let line = [(2, X, "a"), (1, P, "p")];
        assert_eq!(look(&held(3), &line), None);
        assert_eq!(look(&held(0), &line), None);
        assert_eq!(look(&held(3), &[(2, X, "a"), (3, X, "a"), (1, P, "p")]), Some("pa".into()));
        // Only one permit is allowed beside this ask: it does not help that the other one goes.
        assert_eq!(look(&held(3), &[(2, X, "a"), (1, Mode::Permit(1), "p")]), Some("pa".into()));
    }

    #[test]
    fn both_who_hold_a_permit_may_wait_for_the_one_who_wants_it_in_different_ways() {
        // 3 wants a permit of 1 or 2. 2 waits for 3; now 1 wants to wait for 3 as well. No way leads from 2 to 1.
        let held = [('p', 1, P), ('p', 2, P), ('c', 3, X)];
        assert_eq!(look(&held, &[(3, P, "p"), (2, X, "c")]), None);
        assert_eq!(look(&held, &[(3, P, "p"), (2, X, "c"), (1, X, "c")]), Some("cp".into()));
    }

    #[test]
    fn an_ask_without_an_owner_keeps_those_behind_it_waiting() {
        assert_eq!(look(&[('a', 1, X)], &[(0, X, "ab"), (1, X, "b")]), Some("ba".into()));
    }

    #[test]
    fn a_reader_behind_a_reader_waits_for_its_turn_only() {
        // 2 will read x beside 1, though it waits for 1 elsewhere.
        let held = [('x', 9, X), ('q', 1, X)];
        assert_eq!(look(&held, &[(2, R, "x"), (2, X, "q"), (1, R, "x")]), None);
        assert_eq!(look(&held, &[(2, X, "x"), (2, X, "q"), (1, R, "x")]), Some("xq".into()));
    }
}
