//! A command that is run once under a key: the same bytes and exit code for every caller, whichever process is killed meanwhile.

mod common;
use std::process::{Command, Output};

use common::*;
use lockkeeper_testkit::proxy::{Fault, Framing, Proxy};
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

/// The exit code said that nothing was done and that a retry is safe. The card had been charged, and the retry charged it again.
#[test]
fn a_result_that_the_store_did_not_take_is_unknown() {
    let place = Place::new("once_not_taken");
    let mut first =
        Running::new(once(&place, &["k", "--ttl", "10s"], "echo up; read -r _; echo x >>runs; echo charged"));
    assert_eq!(first.line(), "up");
    let outage = StoreOutage::begin(&place);
    first.say("\n");
    assert_eq!(first.line(), "charged");
    let began = std::time::Instant::now();
    while first.child.try_wait().unwrap().is_none() {
        assert!(began.elapsed() < LONG, "it waits beyond its lease");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(outage);
    let (code, _, err) = first.end();
    assert_eq!(code, 74, "{err}");
    assert!(err.contains("ended with 0") && err.contains("was done with fence"), "{err}");
    assert!(err.contains("look what was done"), "{err}");
}

/// `run --skip --quiet` printed nothing when the lock was busy, and these two did.
#[test]
fn a_skipped_call_that_is_quiet_prints_nothing() {
    let place = Place::new("once_skip_quiet");
    let holder = |words: &[&str]| {
        let mut command = place.lk(words);
        command.args(["--", "sh", "-c", "echo up >>begun; read -r _"]);
        Running::new(command)
    };
    let holders = [holder(&["once", "k"]), holder(&["cached", "k", "--ttl", "1h"])];
    let began = std::time::Instant::now();
    while place.read("begun").lines().count() < 2 {
        assert!(began.elapsed() < LONG);
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    for words in [&["once", "k"][..], &["cached", "k", "--ttl", "1h"]] {
        let skip = |options: &[&str]| {
            let mut command = place.lk(words);
            command.args(options).args(["--", "sh", "-c", "echo up >>begun; read -r _"]).output().unwrap()
        };
        let told = skip(&["--skip"]);
        assert_eq!(code(told.status), 75, "{words:?}: {}", errors(&told));
        assert!(errors(&told).contains("held by"), "{words:?}: {}", errors(&told));
        let quiet = skip(&["--skip", "--quiet"]);
        assert_eq!(
            (code(quiet.status), text(&quiet), errors(&quiet)),
            (75, String::new(), String::new()),
            "{words:?}"
        );
        // With a time to wait, a busy lock is an error.
        let waited = skip(&["--wait", "1ms", "--quiet"]);
        assert_eq!(code(waited.status), 75);
        assert!(!errors(&waited).is_empty(), "{words:?}");
    }
    holders.into_iter().for_each(|holder| drop(holder.end()));
}

/// The process ended before its driver had sent the release of the broken lock: the next caller waited for the rest of the lease.
#[test]
fn a_broken_run_lets_the_next_caller_in_when_it_has_stopped() {
    let Ok(redis) = lockkeeper_testkit::servers::redis(Default::default()) else { return };
    let (place, url) = (Place::new("once_broken"), format!("redis://{}", redis.addr()));
    std::thread::scope(|scope| {
        for words in [&["once", "k", "--ttl", "60s"][..], &["cached", "k", "--ttl", "1h", "--lease", "60s"]] {
            let (place, url) = (&place, &url);
            let proxy = Proxy::start(redis.addr(), Framing::Resp);
            scope.spawn(move || {
                let file = format!("{}-ran", words[0]);
                let script =
                    format!("if test -e {file}; then echo second; else touch {file}; exec sleep 600; fi");
                let start = |url: &str| {
                    let mut command = place.lk(words);
                    command.args(["--store", url, "--", "sh", "-c", &script]);
                    Running::new(command)
                };
                let show = || {
                    let name = format!("{}/k", words[0]);
                    json(&place.lk(["show", &name, "--json", "--store", url]).output().unwrap())
                };
                let until = |wanted: &dyn Fn(&serde_json::Value) -> bool| {
                    let began = std::time::Instant::now();
                    while !wanted(&show()) {
                        assert!(began.elapsed() < LONG, "{words:?}: still {}", show());
                        std::thread::sleep(std::time::Duration::from_millis(20));
                    }
                };
                let mut first = start(&format!("redis://{}", proxy.addr()));
                until(&|_| place.dir.join(&file).exists());
                let second = start(url);
                until(&|seen| seen["lock"]["waiting"] == 1);
                // The first request is the renewal that is refused. The second is the release (`cached` reads the old output as well): the
                // driver has to send it again.
                proxy.inject(Fault::at_request(2).cut());
                let name = format!("{}/k", words[0]);
                let told =
                    place.lk(["break", &name, "--reason", "test", "--yes", "--store", url]).output().unwrap();
                assert_eq!(code(told.status), 0, "{}", errors(&told));
                let (fence, ended) =
                    (show()["lock"]["held"][0]["fence"].clone(), code(first.child.wait().unwrap()));
                assert_eq!(ended, 76);
                // Long before the lease of the first is over.
                until(&|seen| seen["lock"]["held"][0]["fence"] != fence);
                assert_eq!((second.end().0, first.end().0), (0, 76));
            });
        }
    });
}
