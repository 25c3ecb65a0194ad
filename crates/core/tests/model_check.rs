//! An exhaustive check of the real table and the real lease: three clients, one lock, and everything that can happen to
//! messages, clocks and processes between them, in every order.
//!
//! One search with all limits wide would take hours, so there are several, each wide in another direction and each gone
//! through to the end.

mod model;

use model::{Bug, Found, Law, Limits, explore};

const NARROW: Limits = Limits { requests: 3, in_flight: 1, crashes: 0, copies: 0, states: usize::MAX };

fn story(found: &Found) -> String {
    let Some(((law, what), story)) = &found.broken else { return format!("{found:?}") };
    format!("{law:?} is broken, {what}:\n  {}", story.join("\n  "))
}

/// Goes through every state, and insists that there were enough of them and that they were interesting.
fn every_state(limits: &Limits, at_least: usize) {
    let found = explore(None, limits, |_| true);
    println!("{limits:?}\n{found:?}");
    assert!(found.broken.is_none(), "{}", story(&found));
    assert!(found.exhausted && found.states >= at_least, "{found:?}");
    // A register that checks no fence is harmed in some of them: the faults do bite.
    assert!(found.harm > 1000 && found.jeopardy > 1000 && found.orphans > 1000, "{found:?}");
    assert!(found.longest_line >= 2, "{found:?}");
}

#[test]
fn the_promises_hold_when_messages_overtake_each_other() {
    every_state(&Limits { in_flight: 2, ..NARROW }, 400_000);
}

#[test]
fn the_promises_hold_when_requests_arrive_again_late() {
    every_state(&Limits { copies: 1, ..NARROW }, 500_000);
}

#[test]
fn the_promises_hold_when_clients_crash() {
    every_state(&Limits { crashes: 2, ..NARROW }, 50_000);
}

#[test]
fn the_promises_hold_when_clients_come_back() {
    every_state(&Limits { requests: 4, ..NARROW }, 300_000);
}

#[test]
fn every_planted_bug_is_found() {
    let wide = Limits { in_flight: 2, copies: 1, states: 300_000, ..NARROW };
    let bugs = [
        (Bug::CountsFromTheReply, Law::X, wide),
        (Bug::ReleaseByAnyone, Law::X, wide),
        (Bug::RenewalRevives, Law::Keeps, wide),
        (Bug::FenceStartsAgain, Law::F, wide),
        (Bug::FenceStartsAgain, Law::R, NARROW),
        (Bug::LostIsRevived, Law::L, wide),
    ];
    for (bug, law, limits) in bugs {
        // Only this law counts: it must be able to find the bug by itself.
        let found = explore(Some(bug), &limits, |broken| broken == law);
        println!("{bug:?}, {} states: {}", found.states, story(&found));
        assert!(found.broken.is_some(), "{law:?} does not notice {bug:?}");
    }
}
