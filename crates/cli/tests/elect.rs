//! Leaders on the command line: one at a time, told to others, replaced when they die.

mod common;
use std::process::Command;

use common::*;
use lockkeeper_testkit::servers::{self, EtcdOptions, PostgresOptions, RedisOptions, TempDir};
use rustix::process::Signal;

fn elect(place: &Place, options: &[&str], script: &str) -> Command {
    let mut command = place.lk(["elect", "e", "--quiet"]);
    command.args(options).args(["--", "sh", "-c", script]);
    command
}

/// A leader that says its term and its pid, and stays.
const STAY: &str = "echo $LOCKKEEPER_TERM; echo $$ > pid; sleep 60";

#[test]
fn the_next_candidate_leads_when_the_leader_is_killed() {
    let place = Place::new("elect_kill");
    let mut observer = Running::new(place.lk(["elect", "e", "--observe"]));
    let mut first = Running::new(elect(&place, &["--value", "one"], STAY));
    let old: u64 = first.line().parse().unwrap();
    assert_eq!(observer.line(), format!("term {old}  one"));
    let mut second = Running::new(elect(&place, &["--value", "two"], STAY));
    place.until("election/e", |seen| seen["lock"]["waiting"] == 1);
    let pid = place.read("pid");
    first.signal(Signal::KILL);
    let new: u64 = second.line().parse().unwrap();
    assert!(new > old);
    until_gone(&pid);
    assert_eq!(observer.line(), format!("term {new}  two"));
    // Asked to end, the command ends, and the leader resigns.
    second.signal(Signal::TERM);
    assert_eq!(second.end().0, 143);
    assert_eq!(observer.line(), format!("term {new}  resigned"));
    assert!(place.show("election/e")["lock"].is_null());
    observer.signal(Signal::INT);
    assert_eq!(observer.end().0, 130);
    first.child.wait().unwrap();
}

#[test]
fn a_leader_that_loses_its_term_ends_its_command_and_campaigns_again() {
    let place = Place::new("elect_lost");
    let script = "trap '' TERM; echo $LOCKKEEPER_TERM; while :; do sleep 0.1; done";
    let mut leader = Running::new(elect(&place, &["--ttl", "1s", "--grace", "100ms"], script));
    let old: u64 = leader.line().parse().unwrap();
    assert!(place.run("break election/e --reason test").status.success());
    let new: u64 = leader.line().parse().unwrap();
    assert!(new > old, "{new} after {old}");
    leader.signal(Signal::INT);
    leader.signal(Signal::INT);
    // The second one may come before the first was passed on.
    let pid = leader.pid();
    std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(500));
        let _ = rustix::process::kill_process(pid, Signal::INT);
    });
    let (ended, _, _) = leader.end();
    assert!(ended == 137 || ended == 130, "{ended}");
}

#[test]
fn its_own_end_is_the_commands_and_it_resigns() {
    let place = Place::new("elect_end");
    let done = elect(&place, &[], "exit 7").output().unwrap();
    assert_eq!(code(done.status), 7);
    assert!(place.show("election/e")["lock"].is_null());
}

#[test]
fn the_file_to_resume_with_is_a_secret_of_one_process() {
    let place = Place::new("elect_resume");
    let mut leader = Running::new(elect(&place, &["--resume", "proof"], STAY));
    leader.line();
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(place.dir.join("proof")).unwrap().permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);
    let second = elect(&place, &["--resume", "proof"], STAY).output().unwrap();
    assert_eq!(code(second.status), 75, "{}", errors(&second));
    assert!(errors(&second).contains("another process uses it"));
    leader.signal(Signal::KILL);
    leader.child.wait().unwrap();
    assert!(place.dir.join("proof").exists(), "killed, it leaves what it needs to go on");
    let again = elect(&place, &["--resume", "proof"], "true").output().unwrap();
    assert_eq!(code(again.status), 0, "{}", errors(&again));
    assert!(!place.dir.join("proof").exists(), "resigned, it has nothing to resume");
}

/// Kills a leader, while another candidate waits, and starts it again: the terms before and after, and that of the waiting candidate.
fn killed_and_started_again(name: &str, store: &str) -> [u64; 3] {
    let place = Place::new(name);
    let lead = |file: &str| {
        let mut command = elect(&place, &["--resume", file, "--ttl", "30s"], STAY);
        command.env("LOCKKEEPER_STORE", store);
        Running::new(command)
    };
    let mut first = lead("proof");
    let old = first.line().parse().unwrap();
    let mut waits = lead("other");
    let waiting = || {
        let mut show = place.lk(["show", "election/e", "--json"]);
        json(&show.env("LOCKKEEPER_STORE", store).output().unwrap())["lock"]["waiting"].as_u64()
    };
    while waiting() != Some(1) {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let command = place.read("pid");
    first.signal(Signal::KILL);
    first.child.wait().unwrap();
    // What it had started goes with it: the same term must not have two commands.
    until_gone(&command);
    let mut again = lead("proof");
    let (new, next);
    if store.starts_with("sqlite:") {
        // The store saw the death, and the waiting candidate was elected.
        next = waits.line().parse().unwrap();
        waits.signal(Signal::TERM);
        new = again.line().parse().unwrap();
    } else {
        new = again.line().parse().unwrap();
        again.signal(Signal::TERM);
        next = waits.line().parse().unwrap();
    }
    for mut leader in [again, waits] {
        leader.signal(Signal::TERM);
        leader.child.wait().unwrap();
    }
    [old, new, next]
}

/// Killed and started again within its ttl, a leader goes on with its term, and the waiting candidate is next.
fn goes_on(name: &str, store: &str) {
    let [old, new, next] = killed_and_started_again(name, store);
    assert!(new == old && next > old, "{old}, then {new}, then {next}");
}

#[test]
fn a_leader_that_was_killed_goes_on_with_its_term_on_redis() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    goes_on("elect_redis", &format!("redis://{}", server.addr()));
}

#[test]
fn a_leader_that_was_killed_goes_on_with_its_term_on_etcd() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    goes_on("elect_etcd", &format!("etcd://{}", server.addr()));
}

#[test]
fn a_leader_that_was_killed_goes_on_with_its_term_on_postgres() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    goes_on("elect_postgres", &format!("postgres://postgres@{}/postgres", server.addr()));
}

#[test]
fn on_a_file_the_death_is_seen_and_the_next_one_leads() {
    let dir = TempDir::new("elect-file");
    let store = format!("sqlite:{}", dir.join("locks.db").display());
    let [old, new, next] = killed_and_started_again("elect_file", &store);
    assert!(old < next && next < new, "{old}, then {next}, then {new}");
}

#[test]
fn bad_calls_are_told_and_leave_nothing() {
    let place = Place::new("elect_bad");
    std::fs::write(place.dir.join("open"), "").unwrap();
    std::fs::set_permissions(place.dir.join("open"), std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .unwrap();
    for (words, says) in [
        (&["elect", "", "--", "true"][..], "empty"),
        (&["elect", "e"], "required"),
        (&["elect", "e", "--observe", "--", "true"], "cannot be used with"),
        (&["elect", "e", "--ttl", "3", "--", "true"], "add a unit"),
        (&["elect", "e", "--resume", "open", "--", "true"], "other users may read it"),
        (&["elect", "e", "--resume", "no/such/dir", "--", "true"], "No such file"),
    ] {
        let output = place.lk(words).output().unwrap();
        assert_eq!(code(output.status), 64, "{words:?}: {}", errors(&output));
        assert!(errors(&output).contains(says), "{words:?}: {}", errors(&output));
    }
    assert!(!place.db().exists(), "a bad call made a store");
}
