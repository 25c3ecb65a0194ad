//! C2: fences grow from grant to grant.

use std::collections::HashMap;

use super::holds::{HeldInterval, holds};
use super::{History, Rule, Violation};

/// C2: a grant that was complete before another one was asked for has the lower fence; no two grants share one, but
/// the re-entrant ones of an owner; and a retry gets the fence of its first request.
pub fn fences(history: &History) -> Vec<Violation> {
    let locks = holds(history);
    let each = locks.values().flat_map(|holds| {
        let granted: Vec<&HeldInterval<'_>> = holds.iter().filter(|hold| hold.granted.is_some()).collect();
        let mut found: Vec<Violation> = granted.iter().filter_map(|hold| numbered_once(hold)).collect();
        found.extend(in_order(&granted));
        found.extend(distinct(&granted));
        found
    });
    each.collect()
}

fn violation(text: String, first: &HeldInterval<'_>, second: &HeldInterval<'_>) -> Violation {
    Violation::new(Rule::Fence, text, [first.granted, second.granted])
}

fn numbered_once(hold: &HeldInterval<'_>) -> Option<Violation> {
    if hold.fence().is_none() {
        return Some(violation(format!("a grant of {:?} without a fence", hold.asked.lock), hold, hold));
    }
    let other = hold.repeated.iter().find(|event| event.fence != hold.fence())?;
    let text = format!("one attempt for {:?} got two fences", other.lock);
    Some(Violation::new(Rule::Fence, text, [hold.granted, Some(other)]))
}

/// For each grant in the order of asking: the highest fence of those that were complete by then.
fn in_order(granted: &[&HeldInterval<'_>]) -> Vec<Violation> {
    let mut asked = granted.to_vec();
    asked.sort_by_key(|hold| hold.asked.t);
    let mut complete = granted.to_vec();
    complete.sort_by_key(|hold| hold.from());
    let mut complete = complete.into_iter().peekable();
    let (mut highest, mut found) = (None::<&HeldInterval<'_>>, Vec::new());
    for hold in asked {
        while let Some(before) = complete.next_if(|before| before.from() < hold.asked.t) {
            if highest.is_none_or(|highest| highest.fence() <= before.fence()) {
                highest = Some(before);
            }
        }
        // Equal fences are judged below.
        if let Some(before) = highest.filter(|before| before.fence() > hold.fence()) {
            let [high, low] = [before, hold].map(|hold| hold.fence().unwrap_or(0));
            let text = format!("the fence of {:?} went back from {high} to {low}", hold.asked.lock);
            found.push(violation(text, before, hold));
        }
    }
    found
}

fn distinct(granted: &[&HeldInterval<'_>]) -> Vec<Violation> {
    let mut by_fence: HashMap<u64, Vec<&HeldInterval<'_>>> = HashMap::new();
    for hold in granted {
        by_fence.entry(hold.fence().unwrap_or(0)).or_default().push(hold);
    }
    by_fence.into_values().flat_map(shared_by_right).collect()
}

/// The grants of one fence: each has to re-enter what its owner still had.
fn shared_by_right(mut grants: Vec<&HeldInterval<'_>>) -> Vec<Violation> {
    grants.sort_by_key(|hold| hold.from());
    let first = grants[0];
    // The owner had it until its last hold was released for sure; one that was not, may have lasted.
    let mut free_since = freed(first);
    let mut found = Vec::new();
    for hold in &grants[1..] {
        let text =
            format!("two grants of {:?} have the fence {}", hold.asked.lock, hold.fence().unwrap_or(0));
        if !hold.same_owner(first) {
            found.push(violation(text, first, hold));
        } else if free_since < hold.asked.t {
            found.push(violation(format!("{text}, and the first was released before"), first, hold));
        }
        free_since = free_since.max(freed(hold));
    }
    found
}

fn freed(hold: &HeldInterval<'_>) -> u64 {
    hold.released.map_or(u64::MAX, |event| event.t)
}
