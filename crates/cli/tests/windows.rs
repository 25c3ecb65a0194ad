//! One run per window: by whichever host comes first, and by another if that one dies.

mod common;
use common::*;
use rustix::process::Signal;
use serde_json::Value;

fn run(place: &Place, options: &str, script: &str) -> std::process::Output {
    let mut command = place.lk(["run", "nightly"]);
    command.args(options.split(' ')).args(["--", "sh", "-c", script]);
    command.output().unwrap()
}

/// A window so long that no test meets its end, unless it is very unlucky: then both sides of it are fine.
const LONG_WINDOW: &str = "--window 365d";
const NOTE: &str = "echo $LOCKKEEPER_WINDOW $LOCKKEEPER_FENCE >> runs";

#[test]
fn twelve_hosts_run_a_window_once() {
    let place = Place::new("window_twelve");
    let script = format!("{NOTE}; sleep 0.2");
    let hosts: Vec<_> =
        (0..12).map(|_| place.start(&format!("nightly --quiet {LONG_WINDOW}"), &script)).collect();
    for host in hosts {
        assert_eq!(host.end().0, 0);
    }
    assert_eq!(place.read("runs").lines().count(), 1);
    let late = run(&place, LONG_WINDOW, NOTE);
    assert_eq!(code(late.status), 0);
    assert!(errors(&late).contains("has been run already"), "{}", errors(&late));
    // Another job has windows of its own, and a failed run is a run.
    assert_eq!(code(place.start(&format!("other {LONG_WINDOW}"), "exit 9").child.wait().unwrap()), 9);
    assert_eq!(code(place.start(&format!("other {LONG_WINDOW}"), "exit 9").child.wait().unwrap()), 0);
}

#[test]
fn a_window_whose_runner_was_killed_is_run_by_another() {
    let place = Place::new("window_killed");
    let mut first = place.start(&format!("nightly {LONG_WINDOW}"), &format!("{NOTE}; echo on; sleep 60"));
    assert_eq!(first.line(), "on");
    first.signal(Signal::KILL);
    first.child.wait().unwrap();
    assert_eq!(code(run(&place, LONG_WINDOW, NOTE).status), 0);
    assert_eq!(code(run(&place, LONG_WINDOW, NOTE).status), 0);
    let runs = place.read("runs");
    let fences: Vec<u64> = runs.lines().map(|l| l.split(' ').nth(1).unwrap().parse().unwrap()).collect();
    assert!(fences.len() == 2 && fences[1] > fences[0], "{runs}");
}

/// Makes the record say that the newest window began this many seconds before the one of now.
fn set_back(place: &Place, windows: u64) -> u64 {
    let page: Value = serde_json::from_str(&text(&place.run("record get window/nightly"))).unwrap();
    let at = page["at_ms"].as_u64().unwrap() - windows * 3_600_000;
    let older = format!(r#"{{"at_ms":{at},"fence":{},"done":true}}"#, page["fence"]);
    assert!(place.lk(["record", "set", "window/nightly", &older]).output().unwrap().status.success());
    at
}

#[test]
fn missed_windows_are_told_and_caught_up_if_wanted() {
    let place = Place::new("window_missed");
    run(&place, "--window 1h", NOTE);
    set_back(&place, 4);
    let told = run(&place, "--window 1h", NOTE);
    // At the turn of an hour it is one more.
    assert!(
        errors(&told).contains("3 windows were missed") || errors(&told).contains("4 windows"),
        "{}",
        errors(&told)
    );
    assert_eq!(place.read("runs").lines().count(), 2, "told, and not run");
    set_back(&place, 5);
    let caught = run(&place, "--window 1h --catch-up 2", NOTE);
    assert_eq!(code(caught.status), 0);
    let runs = place.read("runs");
    let windows: Vec<&str> = runs.lines().skip(2).map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(windows.len(), 3, "two that were missed, and the one of now: {runs}");
    assert!(windows.is_sorted_by(|a, b| a < b), "{windows:?}");
}

#[test]
fn bad_calls_are_told_and_leave_nothing() {
    let place = Place::new("window_bad");
    for (options, says) in [
        ("--window 5", "add a unit"),
        ("--window 0s", "are possible"),
        ("--window 1h --shared", "cannot be used with"),
        ("--catch-up 3", "required"),
        ("--window 1h --catch-up 0", "0 is not in"),
    ] {
        let output = run(&place, options, "true");
        assert_eq!(code(output.status), 64, "{options}: {}", errors(&output));
        assert!(errors(&output).contains(says), "{options}: {}", errors(&output));
    }
    assert!(!place.db().exists(), "a bad call made a store");
}
