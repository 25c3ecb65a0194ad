//! The lock table against a naive one: the same answers, effects, views, counts and fences after every step of more
//! than a hundred thousand random histories.
//!
//! A failure prints the smallest history that was found and the seed; `LOCKKEEPER_SEED=<it>` runs the same again.
//! `LOCKKEEPER_CASES=<n>` runs more of them.

mod histories;
mod naive;

use histories::{BROAD, DEADLOCKS, EXPIRY, PERMITS, Profile, run};
use naive::{Bug, Seen};

/// How many histories each profile runs: four profiles, more than 100,000 together.
const CASES: u32 = 30_000;

/// Runs a profile, and insists that each of these things happened at least once in a hundred histories.
fn agree(name: &str, profile: &Profile, often: impl Fn(&Seen) -> Vec<usize>) {
    let cases = std::env::var("LOCKKEEPER_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(CASES);
    let seen = run(profile, None, cases).unwrap_or_else(|what| panic!("{what}"));
    println!("{name}: {cases} histories, {:?}", seen.all());
    for count in often(&seen) {
        assert!(count >= cases as usize / 100, "{name} has gone hollow: {count} in {:?}", seen.all());
    }
    // Whatever a profile leans to, nothing is left out altogether.
    assert!(seen.grants > cases as usize && seen.from_the_line > cases as usize / 10, "{:?}", seen.all());
}

#[test]
fn they_agree_on_a_bit_of_everything() {
    agree("broad", &BROAD, |s| {
        vec![
            s.reentries,
            s.expiries,
            s.delays,
            s.lingerings,
            s.breaks,
            s.several,
            s.out_of_patience,
            s.deadlocks,
        ]
    });
}

#[test]
fn they_agree_on_deadlocks() {
    agree("deadlocks", &DEADLOCKS, |s| {
        vec![s.deadlocks, s.upgrades, s.reentries, s.reentries_from_line, s.left]
    });
}

#[test]
fn they_agree_on_expiry() {
    agree("expiry", &EXPIRY, |s| {
        vec![s.expiries, s.delays, s.lingerings, s.renewals, s.asked_again_when_held, s.asked_again_in_line]
    });
}

#[test]
fn they_agree_on_permits() {
    agree("permits", &PERMITS, |s| vec![s.busy, s.reentries, s.expiries, s.breaks, s.left]);
}

#[test]
fn every_planted_bug_is_found() {
    for bug in Bug::ALL {
        let found =
            [&BROAD, &DEADLOCKS, &EXPIRY].iter().find_map(|profile| run(profile, Some(bug), 2_000).err());
        let found = found.unwrap_or_else(|| panic!("{bug:?} is not found in 6,000 histories"));
        println!("{bug:?}: {}", found.lines().take(3).collect::<Vec<_>>().join("\n  "));
    }
}
