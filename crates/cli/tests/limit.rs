//! Rate limits on the command line: who gets a token runs, who does not exits with 72, and bad calls write nothing.

mod common;
use std::process::Output;

use common::*;

fn run(place: &Place, words: &[&str]) -> Output {
    place.lk(words).output().unwrap()
}

#[test]
fn a_command_runs_with_a_token_and_not_without() {
    let place = Place::new("limit_run");
    let words = ["limit", "mail", "--rate", "2/h", "--", "sh", "-c", "echo sent; exit 7"];
    for _ in 0..2 {
        let output = run(&place, &words);
        assert_eq!((code(output.status), text(&output).as_str()), (7, "sent\n"), "{}", errors(&output));
    }
    let output = run(&place, &words);
    assert_eq!((code(output.status), text(&output).as_str()), (72, ""));
    assert!(errors(&output).contains("used up: retry in"), "{}", errors(&output));
    // The command gets the environment as it is, or does not see which store it is.
    for (options, seen) in [(&[][..], place.url()), (&["--hide-store"], "none".into())] {
        let words = ["--", "sh", "-c", "echo ${LOCKKEEPER_STORE-none}${LOCKKEEPER_STORE_FILE-}"];
        let output = run(&place, &[&["limit", "hides", "--rate", "9/h"], options, &words].concat());
        assert_eq!(text(&output).trim(), seen, "{}", errors(&output));
    }
    // Another key has a bucket of its own, and a reset fills this one.
    assert_eq!(code(run(&place, &["limit", "other", "--rate", "2/h"]).status), 0);
    let output = run(&place, &["limit", "mail", "--rate", "2/h", "--reset", "--json"]);
    assert_eq!(json(&output)["remaining"], 2);
}

#[test]
fn the_state_is_printed_for_people_and_for_programs() {
    let place = Place::new("limit_json");
    let limit =
        |more: &[&str]| run(&place, &[&["limit", "k", "--rate", "1/d", "--burst", "5"], more].concat());
    let shown = json(&limit(&["--take", "4", "--json"]));
    assert_eq!(
        (&shown["key"], &shown["allowed"], &shown["remaining"]),
        (&"k".into(), &true.into(), &1.into())
    );
    assert_eq!(shown["burst"], 5);
    let refused = limit(&["--take", "2", "--json"]);
    let shown = json(&refused);
    assert_eq!(
        (code(refused.status), &shown["allowed"], &shown["remaining"]),
        (72, &false.into(), &1.into())
    );
    let day = 24 * 60 * 60 * 1000;
    assert!((1..=day).contains(&shown["retry_after_ms"].as_u64().unwrap()), "{shown}");
    assert!((3 * day..=4 * day).contains(&shown["reset_after_ms"].as_u64().unwrap()), "{shown}");
    let peek = limit(&["--peek"]);
    assert_eq!(code(peek.status), 0);
    assert!(text(&peek).starts_with("k  1 of 5 left, full in "), "{}", text(&peek));
    assert_eq!(code(limit(&[]).status), 0);
    assert_eq!(code(limit(&["--peek", "--json"]).status), 72);
    // A wait that would be too long is refused at once.
    assert_eq!(code(limit(&["--wait", "1h"]).status), 72);
}

#[test]
fn a_wait_takes_its_turn_and_gives_it_back_when_a_signal_ends_it() {
    let place = Place::new("limit_wait");
    let fast = ["limit", "fast", "--rate", "20/s", "--burst", "1", "--wait", "20s", "--", "true"];
    for _ in 0..4 {
        assert_eq!(code(run(&place, &fast).status), 0);
    }
    let slow = ["limit", "slow", "--rate", "1/min", "--burst", "1", "--json"];
    assert_eq!(code(run(&place, &slow).status), 0);
    let peek = || json(&run(&place, &[&slow[..], &["--peek"]].concat()))["reset_after_ms"].as_u64().unwrap();
    let before = peek();
    let waiter = Running::new(place.lk([&slow[..], &["--wait", "1h"]].concat()));
    // The command line of the waiter may take a while to start.
    while peek() <= before {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    waiter.signal(rustix::process::Signal::TERM);
    assert_eq!(waiter.end().0, 143);
    assert!(peek() <= before, "the turn was not given back");
}

/// A store that was down failed a call with `--wait` at once, unlike those of `run` and `once`.
#[test]
fn a_store_that_is_down_is_waited_for() {
    let Ok(mut redis) = lockkeeper_testkit::servers::redis(Default::default()) else { return };
    let (place, url) = (Place::new("limit_down"), format!("redis://{}", redis.addr()));
    redis.stop();
    let words = ["limit", "k", "--rate", "5/s", "--store", &url];
    assert_eq!(code(run(&place, &words).status), 69);
    let mut waiting = Running::new(place.lk([&words[..], &["--wait", "60s", "--", "echo", "done"]].concat()));
    let mut said = String::new();
    let mut errors = std::io::BufReader::new(waiting.child.stderr.take().unwrap());
    std::io::BufRead::read_line(&mut errors, &mut said).unwrap();
    assert!(said.contains("is waited for"), "{said}");
    redis.restart();
    assert_eq!(waiting.line(), "done");
    assert_eq!(code(waiting.child.wait().unwrap()), 0);
}

#[test]
fn bad_calls_are_told_and_write_nothing() {
    let place = Place::new("limit_bad");
    for (words, says) in [
        (&["limit", "k"][..], "--rate"),
        (&["limit", "k", "--rate", "0/s"], "the rate is 0"),
        (&["limit", "k", "--rate", "-1/s"], "no number"),
        (&["limit", "k", "--rate", "100"], "tokens per time"),
        (&["limit", "k", "--rate", "1/fortnight"], "no unit of time"),
        (&["limit", "k", "--rate", "9999999/s"], "million"),
        (&["limit", "k", "--rate", "1/s", "--burst", "0"], "the burst is 0"),
        (&["limit", "k", "--rate", "1/s", "--burst", "99999999999999"], "ten years"),
        (&["limit", "k", "--rate", "5/s", "--take", "6"], "more than the burst"),
        (&["limit", "k", "--rate", "5/s", "--take", "0"], "0 tokens"),
        (&["limit", "k", "--rate", "5/s", "--wait", "5"], "add a unit"),
        (&["limit", "k", "--rate", "5/s", "--peek", "--wait", "5s"], "cannot be used with"),
        (&["limit", "", "--rate", "5/s"], "empty"),
        (&["limit", &"x".repeat(449), "--rate", "5/s"], "448"),
    ] {
        let output = run(&place, words);
        assert_eq!(code(output.status), 64, "{words:?}: {}", errors(&output));
        assert!(errors(&output).contains(says), "{words:?}: {}", errors(&output));
    }
    let output = run(&place, &["limit", "k", "--rate", "5/s", "--", "/no/such/command"]);
    assert_eq!(code(output.status), 127, "{}", errors(&output));
    assert!(!place.db().exists(), "a bad call made a store");
}
