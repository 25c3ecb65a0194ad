//! Finds out whether a request that joins a queue would wait for ever.
//!
//! The search supposes that every owner that waits for nothing releases all its holds, and that the queues then advance; again and
//! again, until no request moves. The requests that remain wait in a cycle. A search for cycles in a graph of holders alone is wrong: of
//! several permits any one may be released, a reader behind a reader waits for the queue and not for the other reader's release, and a
//! request without an owner blocks the requests behind it too.
//!
//! It is enough to search when a request joins: grants, releases and expiries turn "waits behind" into "waits for", or end it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::Hash;

use crate::admission::{ActiveHold, Admission, evaluate};
use crate::{Fence, Mode, Owner};

/// A request in a queue, or one that is about to join it. `N` stands for a name.
#[derive(Clone, Debug)]
pub struct QueuedRequest<N> {
    /// Its owner; a request without an owner holds nothing else.
    pub owner: Option<Owner>,
    /// The requested mode.
    pub mode: Mode,
    /// The requested names.
    pub names: Vec<N>,
}

/// Whether the last request of `queue` would wait for ever, given the present holds: the names around the cycle, one that the request
/// is for first.
///
/// `queue` is in the order of arrival. Holders that wait for nothing may be left out: they block no request for ever.
pub fn find_cycle<N: Copy + Eq + Hash>(
    held: HashMap<N, Vec<ActiveHold>>,
    queue: Vec<QueuedRequest<N>>,
) -> Option<Vec<N>> {
    let mut waits = HashMap::new();
    for owner in queue.iter().filter_map(|want| want.owner) {
        *waits.entry(owner).or_insert(0) += 1;
    }
    let used: HashSet<Fence> = held.values().flatten().map(|hold| hold.fence).collect();
    let unused = (1..).map_while(|n| Fence::new(n).ok()).filter(move |fence| !used.contains(fence));
    let mut graph =
        WaitGraph { waiting: vec![true; queue.len()], held, queue, waits, unused: Box::new(unused) };
    while graph.advance() {}
    graph.waiting.last()?.then(|| graph.names_around())
}

struct WaitGraph<N> {
    held: HashMap<N, Vec<ActiveHold>>,
    queue: Vec<QueuedRequest<N>>,
    /// Which requests of the queue still wait.
    waiting: Vec<bool>,
    /// How many requests of an owner wait. An owner without one is gone, with all its holds.
    waits: HashMap<Owner, usize>,
    /// Unused fences, which distinguish permits.
    unused: Box<dyn Iterator<Item = Fence>>,
}

impl<N: Copy + Eq + Hash> WaitGraph<N> {
    /// Goes through the queue once, and grants every request that may be granted.
    fn advance(&mut self) -> bool {
        let mut moved = false;
        let mut behind = HashSet::new();
        for i in 0..self.queue.len() {
            if !self.waiting[i] {
                continue;
            }
            let names = &self.queue[i].names;
            let free = |name: &N| !behind.contains(name) && self.evaluate(i, *name) == Admission::Free;
            if self.again(i) || names.iter().all(free) {
                moved = true;
                self.grant(i);
                self.reenter_others(i);
            } else {
                behind.extend(names.iter().copied());
            }
        }
        moved
    }

    fn again(&self, i: usize) -> bool {
        self.queue[i].names.iter().all(|name| matches!(self.evaluate(i, *name), Admission::Reenter(_)))
    }

    /// As in the table, other requests of the same owner re-enter at once, past the queue.
    fn reenter_others(&mut self, i: usize) {
        let owner = self.queue[i].owner;
        for k in i + 1..self.queue.len() {
            if !self.stuck(owner) {
                return;
            }
            if self.waiting[k] && self.queue[k].owner == owner && self.again(k) {
                self.grant(k);
            }
        }
    }

    fn grant(&mut self, i: usize) {
        self.waiting[i] = false;
        let QueuedRequest { owner, mode, names } = &self.queue[i];
        let Some(waits) = owner.and_then(|owner| self.waits.get_mut(&owner)) else { return };
        *waits -= 1;
        if *waits == 0 {
            return;
        }
        let Some(new) = self.unused.next() else { return };
        for name in names {
            let holds = self.held.entry(*name).or_default();
            // As in the table: holds of one owner share a fence and are adjacent.
            let beside = holds.iter().rposition(|hold| hold.owner == *owner);
            let fence = beside.map_or(new, |at| holds[at].fence);
            let hold = ActiveHold { owner: *owner, mode: *mode, fence };
            holds.insert(beside.map_or(holds.len(), |at| at + 1), hold);
        }
    }

    fn stuck(&self, owner: Option<Owner>) -> bool {
        owner.is_some_and(|owner| self.waits.get(&owner).is_some_and(|n| *n > 0))
    }

    fn holders(&self, name: N) -> impl Iterator<Item = ActiveHold> + '_ {
        self.held.get(&name).into_iter().flatten().copied().filter(|hold| self.stuck(hold.owner))
    }

    fn evaluate(&self, i: usize, name: N) -> Admission {
        evaluate(self.queue[i].owner, self.queue[i].mode, self.holders(name))
    }

    /// The shortest path from the last request over the requests that block it back to its owner.
    fn names_around(&self) -> Vec<N> {
        let last = self.queue.len() - 1;
        let mut from: HashMap<usize, (usize, N)> = HashMap::new();
        let mut open = VecDeque::from([last]);
        while let Some(i) = open.pop_front() {
            for (name, owner, next) in self.in_the_way_of(i) {
                if owner.is_some() && owner == self.queue[last].owner {
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
        self.queue[last].names.clone()
    }

    /// The waits that block request `i`: the name, the owner, and that owner's own requests.
    fn in_the_way_of(&self, i: usize) -> Vec<(N, Option<Owner>, Vec<usize>)> {
        let mut found = Vec::new();
        let waiting = |i: &usize| self.waiting[*i];
        for name in &self.queue[i].names {
            if self.evaluate(i, *name) == Admission::Blocked {
                for hold in self.holders(*name) {
                    let theirs =
                        (0..self.queue.len()).filter(waiting).filter(|k| self.queue[*k].owner == hold.owner);
                    found.push((*name, hold.owner, theirs.collect()));
                }
            }
            // Requests further ahead block the one just ahead.
            let ahead = (0..i).rev().filter(waiting).find(|k| self.queue[*k].names.contains(name));
            found.extend(ahead.map(|k| (*name, self.queue[k].owner, vec![k])));
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

    /// Holders as (name, owner, mode), and the queue as (owner, mode, names).
    fn look(held: &[(char, u8, Mode)], queue: &[(u8, Mode, &str)]) -> Option<String> {
        let mut all: HashMap<char, Vec<ActiveHold>> = HashMap::new();
        for (i, (name, owner, mode)) in held.iter().enumerate() {
            let fence = Fence::new(i as u64 + 1).unwrap();
            all.entry(*name).or_default().push(ActiveHold { owner: o(*owner), mode: *mode, fence });
        }
        let want = |(owner, mode, names): &(u8, Mode, &str)| QueuedRequest {
            owner: o(*owner),
            mode: *mode,
            names: names.chars().collect(),
        };
        find_cycle(all, queue.iter().map(want).collect()).map(|names| names.iter().collect())
    }

    const X: Mode = Mode::Exclusive;
    const R: Mode = Mode::Shared;
    const P: Mode = Mode::Permit(2);

    #[test]
    fn a_cycle_of_three_is_found_with_its_names() {
        let held = [('a', 1, X), ('b', 2, X), ('c', 3, X), ('x', 9, X)];
        let queue = [(2, X, "x"), (2, X, "c"), (3, X, "a"), (1, X, "b")];
        assert_eq!(look(&held, &queue), Some("bca".into()));
        assert_eq!(look(&held, &queue[..3]), None);
    }

    #[test]
    fn a_permit_that_a_free_owner_may_release_is_no_deadlock() {
        let held = |other| [('a', 1, X), ('p', 2, P), ('p', other, P)];
        let queue = [(2, X, "a"), (1, P, "p")];
        assert_eq!(look(&held(3), &queue), None);
        assert_eq!(look(&held(0), &queue), None);
        assert_eq!(look(&held(3), &[(2, X, "a"), (3, X, "a"), (1, P, "p")]), Some("pa".into()));
        // Only one permit is allowed beside this request: it does not help that the other one goes.
        assert_eq!(look(&held(3), &[(2, X, "a"), (1, Mode::Permit(1), "p")]), Some("pa".into()));
    }

    #[test]
    fn both_permit_holders_may_wait_for_the_requester_in_different_ways() {
        // 3 wants a permit of 1 or 2. 2 waits for 3; now 1 wants to wait for 3 as well. No way leads from 2 to 1.
        let held = [('p', 1, P), ('p', 2, P), ('c', 3, X)];
        assert_eq!(look(&held, &[(3, P, "p"), (2, X, "c")]), None);
        assert_eq!(look(&held, &[(3, P, "p"), (2, X, "c"), (1, X, "c")]), Some("cp".into()));
    }

    #[test]
    fn a_request_without_an_owner_blocks_the_requests_behind_it() {
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
