//! The scenarios of `lockkeeper lab`, run as a user runs them: in each the fault fired, the naive way broke, and the safe one held.

mod common;
use common::*;

use std::process::Output;

use lockkeeper_testkit::servers::{only_with_full, require};
use rustix::process::Signal;
use serde_json::Value;

/// Runs a scenario in short, and returns its outcome.
fn run(scenario: &str) -> Value {
    run_with(scenario, &["--fast"])
}

fn run_with(scenario: &str, options: &[&str]) -> Value {
    let place = Place::new(&format!("lab_{scenario}"));
    // The lab takes no store from the environment: its default is a file of its own.
    let call = || place.lk(["lab", "run", scenario, "--json"]).args(options).output().unwrap();
    let mut output = call();
    // A machine that is too busy to renew a lease makes a run invalid: it proves nothing. A scenario whose fault never fires fails here.
    for _ in 0..3 {
        if output.status.code() != Some(2) {
            break;
        }
        eprintln!("{}", both(&output));
        output = call();
    }
    assert_eq!(output.status.code(), Some(0), "{scenario}: {}", both(&output));
    let outcome = json(&output);
    assert_eq!(outcome["verdict"], "expected", "{outcome}");
    for check in outcome["checks"].as_array().unwrap() {
        assert_eq!(check["holds"], true, "{check}");
    }
    outcome
}

fn both(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}\n{}", text(&output.stdout), text(&output.stderr))
}

/// The number of a count of one half.
fn count(outcome: &Value, half: usize, key: &str) -> f64 {
    let counts = outcome["halves"][half]["counts"].as_array().unwrap();
    let count = counts.iter().find(|count| count["key"] == key);
    count.unwrap_or_else(|| panic!("no {key}: {outcome}"))["number"].as_f64().unwrap()
}

#[test]
fn pause() {
    let outcome = run("pause");
    assert_eq!((count(&outcome, 0, "stale_writes"), count(&outcome, 0, "wrong_value")), (1.0, 1.0));
    assert_eq!((count(&outcome, 1, "stale_writes"), count(&outcome, 1, "wrong_value")), (0.0, 0.0));
    assert_eq!(count(&outcome, 1, "refused"), 1.0);
}

#[test]
fn crash() {
    let outcome = run("crash");
    assert_eq!(count(&outcome, 0, "whole_ttl"), 1.0);
    assert_eq!(count(&outcome, 1, "overlaps"), 0.0);
}

#[test]
fn overrun() {
    let outcome = run("overrun");
    assert_eq!((count(&outcome, 0, "lost_updates"), count(&outcome, 0, "overlaps")), (1.0, 1.0));
    assert_eq!((count(&outcome, 1, "lost_updates"), count(&outcome, 1, "overlaps")), (0.0, 0.0));
}

#[test]
fn unchecked_release() {
    let outcome = run("unchecked-release");
    assert_eq!((count(&outcome, 0, "freed"), count(&outcome, 1, "freed")), (2.0, 0.0));
    assert_eq!(count(&outcome, 1, "refused"), 1.0, "the store refused the late release");
}

#[test]
fn no_ttl() {
    let outcome = run("no-ttl");
    assert_eq!((count(&outcome, 0, "operators"), count(&outcome, 1, "operators")), (1.0, 0.0));
    assert_eq!(count(&outcome, 1, "done"), 3.0);
}

#[test]
fn cron() {
    let outcome = run("cron");
    assert_eq!((count(&outcome, 0, "settlements"), count(&outcome, 1, "settlements")), (12.0, 12.0));
    assert!(count(&outcome, 2, "settlements") >= 2.0, "{outcome}");
    assert_eq!(count(&outcome, 1, "overlaps"), 0.0, "the lock does what it can do");
    assert_eq!(count(&outcome, 3, "settlements"), 1.0);
}

#[test]
fn stampede() {
    let outcome = run("stampede");
    assert!(count(&outcome, 0, "queries") > 1.0, "{outcome}");
    assert_eq!((count(&outcome, 1, "queries"), count(&outcome, 1, "served")), (1.0, 24.0));
}

#[test]
fn deadlock() {
    let outcome = run("deadlock");
    assert_eq!((count(&outcome, 0, "done"), count(&outcome, 0, "stuck")), (0.0, 2.0));
    assert!((1..4).all(|half| count(&outcome, half, "done") == 2.0), "{outcome}");
    assert!(count(&outcome, 2, "gave_up") >= 1.0 && count(&outcome, 3, "refused") >= 1.0, "{outcome}");
}

#[test]
fn contention() {
    let outcome = run("contention");
    assert_eq!(count(&outcome, 0, "at_once"), 1.0);
    assert!(count(&outcome, 1, "at_once") > 1.0, "{outcome}");
}

#[test]
fn failover() {
    let Ok(_) = require("redis", "redis-server", "redis-server") else { return };
    let outcome = run("failover");
    assert_eq!((count(&outcome, 0, "both_held"), count(&outcome, 1, "both_held")), (1.0, 1.0));
    assert_eq!((count(&outcome, 0, "wrong_value"), count(&outcome, 1, "wrong_value")), (1.0, 0.0));
}

#[test]
fn redlock() {
    let Ok(_) = require("redis", "redis-server", "redis-server") else { return };
    let Ok(_) = require("cc", "cc", "gcc") else { return };
    let outcome = run("redlock");
    assert_eq!((count(&outcome, 0, "stale_writes"), count(&outcome, 1, "stale_writes")), (1.0, 0.0));
    assert_eq!(count(&outcome, 2, "granted_cut"), 5.0);
}

#[test]
fn partition() {
    let Ok(_) = require("zookeeper", "/usr/share/java/zookeeper.jar", "zookeeper") else { return };
    let outcome = run("partition");
    assert_eq!((count(&outcome, 0, "stale_writes"), count(&outcome, 1, "stale_writes")), (1.0, 0.0));
    assert_eq!(count(&outcome, 1, "overlaps"), 0.0, "the guard was first");
    assert_eq!((count(&outcome, 2, "still_held"), count(&outcome, 2, "granted_to_b")), (1.0, 0.0));
}

#[test]
fn gc() {
    let outcome = run("gc");
    let lost = (0..4).map(|half| count(&outcome, half, "lost_updates"));
    assert_eq!(lost.collect::<Vec<_>>(), [1.0, 0.0, 1.0, 0.0]);
}

#[test]
fn cas_or_lock() {
    let outcome = run("cas-or-lock");
    assert!(count(&outcome, 0, "lost_updates") > 0.0, "{outcome}");
    assert_eq!((count(&outcome, 1, "lost_updates"), count(&outcome, 2, "lost_updates")), (0.0, 0.0));
    assert!(count(&outcome, 1, "wasted") > 0.0, "{outcome}");
    assert_eq!((count(&outcome, 1, "wasted_alone"), count(&outcome, 2, "wasted")), (0.0, 0.0));
    assert_eq!(outcome["charts"].as_array().unwrap().len(), 2);
}

#[test]
fn bucket_or_lock() {
    let outcome = run("bucket-or-lock");
    assert_eq!(count(&outcome, 0, "during"), 0.0);
    assert!(count(&outcome, 1, "during") >= 20.0, "{outcome}");
}

#[test]
fn partitioned() {
    let outcome = run("partitioned");
    assert!(count(&outcome, 0, "left") > 0.0, "{outcome}");
    assert_eq!((count(&outcome, 1, "left"), count(&outcome, 1, "overlaps")), (0.0, 0.0));
    assert!(count(&outcome, 1, "taken_over") > 0.0, "{outcome}");
}

#[test]
fn heartbeat() {
    let outcome = run("heartbeat");
    assert_eq!((count(&outcome, 0, "stale_writes"), count(&outcome, 1, "stale_writes")), (1.0, 0.0));
    assert_eq!((count(&outcome, 2, "stuck"), count(&outcome, 3, "stuck")), (1.0, 0.0));
    assert_eq!(count(&outcome, 4, "kept"), 1.0);
}

#[test]
fn costume() {
    let outcome = run("costume");
    assert_eq!((count(&outcome, 0, "wrong_value"), count(&outcome, 1, "wrong_value")), (1.0, 0.0));
}

/// With the ttls that a user sees, and on each store that is installed.
#[test]
fn crash_on_each_store() {
    let Ok(()) = only_with_full() else { return };
    let Ok(_) = require("redis", "redis-server", "redis-server") else { return };
    let outcome = run_with("crash", &[]);
    assert!(outcome["halves"].as_array().unwrap().len() > 2, "{outcome}");
}

#[test]
fn the_list_has_all_scenarios_and_says_what_they_need() {
    let place = Place::new("lab_ls");
    let plain = text(&place.run("lab ls"));
    let lines: Vec<Value> =
        text(&place.run("lab ls --json")).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(plain.lines().count(), lines.len());
    for (line, shown) in lines.iter().zip(plain.lines()) {
        assert!(shown.starts_with(line["name"].as_str().unwrap()), "{shown}");
    }
    assert!(lines.len() == 18, "{plain}");
}

#[test]
fn a_wrong_name_and_a_store_of_one_process_are_refused() {
    let place = Place::new("lab_wrong");
    for (call, word) in [
        ("lab run nothing", "there is no scenario"),
        ("lab run pause --store memory:", "private to one process"),
    ] {
        let output = place.run(call);
        assert_eq!(output.status.code(), Some(64), "{}", both(&output));
        assert!(both(&output).contains(word), "{}", both(&output));
    }
}

#[test]
fn a_missing_server_is_named_with_the_command_that_installs_it() {
    let output = std::process::Command::new(PROGRAM)
        .args(["lab", "run", "failover", "--fast"])
        .env("PATH", "/nonexistent")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(69), "{}", both(&output));
    let said = both(&output);
    assert!(said.contains("failover needs Redis, which is not installed"), "{said}");
    assert!(said.contains("apt-get install --no-install-recommends redis-server"), "{said}");
}

/// The naive locks of the lab and the names of its locks must not stay in a server of the user, and a store that finds no deadlocks is
/// no reason to fail.
#[test]
fn a_store_of_the_user_keeps_no_lock() {
    let Ok(redis) = lockkeeper_testkit::servers::redis(Default::default()) else { return };
    let url = format!("redis://{}", redis.addr());
    let outcome = run_with("deadlock", &["--fast", "--store", &url]);
    assert_eq!(outcome["halves"].as_array().unwrap().len(), 3, "{outcome}");
    let keys = lockkeeper_testkit::servers::redis_call(redis.addr(), &["KEYS", "*account*"]).unwrap();
    assert_eq!(keys, "", "{keys}");
}

#[test]
fn the_report_is_a_page_of_its_own() {
    let place = Place::new("lab_html");
    let output = place.run("lab run pause --fast --quiet --html out.html");
    assert_eq!(output.status.code(), Some(0), "{}", both(&output));
    let html = place.read("out.html");
    assert!(html.starts_with("<!DOCTYPE html>") && html.trim_end().ends_with("</html>"));
    assert_eq!(html.matches("<svg").count(), 3, "the legend and a timeline for each half");
    assert!(html.contains("prefers-color-scheme: dark"));
    for word in ["<script", "http://", "https://", "<link", "<img", "url("] {
        assert!(!html.contains(word), "the page needs nothing else: {word}");
    }
    let said = both(&output);
    assert!(
        said.contains("stale write that the resource took") && said.contains("verdict: as expected"),
        "{said}"
    );
    assert_eq!(said.matches("SIGSTOP").count(), 0, "--quiet prints the outcome only: {said}");
}

#[test]
fn a_report_that_cannot_be_written_fails_before_the_run() {
    let place = Place::new("lab_unwritable");
    let output = place.run("lab run pause --html no/such/dir/out.html");
    assert_eq!(output.status.code(), Some(69), "{}", both(&output));
    assert!(!both(&output).contains("worker A"), "nothing was run: {}", both(&output));
}

#[test]
fn an_interrupt_ends_the_processes_and_removes_the_files() {
    let place = Place::new("lab_interrupt");
    let tmp = place.dir.join("tmp");
    std::fs::create_dir(&tmp).unwrap();
    let mut command = place.lk(["lab", "run", "no-ttl"]);
    command.env("TMPDIR", &tmp);
    let mut running = Running::new(command);
    while !running.line().contains("is killed") {}
    running.signal(Signal::INT);
    assert_eq!(running.end().0, 130);
    let left: Vec<_> = std::fs::read_dir(&tmp).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}
