//! The small scheduler: each time that is due is run by one of many.

mod common;
use std::io::{BufRead, BufReader};

use common::*;
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn bad_calls_are_told_and_leave_nothing() {
    let place = Place::new("cron_bad");
    for (words, says) in [
        (&["cron", "job", "--every", "0 2 * *", "--", "true"][..], "4 fields"),
        (&["cron", "job", "--every", "61 * * * *", "--", "true"], "no minute"),
        (&["cron", "job", "--every", "0 0 30 feb *", "--", "true"], "never due"),
        (&["cron", "job", "--every", "* * * * *", "--zone", "Mars/Base", "--", "true"], "--zone Mars/Base"),
        (&["cron", "job", "--every", "* * * * *", "--catch-up", "0", "--", "true"], "0 is not in"),
        (&["cron", "job", "--", "true"], "required"),
    ] {
        let output = place.lk(words).output().unwrap();
        assert_eq!(code(output.status), 64, "{words:?}: {}", errors(&output));
        assert!(errors(&output).contains(says), "{words:?}: {}", errors(&output));
    }
    assert!(!place.db().exists(), "a bad call made a store");
}

#[test]
fn a_signal_ends_the_wait_for_the_next_time() {
    let place = Place::new("cron_signal");
    let mut cron = place.lk(["cron", "job", "--every", "0 0 29 feb *", "--", "true"]);
    cron.env("LOCKKEEPER_LOG", "off");
    let mut running = Running::new(cron);
    until_caught(&mut running.child, Signal::TERM);
    running.signal(Signal::TERM);
    assert_eq!(running.end().0, 143);
}

/// What counts is the signal. An exit code of 143 ended the scheduler, and TERM did not end it if the command ended cleanly.
/// Takes up to a minute: that is the shortest schedule there is.
#[test]
fn a_signal_ends_the_scheduler_and_an_exit_code_does_not() {
    let place = Place::new("cron_ends");
    let start = |job: &str, script: &str| {
        let mut cron = place.lk(["cron", job, "--json", "--every", "* * * * *", "--", "sh", "-c", script]);
        // The events of the scheduler and the lines of its command, in one stream.
        cron.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let mut by_code = start("code", "exit 143");
    let mut by_signal = start("signal", "trap 'exit 0' TERM; echo up; while :; do sleep 0.02; done");
    // The store is locked up when the signal comes. One command ends at once, and that cannot be written down; the other has to be killed.
    let in_outages = ["trap 'exit 0' TERM", "trap '' TERM"].map(|trap| {
        let place = Place::new(&format!("cron_outage_{}", trap.len()));
        let script = format!("{trap}; echo up; while :; do sleep 0.02; done");
        let cron = ["cron", "job", "--ttl", "2s", "--every", "* * * * *", "--", "sh", "-c", &script];
        let cron = Running::new(place.lk(cron));
        (place, cron)
    });
    // Two schedulers of one job: the second waits for the lock when the signal comes.
    let shared = Place::new("cron_waits");
    let both = [(); 2].map(|()| {
        let script = "while :; do sleep 0.02; done";
        Running::new(shared.lk(["cron", "job", "--every", "* * * * *", "--", "sh", "-c", script]))
    });
    let mut events = BufReader::new(by_code.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut until = |event: &str| {
        let wanted = format!("\"event\":\"{event}\"");
        events.find(|line| line.contains(&wanted)).unwrap_or_else(|| panic!("it ended without {event}"))
    };
    until("next");
    assert!(until("window").contains("143"));
    until("next");
    let pid = |child: &std::process::Child| Pid::from_raw(child.id() as i32).unwrap();
    kill_process(pid(&by_code), Signal::TERM).unwrap();
    assert_eq!(code(by_code.wait().unwrap()), 143);
    for (place, mut cron) in in_outages {
        assert_eq!(cron.line(), "up");
        let store = rusqlite::Connection::open(place.db()).unwrap();
        store.busy_timeout(LONG).unwrap();
        store.execute_batch("BEGIN IMMEDIATE").unwrap();
        cron.signal(Signal::TERM);
        let end = std::time::Instant::now() + LONG;
        while cron.child.try_wait().unwrap().is_none() {
            assert!(std::time::Instant::now() < end, "it goes on, and forgets the signal");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(cron.end().0, 143);
    }
    let holder =
        shared.until("job", |seen| seen["lock"]["waiting"] == 1)["lock"]["held"][0]["holder"]["pid"].clone();
    let (holds, mut waits): (Vec<_>, Vec<_>) = both.into_iter().partition(|cron| holder == cron.child.id());
    let outage = StoreOutage::begin(&shared);
    // The store would answer after this test has given up.
    outage.feign_progress(&shared);
    waits[0].signal(Signal::TERM);
    let began = std::time::Instant::now();
    while waits[0].child.try_wait().unwrap().is_none() {
        assert!(began.elapsed() < LONG / 2, "it waits for the store, and forgets the signal");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    drop(outage);
    assert_eq!(waits.remove(0).end().0, 143);
    for cron in holds {
        cron.signal(Signal::TERM);
        assert_eq!(cron.end().0, 143);
    }
    let mut line = String::new();
    BufReader::new(by_signal.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "up\n");
    kill_process(pid(&by_signal), Signal::TERM).unwrap();
    assert_eq!(code(by_signal.wait().unwrap()), 143);
}

/// Takes two minutes and a bit: a minute is the shortest schedule there is.
#[test]
#[ignore = "long: ./scripts/test --full runs it"]
fn three_hosts_run_each_minute_once_and_take_over_from_one_that_is_killed() {
    let place = Place::new("cron_minutes");
    let script =
        "echo $LOCKKEEPER_WINDOW $LOCKKEEPER_FENCE >> runs; sleep 1; echo $LOCKKEEPER_WINDOW >> ends";
    let host = || {
        let mut cron = place.lk(["cron", "job", "--quiet", "--every", "* * * * *", "--catch-up", "5"]);
        cron.args(["--", "sh", "-c", script]);
        Running::new(cron)
    };
    let hosts = [host(), host(), host()];
    // The one that runs the first minute is killed in the middle of it.
    while !place.dir.join("runs").exists() {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let runner = place.show("job")["lock"]["held"][0]["holder"]["pid"].as_u64().unwrap() as i32;
    hosts.iter().find(|host| host.pid().as_raw_pid() == runner).unwrap().signal(Signal::KILL);
    std::thread::sleep(std::time::Duration::from_secs(65));
    for host in hosts.iter().filter(|host| host.pid().as_raw_pid() != runner) {
        host.signal(Signal::TERM);
    }
    let mut ends: Vec<i32> = hosts.into_iter().map(|host| host.end().0).collect();
    ends.sort();
    assert_eq!(ends, [-9, 143, 143]);
    let (runs, ends) = (place.read("runs"), place.read("ends"));
    let fences: Vec<u64> =
        runs.lines().map(|line| line.split(' ').nth(1).unwrap().parse().unwrap()).collect();
    assert!(fences.is_sorted_by(|a, b| a < b), "{runs}");
    let windows: Vec<&str> = runs.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(windows[0], windows[1], "the minute that was broken off is run again: {runs}");
    assert!(windows.len() >= 3 && windows[1..].is_sorted_by(|a, b| a < b), "a minute was run twice: {runs}");
    assert_eq!(ends.lines().collect::<Vec<_>>(), windows[1..], "what was broken off did not end");
}
