//! Partitions on the command line: one command for each, told to finish first, and taken over when its owner dies.

mod common;
use std::process::Command;

use common::*;
use rustix::process::Signal;
use serde_json::Value;

fn member(place: &Place, name: &str, options: &[&str], script: &str) -> Command {
    let mut command = place.lk(["partitions", "g", "--count", "4", "--member", name, "--quiet"]);
    command.args(options).args(["--", "sh", "-c", script]);
    command
}

/// A command that says which partition it has and with which fence, and stays until TERM.
const STAY: &str = "echo start $LOCKKEEPER_PARTITION $LOCKKEEPER_FENCE $LOCKKEEPER_PARTITIONS $$; \
    trap 'echo stop $LOCKKEEPER_PARTITION; exit 0' TERM; while :; do sleep 0.05; done";

fn status(place: &Place) -> Value {
    json(&place.run("partitions g --status --json"))
}

/// Waits until the member owns that many, and nothing moves.
fn until_owned(place: &Place, name: &str, count: u64) -> Value {
    for _ in 0..2400 {
        let seen = status(place);
        let owned = seen["members"].as_array().unwrap().iter().find(|member| member["name"] == name);
        let moving =
            seen["partitions"].as_array().unwrap().iter().any(|partition| partition["moving"] == true);
        if owned.is_some_and(|member| member["owned"] == count) && !moving {
            return seen;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    panic!("{name} does not own {count} after two minutes: {}", status(place));
}

/// The words of lines `start P FENCE COUNT PID`, one for each partition.
fn starts(running: &mut Running, count: usize) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    while found.len() < count {
        let line = running.line();
        if line.starts_with("start") {
            found.push(line.split(' ').map(str::to_owned).collect());
        }
    }
    found
}

#[test]
fn a_command_runs_for_each_partition_and_finishes_before_the_next_owner_starts() {
    let place = Place::new("partitions_share");
    let mut a = Running::new(member(&place, "a", &[], STAY));
    let mut first = starts(&mut a, 4);
    first.sort();
    let numbers: Vec<&str> = first.iter().map(|words| words[1].as_str()).collect();
    assert_eq!(numbers, ["0", "1", "2", "3"]);
    assert!(first.iter().all(|words| words[3] == "4"), "{first:?}");
    let mut b = Running::new(member(&place, "b", &[], STAY));
    for words in starts(&mut b, 2) {
        // The old command has ended, by itself and because it was told.
        let old = first.iter().find(|old| old[1] == words[1]).unwrap();
        assert!(!runs(&old[4]), "the old command of partition {} still runs", words[1]);
        let [old, new] = [old, &words].map(|words| words[2].parse::<u64>().unwrap());
        assert!(new > old, "the fence of partition {} is not newer", words[1]);
    }
    let seen = until_owned(&place, "a", 2);
    assert_eq!((&seen["count"], &seen["name"]), (&4.into(), &"g".into()));
    // The owner of a key is that of its partition.
    let of = json(&place.run("partitions g --of job-1 --json"));
    let number = of["partition"].as_u64().unwrap() as usize;
    assert_eq!(of["owner"]["member"], seen["partitions"][number]["owner"]["member"]);
    // Asked to end, a member finishes its commands and leaves.
    a.signal(Signal::TERM);
    let (ended, out, _) = a.end();
    assert_eq!(ended, 143);
    assert!(out.contains("stop"), "the commands were not told to finish: {out}");
    until_owned(&place, "b", 4);
    b.signal(Signal::TERM);
    assert_eq!(b.end().0, 143);
    // Nothing is left.
    assert!(text(&place.run("partitions g --status")).contains("no member"));
    assert_eq!(json(&place.run("ls partition --json"))["locks"], Value::Array(Vec::new()));
}

#[test]
fn a_command_that_does_not_finish_is_killed_when_the_grace_is_over() {
    let place = Place::new("partitions_grace");
    let script =
        "trap '' TERM; echo start $LOCKKEEPER_PARTITION $LOCKKEEPER_FENCE 4 $$; while :; do sleep 0.05; done";
    let mut a = Running::new(member(&place, "a", &["--grace", "300ms"], script));
    let first = starts(&mut a, 4);
    let mut b = Running::new(member(&place, "b", &[], STAY));
    for words in starts(&mut b, 2) {
        let old = first.iter().find(|old| old[1] == words[1]).unwrap();
        assert!(!runs(&old[4]), "the old command of partition {} still runs", words[1]);
    }
    // Only the commands of the partitions that moved were killed.
    until_owned(&place, "a", 2);
    assert_eq!(first.iter().filter(|words| runs(&words[4])).count(), 2);
    a.signal(Signal::TERM);
    assert_eq!(a.end().0, 143);
    b.signal(Signal::TERM);
    assert_eq!(b.end().0, 143);
}

#[test]
fn the_partitions_of_a_killed_member_go_to_the_others_and_its_commands_die() {
    let place = Place::new("partitions_kill");
    let mut a = Running::new(member(&place, "a", &["--ttl", "2s"], STAY));
    let first = starts(&mut a, 4);
    a.signal(Signal::KILL);
    let mut b = Running::new(member(&place, "b", &["--ttl", "2s"], STAY));
    assert_eq!(starts(&mut b, 4).len(), 4);
    first.iter().for_each(|words| until_gone(&words[4]));
    let seen = until_owned(&place, "b", 4);
    assert_eq!(seen["members"].as_array().unwrap().len(), 1);
    b.signal(Signal::TERM);
    assert_eq!(b.end().0, 143);
    a.child.wait().unwrap();
}

#[test]
fn what_a_command_started_in_the_background_ends_with_its_own_partition_only() {
    let place = Place::new("partitions_background");
    // A child that left the process group and lost its parent.
    let script = "setsid sh -c 'sleep 300 & echo start $LOCKKEEPER_PARTITION $LOCKKEEPER_FENCE 4 $!; exit 0' & \
        trap '' TERM; while :; do sleep 0.05; done";
    let mut a = Running::new(member(&place, "a", &["--grace", "200ms"], script));
    let first = starts(&mut a, 4);
    let mut b = Running::new(member(&place, "b", &[], STAY));
    let moved: Vec<String> = starts(&mut b, 2).into_iter().map(|words| words[1].clone()).collect();
    for words in &first {
        assert_eq!(runs(&words[4]), !moved.contains(&words[1]), "partition {}: {first:?}", words[1]);
    }
    a.signal(Signal::TERM);
    assert_eq!(a.end().0, 143);
    first.iter().for_each(|words| until_gone(&words[4]));
    b.signal(Signal::TERM);
    assert_eq!(b.end().0, 143);
}

#[test]
fn the_end_of_one_command_ends_the_membership() {
    let place = Place::new("partitions_end");
    let script = "test $LOCKKEEPER_PARTITION = 2 && exit 7; exec sleep 60";
    let done = member(&place, "a", &[], script).output().unwrap();
    assert_eq!(code(done.status), 7, "{}", errors(&done));
    assert!(text(&place.run("partitions g --status")).contains("no member"));
}

#[test]
fn a_second_process_with_the_name_of_a_member_takes_its_place() {
    let place = Place::new("partitions_name");
    let mut a = Running::new(member(&place, "w", &[], STAY));
    starts(&mut a, 4);
    let mut b = Running::new(member(&place, "w", &[], STAY));
    starts(&mut b, 4);
    assert_eq!(a.end().0, 76);
    b.signal(Signal::INT);
    assert_eq!(b.end().0, 130);
}

/// The locks of a process that another one has replaced under its name counted as those of the newer process.
#[test]
fn the_locks_of_a_replaced_process_are_not_those_of_its_successor() {
    let place = Place::new("partitions_replaced");
    let mut a = Running::new(member(&place, "w", &[], STAY));
    starts(&mut a, 4);
    a.stop(&place);
    let mut b = Running::new(member(&place, "w", &[], STAY));
    let seen = loop {
        let seen = status(&place);
        if seen["members"][0]["pid"] == b.child.id() {
            break seen;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    // The stopped process cannot release anything, and its leases last for half a minute.
    assert_eq!(seen["members"][0]["owned"], 0, "{seen}");
    for partition in seen["partitions"].as_array().unwrap() {
        assert_eq!(partition["owner"]["pid"], a.child.id(), "{seen}");
        assert_eq!(partition["moving"], true, "{seen}");
    }
    a.signal(Signal::CONT);
    starts(&mut b, 4);
    assert_eq!(a.end().0, 76);
    until_owned(&place, "w", 4);
    b.signal(Signal::TERM);
    assert_eq!(b.end().0, 143);
}

#[test]
fn bad_input_is_refused_and_nothing_is_written() {
    let place = Place::new("partitions_bad");
    let refused = |line: &str| {
        let done = place.run(line);
        assert_eq!(code(done.status), 64, "{line}: {}", errors(&done));
        assert!(!errors(&done).is_empty());
    };
    refused("partitions g --count 0 -- true");
    refused("partitions g --count 1000000 -- true");
    refused("partitions g --count -1 -- true");
    refused("partitions g --count many -- true");
    refused("partitions g -- true");
    refused("partitions g --count 4");
    refused("partitions g --count 4 --weight 0 -- true");
    refused("partitions g --count 4 --ttl 5 -- true");
    refused("partitions g --count 4 --grace 5parsecs -- true");
    refused("partitions g --status --of key");
    assert!(!place.db().exists(), "a store was made");
    refused(&format!("partitions {} --count 4 -- true", "x".repeat(449)));
    refused(&format!("partitions g --count 4 --member {} -- true", "x".repeat(129)));
    assert_eq!(json(&place.run("record ls --json"))["records"], Value::Array(Vec::new()));
    // Without members a key has a partition, but only if the count is known.
    assert_eq!(code(place.run("partitions g --of key").status), 66);
    assert_eq!(text(&place.run("partitions g --count 32 --of order-4711")), "partition 27 of 32: no owner\n");
    let mut a = Running::new(member(&place, "a", &[], STAY));
    starts(&mut a, 4);
    refused("partitions g --count 8 -- true");
    refused("partitions g --count 8 --status");
    a.signal(Signal::TERM);
    assert_eq!(a.end().0, 143);
}
