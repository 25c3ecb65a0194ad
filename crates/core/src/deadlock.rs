//! Finding cycles among owners that wait for each other.
//!
//! New waiting-for edges appear only when an ask joins a line: a grant or a release turns "waits behind you" into
//! "waits for you" or removes it. So it is enough to look once, when an ask joins, and the ask that joins is always the
//! youngest of any cycle it closes.

use std::collections::HashMap;

use crate::{LockName, Owner};

/// One reason why an owner cannot go on.
#[derive(Clone, Debug)]
pub struct Obstacle {
    /// The name it waits for.
    pub name: LockName,
    /// Who is in the way; `None` is somebody without an explicit owner, who waits for nobody.
    pub owners: Vec<Option<Owner>>,
    /// One of them gone is enough (permits); otherwise all of them must go.
    pub any: bool,
}

/// Follows what `obstacles` says, from an ask of `owner` that would face `first`, back to `owner`.
/// Returns the names along the cycle, the asked one first.
pub fn cycle(
    owner: Owner,
    first: Vec<Obstacle>,
    mut obstacles: impl FnMut(Owner) -> Vec<Obstacle>,
) -> Option<Vec<LockName>> {
    let mut path = Vec::new();
    let mut seen = HashMap::new();
    blocked_by(owner, &first, &mut obstacles, &mut seen, &mut path).then_some(path)
}

fn blocked_by(
    target: Owner,
    facing: &[Obstacle],
    obstacles: &mut impl FnMut(Owner) -> Vec<Obstacle>,
    seen: &mut HashMap<Owner, bool>,
    path: &mut Vec<LockName>,
) -> bool {
    facing.iter().any(|obstacle| {
        let depth = path.len();
        if !path.contains(&obstacle.name) {
            path.push(obstacle.name.clone());
        }
        let mut leads_back = |owner: &Option<Owner>| match owner {
            None => false,
            Some(owner) if *owner == target => true,
            Some(owner) => {
                // On its first visit an owner counts as not leading back: a detour through itself proves nothing.
                if let Some(known) = seen.get(owner) {
                    return *known;
                }
                seen.insert(*owner, false);
                let found = blocked_by(target, &obstacles(*owner), obstacles, seen, path);
                seen.insert(*owner, found);
                found
            }
        };
        let closed = if obstacle.any {
            !obstacle.owners.is_empty() && obstacle.owners.iter().all(&mut leads_back)
        } else {
            obstacle.owners.iter().any(&mut leads_back)
        };
        if !closed {
            path.truncate(depth);
        }
        closed
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn o(n: u8) -> Owner {
        Owner::from_bytes([n; 16])
    }

    fn on(name: &str, owners: &[u8], any: bool) -> Obstacle {
        let owners = owners.iter().map(|n| (*n > 0).then(|| o(*n))).collect();
        Obstacle { name: LockName::new(name).unwrap(), owners, any }
    }

    fn names(found: Option<Vec<LockName>>) -> Vec<String> {
        found.unwrap_or_default().iter().map(|n| n.to_string()).collect()
    }

    #[test]
    fn a_cycle_of_three_is_found_with_its_names() {
        let found = cycle(o(1), vec![on("b", &[2], false)], |who| match who {
            w if w == o(2) => vec![on("x", &[9], false), on("c", &[3], false)],
            w if w == o(3) => vec![on("a", &[1], false)],
            _ => vec![],
        });
        assert_eq!(names(found), ["b", "c", "a"]);
    }

    #[test]
    fn a_permit_that_somebody_free_may_give_back_is_no_deadlock() {
        let waits = |who| if who == o(2) { vec![on("a", &[1], false)] } else { vec![] };
        assert_eq!(names(cycle(o(1), vec![on("p", &[2, 3], true)], waits)), Vec::<String>::new());
        assert_eq!(names(cycle(o(1), vec![on("p", &[2, 0], true)], waits)), Vec::<String>::new());
        assert_eq!(names(cycle(o(1), vec![on("p", &[2], true)], waits)), ["p", "a"]);
        assert_eq!(names(cycle(o(1), vec![on("p", &[2, 2], true)], waits)), ["p", "a"]);
    }
}
