//! The output of a command from the cache: one caller runs the command, and a failure leaves the old output.

mod common;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use common::*;
use rustix::process::Signal;

fn cached(place: &Place, options: &str, script: &str) -> Command {
    let mut command = place.lk(["cached"]);
    command.args(options.split(' ')).args(["--", "sh", "-c", script]);
    command
}

fn run(place: &Place, options: &str, script: &str) -> Output {
    cached(place, options, script).output().unwrap()
}

/// Runs it until the output is the wanted one.
fn until(place: &Place, options: &str, script: &str, wanted: &str) {
    let started = Instant::now();
    while text(&run(place, options, script)) != wanted {
        assert!(started.elapsed() < LONG, "it never printed {wanted:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

const COUNT: &str = "echo x >> runs; wc -l < runs | tr -d ' '";

#[test]
fn later_calls_print_the_same_bytes_without_running_the_command() {
    let place = Place::new("cached_found");
    let script = r"printf 'out\000\377\n'; echo warning >&2; echo x >> runs";
    let first = run(&place, "k --ttl 1h", script);
    assert_eq!(code(first.status), 0);
    assert_eq!((&first.stdout[..], &first.stderr[..]), (&b"out\0\xff\n"[..], &b"warning\n"[..]));
    for _ in 0..3 {
        let again = run(&place, "k --ttl 1h", script);
        assert_eq!((code(again.status), again.stdout), (0, first.stdout.clone()));
        assert_eq!(again.stderr, b"", "only stdout is kept");
    }
    assert_eq!(place.read("runs"), "x\n");
    let json = run(&place, "k --ttl 1h --json", script);
    assert!(
        errors(&json).contains(r#""event":"printed""#) && errors(&json).contains(r#""state":"fresh""#),
        "{json:?}"
    );
}

#[test]
fn all_who_want_it_at_once_share_one_run_and_a_large_output_comes_back() {
    let place = Place::new("cached_crowd");
    let script = "echo x >> runs; sleep 0.5; head -c 2000000 /dev/urandom | base64";
    let callers: Vec<_> = (0..6).map(|_| Running::new(cached(&place, "k --ttl 1h", script))).collect();
    let ends: Vec<_> = callers.into_iter().map(Running::end).collect();
    assert!(ends.iter().all(|end| end.0 == 0 && end.1 == ends[0].1 && end.1.len() > 2_000_000));
    assert_eq!(place.read("runs"), "x\n");
}

#[test]
fn a_failed_command_leaves_the_old_output() {
    let place = Place::new("cached_failed");
    // The back-off is that of the command that fails. With the default of 5 s a slow machine ran the next one.
    let options = "k --ttl 100ms --stale 1h --jitter 0 --back-off 1h";
    assert_eq!(text(&run(&place, options, "echo old")), "old\n");
    std::thread::sleep(Duration::from_millis(150));
    let failed = run(&place, options, "echo half; echo x >> runs; exit 3");
    assert_eq!((code(failed.status), text(&failed)), (0, "old\n".into()));
    assert!(errors(&failed).contains("the command ended with 3"), "{}", errors(&failed));
    // The back-off: no other caller tries, and each one says why the output is old.
    let next = run(&place, "k --ttl 100ms --stale 1h --back-off 1h", "echo x >> runs");
    assert_eq!((code(next.status), text(&next)), (0, "old\n".into()));
    assert!(errors(&next).contains("the command ended with 3"), "{}", errors(&next));
    assert_eq!(place.read("runs"), "x\n");
}

#[test]
fn a_command_that_fails_without_an_old_output_gives_its_own() {
    let place = Place::new("cached_nothing");
    let failed = run(&place, "k --ttl 1h --negative 1h", "echo half; echo why >&2; exit 3");
    assert_eq!((code(failed.status), text(&failed)), (3, "half\n".into()));
    assert!(errors(&failed).contains("why"), "{}", errors(&failed));
    let next = run(&place, "k --ttl 1h --negative 1h", "echo x >> runs");
    assert_eq!((code(next.status), text(&next)), (3, String::new()));
    assert!(errors(&next).contains("the command ended with 3"), "{}", errors(&next));
    assert_eq!(place.read("runs"), "");
    // By default the next caller waits for the back-off, and tries again.
    assert_eq!(code(run(&place, "other --ttl 1h --back-off 200ms", "exit 4").status), 4);
    let again = run(&place, "other --ttl 1h", "echo fine");
    assert_eq!((code(again.status), text(&again)), (0, "fine\n".into()));
}

#[test]
fn others_get_the_old_output_at_once_or_wait_or_are_refused() {
    let place = Place::new("cached_stale");
    let fresh = "k --ttl 100ms --jitter 0 --stale 1h";
    assert_eq!(text(&run(&place, fresh, "echo old")), "old\n");
    std::thread::sleep(Duration::from_millis(150));
    let slow = "echo x >> runs; until [ -e go ]; do sleep 0.02; done; echo new";
    let mut refresh = Running::new(cached(&place, "k --ttl 1h --stale 1h", slow));
    place.until("cached/k", |seen| !seen["lock"]["held"].is_null());
    while place.read("runs").is_empty() {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(text(&run(&place, "k --ttl 1h --stale 1h", slow)), "old\n");
    assert_eq!(text(&run(&place, "k --ttl 1h --stale 1h --wait 100ms", slow)), "old\n");
    let refused = run(&place, "k --ttl 1h --skip", slow);
    assert_eq!(code(refused.status), 75, "{}", errors(&refused));
    let waits = Running::new(cached(&place, "k --ttl 1h --stale 1h --wait 1m", slow));
    place.until("cached/k", |seen| seen["lock"]["waiting"] == 1);
    std::fs::write(place.dir.join("go"), "").unwrap();
    assert_eq!(refresh.line(), "new");
    assert_eq!(refresh.end().0, 0);
    assert_eq!(waits.end().1, "new\n");
    assert_eq!(place.read("runs"), "x\n");
}

#[test]
fn a_killed_caller_is_taken_over_with_a_higher_fence() {
    let place = Place::new("cached_kill");
    let script =
        "echo $LOCKKEEPER_FENCE >> runs; test $(wc -l < runs) -gt 1 || sleep 60; echo $LOCKKEEPER_FENCE";
    let mut first = Running::new(cached(&place, "k --ttl 1h", script));
    while place.read("runs").is_empty() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let second = Running::new(cached(&place, "k --ttl 1h --quiet", script));
    place.until("cached/k", |seen| seen["lock"]["waiting"] == 1);
    first.signal(Signal::KILL);
    let (ended, out, _) = second.end();
    let runs: Vec<u64> = place.read("runs").lines().map(|line| line.parse().unwrap()).collect();
    assert!(ended == 0 && runs.len() == 2 && runs[1] > runs[0], "{runs:?}");
    assert_eq!(out, format!("{}\n", runs[1]));
    first.child.wait().unwrap();
}

#[test]
fn the_command_runs_again_when_the_ttl_is_over() {
    let place = Place::new("cached_ttl");
    assert_eq!(text(&run(&place, "k --ttl 200ms", COUNT)), "1\n");
    until(&place, "k --ttl 200ms", COUNT, "3\n");
}

#[test]
fn bad_input_is_refused_and_nothing_runs() {
    let place = Place::new("cached_bad");
    let long = "x".repeat(449);
    for options in [
        "k",
        "k --ttl 5",
        "k --ttl 0s",
        "k --ttl 5parsecs",
        "k --ttl 5m --stale -1s",
        "k --ttl 5m --lease 1ms",
        "k --ttl 5m --beta -1",
        "k --ttl 5m --beta nan",
        "k --ttl 5m --jitter 0.6",
        "k --ttl 5m --back-off 0s",
        "k --ttl 5m --negative 1ms",
        "k --ttl 5m --wait 1s --skip",
        &format!("{long} --ttl 5m"),
    ] {
        let refused = run(&place, options, "echo x >> runs");
        assert_eq!(code(refused.status), 64, "{options}: {}", errors(&refused));
        assert!(!place.db().exists(), "{options}: a store was made");
    }
    assert_eq!(place.read("runs"), "");
    let nested = "$LK cached k --ttl 1h -- echo inner";
    let mut command = cached(&place, "k --ttl 1h", nested);
    let told = command.env("LK", PROGRAM).output().unwrap();
    assert_eq!(code(told.status), 73, "a command that wants its own key: {}", errors(&told));
}
