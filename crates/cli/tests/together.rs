//! One command for all owned partitions: told by a file and HUP, and never beside the next owner.

mod common;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::*;
use rustix::process::Signal;
use serde_json::Value;

/// Prints `start PID FILE`, and `list CONTENT` at its start and at each HUP, and says at once that a leaving partition is finished.
const OBEYS: &str = r#"
finish() { sed 's/"done":"/\n/g' "$LOCKKEEPER_PARTITIONS_FILE" | sed -n '2,$s/".*//p' | while read -r done; do : > "$done"; done; }
list() { echo "list $(cat "$LOCKKEEPER_PARTITIONS_FILE")"; finish; }
trap list HUP
trap 'echo stop; exit 0' TERM
echo "start $$ $LOCKKEEPER_PARTITIONS_FILE $LOCKKEEPER_PARTITIONS ${LOCKKEEPER_FENCE-none}"
list
while :; do sleep 0.05; done"#;

fn member(place: &Place, name: &str, options: &[&str], script: &str) -> Command {
    let mut command = place.lk(["partitions", "g", "--count", "4", "--together", "--member", name]);
    // The private directory is made here.
    command.env("TMPDIR", &place.dir);
    // A fence of a caller is not that of a partition.
    command.env("LOCKKEEPER_FENCE", "7");
    command.args(options).args(["--", "sh", "-c", script]);
    command
}

/// The words of the next line `start PID FILE COUNT FENCE`.
fn start(running: &mut Running) -> Vec<String> {
    loop {
        let line = running.line();
        assert!(!line.is_empty(), "it has ended");
        if line.starts_with("start") {
            return line.split(' ').map(str::to_owned).collect();
        }
    }
}

/// The number and the fence of each partition in the list.
fn listed(content: &Value, which: &str) -> BTreeMap<u64, u64> {
    let entry = |entry: &Value| (entry["number"].as_u64().unwrap(), entry["fence"].as_u64().unwrap());
    content[which].as_array().unwrap().iter().map(entry).collect()
}

fn read(file: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// Reads what the command prints until it was told of so many partitions, and of none that leaves.
fn told(running: &mut Running, count: usize) -> Value {
    loop {
        let line = running.line();
        assert!(!line.is_empty(), "it has ended, and was not told of {count} partitions");
        let Some(content) = line.strip_prefix("list ") else { continue };
        let content: Value = serde_json::from_str(content).unwrap();
        if listed(&content, "partitions").len() == count && listed(&content, "leaving").is_empty() {
            return content;
        }
    }
}

/// The owner of each partition, as the store has it.
fn owners(place: &Place) -> BTreeMap<u64, (String, u64)> {
    let seen = json(&place.run("partitions g --status --json"));
    let owned = seen["partitions"].as_array().unwrap().iter().filter(|entry| entry["owner"].is_object());
    owned
        .map(|entry| {
            let owner = &entry["owner"];
            let member = owner["member"].as_str().unwrap().to_owned();
            (entry["number"].as_u64().unwrap(), (member, owner["fence"].as_u64().unwrap()))
        })
        .collect()
}

fn until(what: &str, mut check: impl FnMut() -> bool) {
    let started = Instant::now();
    while !check() {
        assert!(started.elapsed() < LONG * 2, "it did not happen: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn nothing_is_left(place: &Place, file: &str) {
    assert!(!Path::new(file).parent().unwrap().exists(), "the private directory is left");
    assert!(text(&place.run("partitions g --status")).contains("no member"));
    assert_eq!(json(&place.run("ls partition --json"))["locks"], Value::Array(Vec::new()));
}

#[test]
fn one_command_is_told_of_joins_and_leaves_and_is_not_started_again() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new("together_share");
    let mut a = Running::new(member(&place, "a", &["--quiet"], OBEYS));
    let first = start(&mut a);
    assert_eq!((first[3].as_str(), first[4].as_str()), ("4", "none"));
    let all = told(&mut a, 4);
    assert_eq!((&all["group"], &all["count"], &all["member"]), (&"g".into(), &Value::from(4), &"a".into()));
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    let file = Path::new(&first[2]);
    assert_eq!((mode(file), mode(file.parent().unwrap())), (0o600, 0o700));
    // Half of them move, as soon as the command has said that they are finished: the grace is not over.
    let mut b = Running::new(member(&place, "b", &["--quiet", "--grace", "1h"], OBEYS));
    let second = start(&mut b);
    let (half, other) = (told(&mut a, 2), told(&mut b, 2));
    let [half, other] = [listed(&half, "partitions"), listed(&other, "partitions")];
    let before = listed(&all, "partitions");
    assert!(half.iter().all(|kept| before.get(kept.0) == Some(kept.1)), "{half:?} of {before:?}");
    assert!(other.iter().all(|(number, fence)| before[number] < *fence), "{other:?} after {before:?}");
    let numbers: BTreeSet<u64> = half.keys().chain(other.keys()).copied().collect();
    assert_eq!(numbers.len(), 4, "a partition has two owners, or none");
    // The one that leaves finishes, and the other is told; both commands are those of the beginning.
    b.signal(Signal::TERM);
    let (ended, out, _) = b.end();
    assert_eq!(ended, 143);
    assert!(out.contains("stop") && !out.contains("start"), "{out}");
    told(&mut a, 4);
    assert!(runs(&first[1]) && !runs(&second[1]));
    a.signal(Signal::TERM);
    let (ended, out, _) = a.end();
    assert!(ended == 143 && !out.contains("start"), "{ended}: {out}");
    nothing_is_left(&place, &first[2]);
    assert!(!Path::new(&second[2]).exists());
}

/// Says that nothing is finished: it reads its file, and works on.
const STUBBORN: &str = "trap '' HUP; echo start $$ $LOCKKEEPER_PARTITIONS_FILE; \
    trap 'echo stop; exit 0' TERM; trap : HUP; while :; do sleep 0.05; done";

#[test]
fn a_command_that_does_not_finish_in_its_grace_is_ended_before_the_next_owner_starts() {
    let place = Place::new("together_grace");
    let mut a = Running::new(member(&place, "a", &["--json", "--grace", "300ms"], STUBBORN));
    let first = start(&mut a);
    until("one member owns all", || listed(&read(&first[2]), "partitions").len() == 4);
    let mut b = Running::new(member(&place, "b", &["--quiet"], OBEYS));
    start(&mut b);
    assert!(!runs(&first[1]), "the old command still runs");
    // It is started again with what is left.
    let again = start(&mut a);
    assert_eq!(first[2], again[2]);
    until("each has its half", || listed(&read(&again[2]), "partitions").len() == 2);
    told(&mut b, 2);
    assert_eq!(owners(&place).values().filter(|(member, _)| member == "a").count(), 2);
    a.signal(Signal::HUP);
    let (ended, out, err) = a.end();
    assert_eq!(ended, 129, "HUP is an end of the member");
    assert!(out.contains("stop"), "the command gets TERM for it: {out}");
    let events: Vec<Value> = err.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let count = |event: &str| events.iter().filter(|object| object["event"] == event).count();
    assert_eq!((count("joined"), count("lost"), count("started"), count("left")), (1, 2, 2, 1), "{err}");
    assert!(count("owned") == 4 && count("revoked") >= 2 && count("released") == 2, "{err}");
    told(&mut b, 4);
    b.signal(Signal::TERM);
    assert_eq!(b.end().0, 143);
    nothing_is_left(&place, &first[2]);
}

#[test]
fn the_partitions_of_a_killed_member_go_to_the_others_and_its_command_dies() {
    let place = Place::new("together_kill");
    // A child that left the process group and lost its parent.
    let script = "setsid sh -c 'sleep 300 & echo start $! $LOCKKEEPER_PARTITIONS_FILE; exit 0' & \
        trap : HUP; while :; do sleep 0.05; done";
    let mut a = Running::new(member(&place, "a", &["--quiet", "--ttl", "2s"], script));
    let first = start(&mut a);
    let mut b = Running::new(member(&place, "b", &["--quiet", "--ttl", "2s"], OBEYS));
    start(&mut b);
    a.signal(Signal::KILL);
    told(&mut b, 4);
    until_gone(&first[1]);
    until("its private directory is removed", || !Path::new(&first[2]).parent().unwrap().exists());
    b.signal(Signal::TERM);
    assert_eq!(b.end().0, 143);
    a.child.wait().unwrap();
}

#[test]
fn a_member_that_is_stopped_past_its_lease_has_no_command_beside_the_next_owner() {
    let place = Place::new("together_stop");
    let mut a = Running::new(member(&place, "a", &["--quiet", "--ttl", "2s"], OBEYS));
    let first = start(&mut a);
    told(&mut a, 4);
    a.stop(&place);
    let mut b = Running::new(member(&place, "b", &["--quiet", "--ttl", "2s"], OBEYS));
    let second = start(&mut b);
    assert!(!runs(&first[1]), "the command of the stopped member still runs beside {second:?}");
    told(&mut b, 4);
    a.signal(Signal::CONT);
    // It joins again, and its command is started for its share.
    let again = start(&mut a);
    assert_ne!(first[1], again[1]);
    let mine = listed(&told(&mut a, 2), "partitions");
    told(&mut b, 2);
    for (number, fence) in mine {
        assert_eq!(owners(&place)[&number], ("a".to_owned(), fence));
    }
    for member in [a, b] {
        member.signal(Signal::TERM);
        assert_eq!(member.end().0, 143);
    }
    nothing_is_left(&place, &first[2]);
}

#[test]
fn a_partition_that_is_broken_ends_the_command_and_the_rest_goes_on() {
    let place = Place::new("together_break");
    let mut a = Running::new(member(&place, "a", &["--quiet", "--ttl", "3s"], OBEYS));
    let first = start(&mut a);
    let before = listed(&told(&mut a, 4), "partitions");
    assert_eq!(code(place.run("break partition/g/2 --now --yes --reason test").status), 0);
    let again = start(&mut a);
    assert!(!runs(&first[1]) && first[1] != again[1], "the command ran on");
    let after = listed(&told(&mut a, 4), "partitions");
    assert!(after[&2] > before[&2], "{after:?} after {before:?}");
    assert!([0, 1, 3].iter().all(|number| after[number] == before[number]), "{after:?} after {before:?}");
    a.signal(Signal::TERM);
    assert_eq!(a.end().0, 143);
}

#[test]
fn a_command_that_does_not_end_is_killed_when_the_grace_is_over() {
    let place = Place::new("together_stuck");
    let script = "trap '' TERM; echo start $$ $LOCKKEEPER_PARTITIONS_FILE; while :; do sleep 0.05; done";
    let mut a = Running::new(member(&place, "a", &["--quiet", "--grace", "300ms"], script));
    let first = start(&mut a);
    a.signal(Signal::TERM);
    assert_eq!(a.end().0, 143);
    assert!(!runs(&first[1]));
    nothing_is_left(&place, &first[2]);
}

#[test]
fn the_end_of_the_command_ends_the_membership() {
    let place = Place::new("together_end");
    let done =
        member(&place, "a", &["--quiet"], "echo $LOCKKEEPER_PARTITIONS_FILE; exit 7").output().unwrap();
    assert_eq!(code(done.status), 7, "{}", errors(&done));
    nothing_is_left(&place, text(&done).trim());
}

#[test]
fn half_given_options_are_refused_and_nothing_is_written() {
    let place = Place::new("together_bad");
    for line in [
        "partitions g --together -- true",
        "partitions g --count 4 --together",
        "partitions g --together --status",
        "partitions g --together --of key",
    ] {
        let done = place.run(line);
        assert_eq!(code(done.status), 64, "{line}: {}", errors(&done));
    }
    assert!(!place.db().exists(), "a store was made");
    // Without a place for the file nothing is left in the group.
    let mut command = member(&place, "a", &["--quiet"], "true");
    let done = command.env("TMPDIR", place.dir.join("missing")).output().unwrap();
    assert_eq!(code(done.status), 126, "{}", errors(&done));
    assert!(text(&place.run("partitions g --status")).contains("no member"), "a member is left");
}
