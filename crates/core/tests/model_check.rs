//! An exhaustive check of the real table and the real lease: three clients, one lock, and everything that can happen to
//! messages, clocks and processes between them, in every order.

mod model;

use model::{Bug, Found, Law, Limits, explore};

const LIMITS: Limits = Limits { asks: 3, in_flight: 2, crashes: 0, copies: false, states: 2_000_000 };

fn story(found: &Found) -> String {
    let Some(((law, what), story)) = &found.broken else { return format!("{found:?}") };
    format!("{law:?} is broken, {what}:\n  {}", story.join("\n  "))
}

#[test]
fn the_promises_hold_in_every_state() {
    let env = |n: &str, d: usize| std::env::var(n).ok().and_then(|s| s.parse().ok()).unwrap_or(d);
    let limits = Limits { asks: env("ASKS", 3) as u8, in_flight: env("FLY", 2), crashes: env("CR", 0), copies: env("CP", 0) > 0, states: env("ST", 1_000_000) };
    let found = explore(None, &limits, |_| true);
    println!("{LIMITS:?}\n{found:?}");
    assert!(found.broken.is_none(), "{}", story(&found));
    assert!(found.exhausted);
}
