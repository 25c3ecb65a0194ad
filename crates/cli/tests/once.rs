//! A command that is run once under a key: the same bytes and exit code for every caller, whichever process is killed meanwhile.

mod common;
use std::process::{Command, Output};

use common::*;
use rustix::process::Signal;

fn once(place: &Place, options: &[&str], script: &str) -> Command {
    let mut command = place.lk(["once"]);
    command.args(options).args(["--", "sh", "-c", script]);
    command
}

fn run(place: &Place, options: &[&str], script: &str) -> Output {
    once(place, options, script).output().unwrap()
}

#[test]
fn later_calls_get_the_same_bytes_and_exit_code() {
    let place = Place::new("once_replay");
    let script = r"printf 'out\000\377\n'; printf 'err\n' >&2; echo x >> runs; exit 3";
    let first = run(&place, &["k", "--keep-failures"], script);
    assert_eq!(code(first.status), 3);
    assert_eq!((&first.stdout[..], &first.stderr[..]), (&b"out\0\xff\n"[..], &b"err\n"[..]));
    for _ in 0..3 {
        let again = run(&place, &["k", "--keep-failures"], script);
        assert_eq!(
            (again.status, again.stdout, again.stderr),
            (first.status, first.stdout.clone(), first.stderr.clone())
        );
    }
    assert_eq!(place.read("runs"), "x\n");
}

#[test]
fn a_mebibyte_of_each_stream_comes_back_and_what_was_cut_is_told() {
    let place = Place::new("once_large");
    let script = "head -c 1048576 /dev/urandom; head -c 1048576 /dev/urandom >&2; echo x >> runs";
    let first = run(&place, &["exact"], script);
    assert_eq!((first.stdout.len(), first.stderr.len()), (1 << 20, 1 << 20));
    let again = run(&place, &["exact"], script);
    assert!(again.stdout == first.stdout && again.stderr == first.stderr, "other bytes came back");
    assert_eq!(place.read("runs"), "x\n");

    let first = run(&place, &["more"], "head -c 1048577 /dev/zero");
    assert_eq!(first.stdout.len(), 1_048_577, "what is printed now is not cut");
    assert!(errors(&first).contains("only the first MiB of stdout is kept"), "{}", errors(&first));
    let again = run(&place, &["more"], "head -c 1048577 /dev/zero");
    assert_eq!(again.stdout.len(), 1 << 20);
    assert!(errors(&again).contains("only the first MiB of stdout is kept"), "{}", errors(&again));
}

#[test]
fn all_who_ask_at_once_share_one_run() {
    let place = Place::new("once_crowd");
    let script = "echo x >> runs; sleep 0.5; echo $LOCKKEEPER_FENCE";
    let callers: Vec<_> = (0..8).map(|_| Running::new(once(&place, &["k", "--quiet"], script))).collect();
    let ends: Vec<_> = callers.into_iter().map(Running::end).collect();
    assert!(ends.iter().all(|end| end == &ends[0] && end.0 == 0), "{ends:?}");
    assert_eq!(place.read("runs"), "x\n");
}

#[test]
fn a_killed_runner_is_taken_over_with_a_higher_fence() {
    let place = Place::new("once_kill");
    let script =
        "echo $LOCKKEEPER_FENCE; echo $LOCKKEEPER_FENCE >> runs; test $(wc -l < runs) -gt 1 || sleep 60";
    let mut first = Running::new(once(&place, &["k"], script));
    let old: u64 = first.line().parse().unwrap();
    let second = Running::new(once(&place, &["k", "--quiet"], script));
    place.until("once/k", |seen| seen["lock"]["waiting"] == 1);
    first.signal(Signal::KILL);
    let (ended, out, _) = second.end();
    let new: u64 = out.trim().parse().unwrap();
    assert!(ended == 0 && new > old, "{new} after {old}");
    let third = run(&place, &["k"], script);
    assert_eq!(text(&third), out, "the result that counts is the newer one");
    assert_eq!(place.read("runs").lines().count(), 2);
    first.child.wait().unwrap();
}

#[test]
fn a_failure_is_run_again_and_another_command_is_refused() {
    let place = Place::new("once_failure");
    let script = "echo x >> runs; test $(wc -l < runs) -gt 1";
    assert_eq!(code(run(&place, &["k"], script).status), 1);
    assert_eq!(code(run(&place, &["k"], script).status), 0);
    assert_eq!(code(run(&place, &["k"], script).status), 0);
    assert_eq!(place.read("runs"), "x\nx\n");
    let other = run(&place, &["k"], "echo something else");
    assert_eq!((code(other.status), text(&other).as_str()), (64, ""));
    assert!(errors(&other).contains("another request"), "{}", errors(&other));
    let told = run(&place, &["same", "--fingerprint", "v1"], "echo one");
    let same = run(&place, &["same", "--fingerprint", "v1"], "echo two");
    assert_eq!((text(&told), text(&same)), ("one\n".into(), "one\n".into()));
}

#[test]
fn what_a_command_leaves_behind_does_not_hold_the_result_up() {
    let place = Place::new("once_left");
    let started = std::time::Instant::now();
    let first = run(&place, &["k"], "sleep 20 & echo done");
    assert_eq!((code(first.status), text(&first).as_str()), (0, "done\n"));
    assert!(started.elapsed().as_secs() < 15, "it waited for what runs in the background");
}

#[test]
fn bad_calls_are_told_and_leave_nothing() {
    let place = Place::new("once_bad");
    let long = "x".repeat(449);
    for (options, says) in [
        (&[""][..], "empty"),
        (&["k", "--keep", "5"], "add a unit"),
        (&["k", "--keep", "1ms"], "are possible"),
        (&["k", "--skip", "--wait", "1s"], "cannot be used with"),
        (&["k", "--ttl", "0s"], "are possible"),
    ] {
        let output = run(&place, options, "true");
        assert_eq!(code(output.status), 64, "{options:?}: {}", errors(&output));
        assert!(errors(&output).contains(says), "{options:?}: {}", errors(&output));
    }
    let missing = place.lk(["once", "k", "--", "no-such-command"]).output().unwrap();
    assert_eq!(code(missing.status), 127);
    assert!(!place.db().exists(), "a bad call made a store");
    let output = run(&place, &[&long], "true");
    assert_eq!(code(output.status), 64);
    assert!(errors(&output).contains("448 are allowed"), "{}", errors(&output));
    assert_eq!(text(&place.run("record ls")), "");
}

/// A reader that goes away, as in `| head -1`, used to leave a truncated result that looked whole.
#[test]
fn a_reader_that_goes_away_does_not_shorten_the_result() {
    let place = Place::new("once_head");
    let script =
        "trap '' PIPE; echo one; while ! test -e go; do sleep 0.01; done; echo two; sleep 0.2; echo three
         echo x >>runs; exit 0";
    let mut first = once(&place, &["k"], script).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut reader = std::io::BufReader::new(first.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut reader, &mut line).unwrap();
    assert_eq!(line, "one\n");
    drop(reader);
    std::fs::write(place.dir.join("go"), "").unwrap();
    assert_eq!(code(first.wait().unwrap()), 0);
    let again = run(&place, &["k"], script);
    assert_eq!((code(again.status), text(&again).as_str()), (0, "one\ntwo\nthree\n"));
    assert_eq!(place.read("runs"), "x\n");
}

#[test]
fn a_full_disk_does_not_shorten_the_result() {
    let place = Place::new("once_full");
    let script = "echo one; sleep 0.2; echo two; echo x >>runs; exit 0";
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let first =
        once(&place, &["k"], script).stdout(full()).stderr(std::process::Stdio::piped()).output().unwrap();
    assert_eq!(code(first.status), 74, "{}", errors(&first));
    assert!(errors(&first).contains("the result is kept"), "{}", errors(&first));
    let again = run(&place, &["k"], script);
    assert_eq!((code(again.status), text(&again).as_str()), (0, "one\ntwo\n"));
    // And one who cannot be shown it later hears of that, too.
    let later =
        once(&place, &["k"], script).stdout(full()).stderr(std::process::Stdio::piped()).output().unwrap();
    assert_eq!(code(later.status), 74, "{}", errors(&later));
    assert_eq!(place.read("runs"), "x\n");
}

#[test]
fn a_command_that_waits_for_its_own_key_is_a_deadlock() {
    let place = Place::new("once_nested");
    let again = format!("{PROGRAM} once k -- true; echo $?");
    let nested = run(&place, &["k"], &again);
    assert_eq!((code(nested.status), text(&nested).as_str()), (0, "73\n"), "{}", errors(&nested));
    assert!(errors(&nested).contains("part of the command that runs under the key"), "{}", errors(&nested));
    // Another key is fine, and so is the same one when it is done.
    let other = format!("{PROGRAM} once other -- echo inner");
    assert_eq!(text(&run(&place, &["outer"], &other)), "inner\n");
}
