//! A list of items that several workers share: each done once, whichever worker is killed or stopped.

mod common;
use std::collections::BTreeSet;
use std::process::{Command, Output};

use common::*;
use rustix::process::Signal;
use serde_json::Value;

fn claim(place: &Place, options: &[&str], script: &str) -> Command {
    let mut command = place.lk(["claim", "work", "--poll", "100ms"]);
    command.args(options).args(["--", "sh", "-c", script]);
    command
}

fn list(place: &Place, items: impl IntoIterator<Item = String>) {
    let lines: String = items.into_iter().map(|item| format!("{item}\n")).collect();
    std::fs::write(place.dir.join("ids"), lines).unwrap();
}

fn status(place: &Place) -> Value {
    json(&place.run("claim work --status --json"))
}

/// Waits until a file has this many lines.
fn until_lines(place: &Place, file: &str, count: usize) -> Vec<String> {
    let started = std::time::Instant::now();
    loop {
        let lines: Vec<String> = place.read(file).lines().map(str::to_owned).collect();
        if lines.len() >= count {
            return lines;
        }
        assert!(started.elapsed() < LONG, "{file} has only {lines:?}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn workers_share_a_list_and_do_each_item_once() {
    let place = Place::new("claim_share");
    list(&place, (0..12).map(|n| format!("item {n}")));
    let script = "echo \"$LOCKKEEPER_ITEM|$LOCKKEEPER_FENCE|$LOCKKEEPER_ATTEMPT|$LOCKKEEPER_NAME\" >> runs";
    let options = ["--from", "ids", "--parallel", "3", "--quiet"];
    let workers: Vec<_> = (0..3).map(|_| Running::new(claim(&place, &options, script))).collect();
    for worker in workers {
        let (ended, out, err) = worker.end();
        assert_eq!((ended, out.as_str(), err.as_str()), (0, "", ""));
    }
    let runs = place.read("runs");
    let items: BTreeSet<&str> = runs.lines().map(|line| line.split('|').next().unwrap()).collect();
    assert_eq!((runs.lines().count(), items.len()), (12, 12), "{runs}");
    for line in runs.lines() {
        let [item, fence, attempt, name] = line.split('|').collect::<Vec<_>>()[..] else { panic!("{line}") };
        assert!(fence.parse::<u64>().unwrap() > 0);
        assert_eq!((attempt, name), ("1", format!("claim/work/{item}").as_str()));
    }
    assert_eq!(status(&place)["done"], 12);
    // The same list again is no work.
    assert_eq!(code(claim(&place, &options, script).output().unwrap().status), 0);
    assert_eq!(place.read("runs").lines().count(), 12);
}

#[test]
fn what_fails_is_tried_again_and_then_kept_apart() {
    let place = Place::new("claim_fail");
    list(&place, ["good", "bad"].map(str::to_owned));
    let script = "echo x >> \"runs-$LOCKKEEPER_ITEM\"; test $LOCKKEEPER_ITEM = good || exit 7";
    let rules = ["--from", "ids", "--max-attempts", "3", "--backoff", "0s", "--backoff-max", "0s", "--json"];
    let done = claim(&place, &rules, script).output().unwrap();
    assert_eq!(code(done.status), 7, "{}", errors(&done));
    assert_eq!((place.read("runs-good").lines().count(), place.read("runs-bad").lines().count()), (1, 3));
    let events: Vec<Value> = errors(&done).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let last = events.iter().rfind(|event| event["event"] == "failed").unwrap();
    assert_eq!(
        (&last["item"], &last["attempt"], &last["for_good"]),
        (&"bad".into(), &3.into(), &true.into())
    );
    let failed = json(&place.run("claim work --failed --json"));
    assert_eq!(
        (&failed["failed"][0]["item"], &failed["failed"][0]["error"]),
        (&"bad".into(), &"exit code 7".into())
    );
    assert!(text(&place.run("claim work --failed")).contains("exit code 7"));
    assert_eq!(status(&place)["failed"], 1);
    assert_eq!(code(place.run("claim work --retry good").status), 66);
    assert_eq!(code(place.run("claim work --retry bad").status), 0);
    assert_eq!(code(claim(&place, &rules, "exit 0").output().unwrap().status), 0);
    assert_eq!(status(&place)["done"], 2);
}

#[test]
fn a_killed_workers_item_goes_to_another_with_a_higher_fence() {
    let place = Place::new("claim_kill");
    list(&place, ["one".to_owned()]);
    let script = "echo \"$LOCKKEEPER_FENCE $$\" >> runs; test $LOCKKEEPER_ATTEMPT -gt 1 || sleep 60";
    let mut first = Running::new(claim(&place, &["--from", "ids", "--lease", "1s"], script));
    let began = until_lines(&place, "runs", 1);
    first.signal(Signal::KILL);
    first.child.wait().unwrap();
    until_gone(began[0].split(' ').nth(1).unwrap());
    let second = claim(&place, &["--from", "ids", "--quiet"], script).output().unwrap();
    assert_eq!(code(second.status), 0, "{}", errors(&second));
    let fences: Vec<u64> = until_lines(&place, "runs", 2)
        .iter()
        .map(|line| line.split(' ').next().unwrap().parse().unwrap())
        .collect();
    assert!(fences[1] > fences[0], "{fences:?}");
}

/// The worker is stopped past its lease. Its command must not run on: the watchdog ends it, and leaves the others alone.
#[test]
fn the_command_of_a_stopped_worker_is_ended_with_its_lease() {
    let place = Place::new("claim_stop");
    list(&place, ["one".to_owned()]);
    let script = "echo \"$$\" >> runs; test $LOCKKEEPER_ATTEMPT -gt 1 || sleep 60";
    let first = Running::new(claim(&place, &["--from", "ids", "--lease", "2s"], script));
    let began = until_lines(&place, "runs", 1);
    first.stop(&place);
    until_gone(&began[0]);
    let second = claim(&place, &["--from", "ids", "--quiet"], script).output().unwrap();
    assert_eq!(code(second.status), 0, "{}", errors(&second));
    first.signal(Signal::CONT);
    let (ended, _, err) = first.end();
    assert_eq!(ended, 0, "everything is settled for it, too: {err}");
    assert!(err.contains("the lease was lost"), "{err}");
    assert_eq!(place.read("runs").lines().count(), 2);
}

/// What the command has started goes with it, also what has left its process group.
#[test]
fn a_lost_lease_ends_the_command_and_what_it_has_started() {
    let place = Place::new("claim_lost");
    list(&place, ["one".to_owned()]);
    // The item is free when its lease is removed, so the worker claims it again.
    let script = "test $LOCKKEEPER_ATTEMPT = 1 || exit 0
        setsid sleep 300 & echo \"$!\" >> pids; echo \"$$\" >> pids; sleep 300";
    let worker = Running::new(claim(&place, &["--from", "ids", "--lease", "5s"], script));
    let pids = until_lines(&place, "pids", 2);
    assert_eq!(code(place.run("record rm claim-lease/004/work/one").status), 0);
    let (ended, _, err) = worker.end();
    assert!(ended == 0 && err.contains("the lease was lost"), "{err}");
    pids.iter().for_each(|pid| until_gone(pid));
}

/// A watchdog that was killed was neither noticed nor replaced: nothing ended the command of a worker that was then stopped, and a killed
/// worker left what its command had started.
#[test]
fn the_watchdog_of_an_item_is_replaced() {
    let place = Place::new("claim_watchdog");
    list(&place, ["one".to_owned()]);
    let script = "setsid sleep 300 & echo \"$!\" >> pids; echo \"$$\" >> pids; sleep 300";
    let mut worker = Running::new(claim(&place, &["--from", "ids"], script));
    let pids = until_lines(&place, "pids", 2);
    let first = until_watched(worker.pid(), None);
    rustix::process::kill_process(first, Signal::KILL).unwrap();
    until_watched(worker.pid(), Some(first));
    worker.signal(Signal::KILL);
    worker.child.wait().unwrap();
    pids.iter().for_each(|pid| until_gone(pid));
}

/// A lost lease ends the processes of its own command, and not what the command of an earlier item has left behind.
#[test]
fn a_lost_lease_leaves_the_processes_of_earlier_items_alone() {
    let place = Place::new("claim_earlier");
    list(&place, ["one", "two"].map(str::to_owned));
    let script = "test -e left || { setsid sleep 300 >/dev/null 2>&1 & echo $! >left; exit 0; }
        test $LOCKKEEPER_ATTEMPT = 1 || exit 0; echo $LOCKKEEPER_ITEM >second; sleep 300";
    let worker = Running::new(claim(&place, &["--from", "ids", "--lease", "5s"], script));
    let second = until_lines(&place, "second", 1).remove(0);
    assert_eq!(code(place.run(&format!("record rm claim-lease/004/work/{second}")).status), 0);
    let (ended, _, err) = worker.end();
    assert!(ended == 0 && err.contains("the lease was lost"), "{err}");
    let left = place.read("left");
    assert!(runs(&left), "it was ended with a command that had not started it");
    let left = rustix::process::Pid::from_raw(left.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process(left, Signal::KILL).unwrap();
}

#[test]
fn a_lease_lasts_for_as_long_as_the_command() {
    let place = Place::new("claim_extend");
    list(&place, ["one", "two"].map(str::to_owned));
    // The second one waits here for its turn, with its lease extended as well.
    let script = "echo x >> runs; while ! test -e go; do sleep 0.05; done";
    let options = ["--from", "ids", "--lease", "5s", "--batch", "2"];
    let first = Running::new(claim(&place, &options, script));
    until_lines(&place, "runs", 1);
    std::thread::sleep(std::time::Duration::from_millis(5500));
    let rival = claim(&place, &["--from", "ids", "--skip"], "echo rival >> runs").output().unwrap();
    assert_eq!(code(rival.status), 0);
    std::fs::write(place.dir.join("go"), "").unwrap();
    let (ended, _, err) = first.end();
    assert_eq!(ended, 0, "{err}");
    assert!(!place.read("runs").contains("rival"), "{}{err}", place.read("runs"));
}

#[test]
fn a_signal_ends_a_worker_and_gives_its_items_back() {
    let place = Place::new("claim_signal");
    list(&place, ["one", "two"].map(str::to_owned));
    let script = "echo x >> runs; sleep 60";
    let worker = Running::new(claim(&place, &["--from", "ids", "--batch", "2"], script));
    until_lines(&place, "runs", 1);
    worker.signal(Signal::TERM);
    assert_eq!(worker.end().0, 128 + 15);
    let free = status(&place);
    assert_eq!((&free["waiting"], &free["taken"]), (&2.into(), &0.into()), "{free}");
    let next =
        claim(&place, &["--from", "ids", "--quiet"], "echo $LOCKKEEPER_ATTEMPT >> next").output().unwrap();
    assert_eq!((code(next.status), place.read("next").as_str()), (0, "1\n1\n"), "the attempts do not count");
}

#[test]
fn bad_calls_are_told_and_leave_nothing() {
    let place = Place::new("claim_bad");
    list(&place, ["one".to_owned()]);
    let run = |options: &[&str]| -> Output { claim(&place, options, "true").output().unwrap() };
    for (options, says) in [
        (&[][..], "--from"),
        (&["--from", "nowhere"], "No such file"),
        (&["--from", "ids", "--parallel", "0"], "0 is not in"),
        (&["--from", "ids", "--batch", "1001"], "1001 is not in"),
        (&["--from", "ids", "--max-attempts", "0"], "0 is not in"),
        (&["--from", "ids", "--lease", "10"], "add a unit"),
        (&["--from", "ids", "--lease", "1ms"], "are possible"),
        (&["--from", "ids", "--backoff", "10m"], "longer than --backoff-max"),
        (&["--from", "ids", "--keep", "0s"], "are possible"),
        (&["--status"], "cannot be used with"),
    ] {
        let output = run(options);
        assert_eq!(code(output.status), 64, "{options:?}: {}", errors(&output));
        assert!(errors(&output).contains(says), "{options:?}: {}", errors(&output));
    }
    assert!(!place.db().exists(), "a bad call made a store");
    list(&place, ["x".repeat(321)]);
    let output = run(&["--from", "ids"]);
    assert_eq!(code(output.status), 64);
    assert!(errors(&output).contains("320 are allowed"), "{}", errors(&output));
    assert_eq!(text(&place.run("record ls")), "");
    let missing = place.lk(["claim", "work", "--from", "ids", "--", "no-such-command"]).output().unwrap();
    assert_eq!(code(missing.status), 127);
    let mut redlock = place.lk(["claim", "work", "--from", "ids", "--store", "memory:"]);
    assert_eq!(code(redlock.args(["--", "true"]).output().unwrap().status), 64, "the list is still bad");
}
