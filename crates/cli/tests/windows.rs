//! One run per window: by whichever host comes first, and by another if that one dies.

mod common;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

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
    set(place, &format!(r#"{{"at_ms":{at},"fence":{},"done":true}}"#, page["fence"]));
    at
}

/// Makes the record say this.
fn set(place: &Place, record: &str) {
    assert!(place.lk(["record", "set", "window/nightly", record]).output().unwrap().status.success());
}

fn record(place: &Place) -> Value {
    serde_json::from_str(&text(&place.run("record get window/nightly"))).unwrap()
}

/// The exit code of `status`, and what it says.
fn status(place: &Place, options: &str) -> (i32, String) {
    let output = place.run(format!("status nightly {options}").trim());
    (code(output.status), text(&output))
}

/// A window of a second after a run in 1970 had 1.7 billion before it, and each was made.
#[test]
fn missed_windows_are_counted_and_not_made() {
    let place = Place::new("window_1970");
    set(&place, r#"{"at_ms":1000,"fence":5,"done":true}"#);
    let ran = run(&place, "--window 1s --catch-up 2", NOTE);
    assert_eq!(code(ran.status), 0, "{}", errors(&ran));
    assert!(errors(&ran).contains("windows were missed, 1970-01-01T00:00:02"), "{}", errors(&ran));
    assert_eq!(place.read("runs").lines().count(), 3);
}

#[test]
fn the_record_says_how_a_run_ended_and_status_tells_it() {
    let place = Place::new("window_status");
    assert_eq!(status(&place, "").0, 2, "it never ran");
    assert_eq!(code(run(&place, LONG_WINDOW, "exit 3").status), 3);
    let (host, seen) = (lockkeeper_host::host_name(), record(&place));
    assert_eq!((&seen["ended"]["exit_code"], &seen["ended"]["host"]), (&3.into(), &host.as_str().into()));
    assert!(seen["ended"]["ended_ms"].as_u64() >= seen["ended"]["started_ms"].as_u64());
    assert_eq!(seen["zone"], "UTC");
    let (code2, said) = status(&place, "");
    assert!(code2 == 2 && said.contains("failed with 3") && said.contains(&host), "{said}");
    // A host that comes later finds it done, and says that it failed.
    let late = run(&place, LONG_WINDOW, NOTE);
    assert!(errors(&late).contains("failed with 3"), "{}", errors(&late));
    assert_eq!(place.read("runs"), "");
    let shown = text(&place.run("show nightly"));
    assert!(shown.contains("last run:") && shown.contains("failed with 3"), "{shown}");
    assert_eq!(place.show("nightly")["window"]["ended"]["exit_code"], 3);
    // With retries it is run again, by the next who comes.
    assert_eq!(code(run(&place, &format!("{LONG_WINDOW} --retry-failed 1"), NOTE).status), 0);
    assert_eq!(place.read("runs").lines().count(), 1);
    let (code0, said) = status(&place, "--max-age 1h");
    assert!(code0 == 0 && said.contains("went well"), "{said}");
    let json: Value = serde_json::from_str(&status(&place, "--json").1).unwrap();
    assert_eq!((&json["status"], &json["window"]["succeeded"]["exit_code"]), (&"ok".into(), &0.into()));
    // Long ago it went well, and it has not run since.
    let mut old = record(&place);
    old["succeeded"]["ended_ms"] = 1_000_000.into();
    old["ended"]["ended_ms"] = 1_000_000.into();
    set(&place, &old.to_string());
    assert_eq!(status(&place, "").0, 0);
    let (code2, said) = status(&place, "--max-age 26h");
    assert!(code2 == 2 && said.contains("within 26h"), "{said}");
    // Who cannot be asked is not well.
    let away = place.lk(["status", "nightly", "--store", "redis://127.0.0.1:1"]).output().unwrap();
    assert_eq!(code(away.status), 3, "{}", errors(&away));
}

#[test]
fn a_window_that_fails_is_run_again_as_often_as_it_may() {
    let place = Place::new("window_retry");
    let script = format!("{NOTE}; test $(wc -l < runs) -gt 2");
    let ran = run(&place, &format!("{LONG_WINDOW} --retry-failed 5"), &script);
    assert_eq!(code(ran.status), 0, "{}", errors(&ran));
    assert_eq!(place.read("runs").lines().count(), 3);
    assert_eq!((&record(&place)["failures"], status(&place, "").0), (&2.into(), 0));
    let other = Place::new("window_retry_in_vain");
    let ran = run(&other, &format!("{LONG_WINDOW} --retry-failed 2"), &format!("{NOTE}; exit 9"));
    assert_eq!(code(ran.status), 9);
    assert_eq!(other.read("runs").lines().count(), 3);
}

#[test]
fn a_window_that_failed_and_runs_again_is_a_warning() {
    let place = Place::new("window_warning");
    let script =
        format!("{NOTE}; test $(wc -l < runs) -gt 1 || exit 4; until [ -e go ]; do sleep 0.02; done");
    let again = place.start(&format!("nightly {LONG_WINDOW} --retry-failed 1"), &script);
    while place.read("runs").lines().count() < 2 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let (code1, said) = status(&place, "");
    assert!(code1 == 1 && said.starts_with("WARNING: ") && said.contains("failed with 4"), "{code1}: {said}");
    std::fs::write(place.dir.join("go"), "").unwrap();
    assert_eq!(again.end().0, 0);
    assert_eq!(status(&place, "").0, 0);
}

#[test]
fn a_window_whose_host_died_is_told_as_missed() {
    let place = Place::new("window_died");
    run(&place, "--window 1h", "true");
    let fence = &record(&place)["fence"];
    let at = set_back(&place, 1);
    set(&place, &format!(r#"{{"at_ms":{at},"fence":{fence},"done":false,"host":"host-7"}}"#));
    let (code2, said) = status(&place, "");
    assert!(code2 == 2 && said.contains("did not end") && said.contains("host-7"), "{said}");
    let next = run(&place, "--window 1h", NOTE);
    assert!(errors(&next).contains("was missed: host-7 began it"), "{}", errors(&next));
    assert_eq!(status(&place, "").0, 0);
}

#[test]
fn windows_of_two_zones_are_not_mixed() {
    let place = Place::new("window_zones");
    let berlin = |options: &str| run(&place, &format!("--window 365d --zone Europe/Berlin{options}"), NOTE);
    let first = berlin("");
    assert_eq!(code(first.status), 0, "{}", errors(&first));
    assert_eq!(record(&place)["zone"], "Europe/Berlin");
    let at = place.read("runs");
    assert!(at.contains("T22:00:00") || at.contains("T23:00:00"), "midnight in Berlin: {at}");
    let utc = run(&place, LONG_WINDOW, NOTE);
    assert_eq!(code(utc.status), 64);
    assert!(errors(&utc).contains("counted in Europe/Berlin"), "{}", errors(&utc));
    let spelled = run(&place, "--window 365d --zone europe/berlin", NOTE);
    assert_eq!(code(spelled.status), 0, "{}", errors(&spelled));
    assert_eq!(code(berlin("").status), 0);
    assert_eq!(place.read("runs").lines().count(), 1);
}

#[test]
fn a_job_for_many_hosts_without_a_store_is_warned_of() {
    let place = Place::new("window_no_store");
    let command = |words: &[&str]| {
        let mut command = place.lk(words);
        command.env_remove("LOCKKEEPER_STORE").env("XDG_STATE_HOME", &place.dir).env("HOME", &place.dir);
        if rustix::process::geteuid().is_root() {
            // Root's locks are in the machine's own file, which tests keep out of.
            std::fs::set_permissions(&place.dir, std::fs::Permissions::from_mode(0o777)).unwrap();
            command.uid(65534).gid(65534);
        }
        command
    };
    let run = |words: &[&str]| command(words).output().unwrap();
    let told = run(&["run", "nightly", "--window", "1d", "--", "true"]);
    assert!(errors(&told).contains("every other host runs this, too"), "{}", errors(&told));
    let machine = run(&["run", "nightly", "--json", "--window", "1d", "--", "true"]);
    let first: Value = serde_json::from_str(errors(&machine).lines().next().unwrap()).unwrap();
    assert_eq!(first["event"], "warning", "{first}");
    std::fs::write(place.dir.join("ids"), "one\n").unwrap();
    let jobs: [&[&str]; 4] = [
        &["cron", "c", "--every", "* * * * *"],
        &["elect", "e"],
        &["partitions", "p", "--count", "2"],
        &["claim", "g", "--from", "ids"],
    ];
    for words in jobs {
        let mut running = Running::new(command(&[words, &["--", "sleep", "100"]].concat()));
        let mut told = String::new();
        let mut errors = std::io::BufReader::new(running.child.stderr.take().unwrap());
        std::io::BufRead::read_line(&mut errors, &mut told).unwrap();
        running.child.kill().unwrap();
        running.child.wait().unwrap();
        assert!(told.contains("every other host runs this, too"), "{words:?}: {told}");
    }
    // A crontab has --quiet, and would run the job on every host without a word: once a day it is told all the same.
    let quiet = ["run", "nightly", "--quiet", "--window", "1d", "--", "true"];
    let told = errors(&run(&quiet));
    assert!(
        told.contains("\"nightly\": warning") && told.contains("every other host runs this, too"),
        "{told}"
    );
    assert_eq!(errors(&run(&quiet)), "");
    let other = run(&["run", "other", "--quiet", "--window", "1d", "--", "true"]);
    assert!(errors(&other).contains("every other host"), "{}", errors(&other));
    // What the message says to do on a single host silences it.
    let named = told.trim().rsplit("LOCKKEEPER_STORE=").next().unwrap();
    for options in [&[][..], &["--quiet"]] {
        let mut command = command(&[&["run", "third", "--window", "1d"], options, &["--", "true"]].concat());
        let silenced = command.env("LOCKKEEPER_STORE", named).output().unwrap();
        assert_eq!((code(silenced.status), errors(&silenced).as_str()), (0, ""));
    }
}

/// A run that ended between the two reads of `status`, or began between those of `show`, counted as one whose host had died.
#[test]
fn a_run_that_ends_while_it_is_looked_at_is_not_told_as_dead() {
    use lockkeeper_testkit::proxy::{Fault, Framing, Proxy};
    let Ok(redis) = lockkeeper_testkit::servers::redis(Default::default()) else { return };
    let (place, url) = (Place::new("window_looked_at"), |addr| format!("redis://{addr}?timeout=30s"));
    let mut held = 0;
    let calm = Proxy::start(redis.addr(), Framing::Resp);
    assert_eq!(code(place.lk(["status", "job", "--store", &url(calm.addr())]).output().unwrap().status), 2);
    // The scripts are loaded first, however many there are. Each is held up at another one of its last requests, while the run ends.
    let last = calm.count().requests;
    for n in last - 3..=last + 2 {
        let job = format!("job{n}");
        let mut run = place.lk(["run", &job, "--store", &url(redis.addr())]);
        let mut run = Running::new({
            run.args(["--window", "365d", "--", "sh", "-c", "echo up; read -r _; exit 0"]);
            run
        });
        assert_eq!(run.line(), "up");
        let mut looks: Vec<_> = ["status", "show"]
            .iter()
            .map(|subcommand| {
                let proxy = Proxy::start(redis.addr(), Framing::Resp);
                let fault = proxy.inject(Fault::at_request(n).hold());
                let look = Running::new(place.lk([subcommand, &*job, "--store", &url(proxy.addr())]));
                (proxy, fault, look)
            })
            .collect();
        for (_, fault, look) in &mut looks {
            while !fault.fired() && look.child.try_wait().unwrap().is_none() {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            held += usize::from(fault.fired());
        }
        assert_eq!(run.end().0, 0);
        for (_proxy, fault, look) in looks {
            fault.release();
            let (code, out, err) = look.end();
            assert_eq!(code, 0, "request {n}: {out}{err}");
            assert!(!out.contains("did not end"), "request {n}: {out}");
        }
    }
    assert!(held > 6, "only {held} were held up");
}

/// A store that could not be reached when the command ended is no other host that took the window over.
#[test]
fn an_end_that_the_store_did_not_take_down_is_reported_as_that() {
    let place = Place::new("window_locked_up");
    let mut host = place.start(&format!("nightly --ttl 10s {LONG_WINDOW}"), "echo up; read -r _; echo done");
    assert_eq!(host.line(), "up");
    let outage = StoreOutage::begin(&place);
    host.say("\n");
    assert_eq!(host.line(), "done");
    let began = std::time::Instant::now();
    while host.child.try_wait().unwrap().is_none() {
        assert!(began.elapsed() < LONG, "it waits beyond its lease");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(outage);
    let (code, _, err) = host.end();
    // 69 would say that nothing was done.
    assert_eq!(code, 74, "{err}");
    assert!(err.contains("ended with 0, but the store did not take that down"), "{err}");
    assert!(!err.contains("taken over"), "{err}");
    // The next host runs the window, because no record says that it was done.
    assert!(run(&place, LONG_WINDOW, NOTE).status.success());
    assert_eq!(place.read("runs").lines().count(), 1);
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
        ("--zone UTC", "required"),
        ("--window 1h --zone Europe/Berlin", "whole days"),
        ("--window 1d --zone Mars/Base", "--zone Mars/Base"),
        ("--retry-failed 1", "required"),
    ] {
        let output = run(&place, options, "true");
        assert_eq!(code(output.status), 64, "{options}: {}", errors(&output));
        assert!(errors(&output).contains(says), "{options}: {}", errors(&output));
    }
    assert!(!place.db().exists(), "a bad call made a store");
}

/// The store goes away after it has granted the lock, and before the window has begun. Nothing had run, and the window was given up: after an
/// outage that met each host in turn, a night was skipped.
#[test]
fn an_outage_between_the_grant_and_the_window_is_waited_for() {
    use lockkeeper_testkit::proxy::{Fault, Framing, Proxy};
    let Ok(redis) = lockkeeper_testkit::servers::redis(Default::default()) else { return };
    let place = Place::new("window_grant");
    let mut cron = CronInOutage::start(&place, redis.addr());
    let start = |proxy: &Proxy, name: &str, ttl: &str| {
        let mut run = place.lk(["run", name, "--store", &format!("redis://{}", proxy.addr()), "--ttl", ttl]);
        run.args(["--window", "365d", "--", "echo", "done"]);
        Running::new(run)
    };
    // The last two requests of a run are the end of the window and the release. Before them: a read for the windows that were missed, a read
    // and a write for the begin. A slow run may have looked for the holder as well.
    let calm = |n: u64| {
        let proxy = Proxy::start(redis.addr(), Framing::Resp);
        assert_eq!(start(&proxy, &format!("calm{n}"), "30s").end().0, 0);
        proxy.count().requests
    };
    let begun = (0..3).map(calm).min().unwrap() - 2;
    // Each run loses its store at another request. Of each two one loses its lock as well.
    let mut runs: Vec<_> = (begun - 2..=begun)
        .flat_map(|n| ["1s", "30s"].map(|ttl| (n, ttl)))
        .map(|(n, ttl)| {
            let proxy = Proxy::start(redis.addr(), Framing::Resp);
            let fault = proxy.inject(Fault::at_request(n).and_every_later_one().cut());
            let run = start(&proxy, &format!("job{n}-{ttl}"), ttl);
            (proxy, fault, run, format!("request {n} of {begun}, ttl {ttl}"))
        })
        .collect();
    let began = std::time::Instant::now();
    for (proxy, fault, _, what) in &mut runs {
        while !fault.fired() {
            assert!(began.elapsed() < LONG, "{what}");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        proxy.cut_all();
    }
    // The outage lasts for longer than the shorter ttl.
    std::thread::sleep(std::time::Duration::from_secs(2));
    runs.iter().for_each(|(proxy, ..)| proxy.heal());
    for (_proxy, _, run, what) in runs {
        // Without --wait the request waits for ever.
        let (code, out, err) = run.end();
        assert_eq!((code, out.as_str()), (0, "done\n"), "{what}: {err}");
    }
    cron.until_run();
}

/// A scheduler whose only time this year comes within two minutes, and whose store goes away when it begins that window.
struct CronInOutage {
    proxy: lockkeeper_testkit::proxy::Proxy,
    fault: lockkeeper_testkit::proxy::Injected,
    running: Running,
    events: std::io::BufReader<std::process::ChildStderr>,
    due: Value,
}

impl CronInOutage {
    fn start(place: &Place, redis: std::net::SocketAddr) -> CronInOutage {
        use lockkeeper_testkit::proxy::{Fault, Framing, Proxy};
        let proxy = Proxy::start(redis, Framing::Resp);
        // Not the minute that is about to begin: the scheduler may be slow to start.
        let mut due = std::process::Command::new("date");
        let due = text(&due.args(["-u", "-d", "+70 seconds", "+%M %H %d %m *"]).output().unwrap());
        let store = format!("redis://{}", proxy.addr());
        let mut cron = place.lk(["cron", "job", "--store", &store, "--json", "--ttl", "1s"]);
        cron.args(["--every", due.trim(), "--", "true"]);
        let mut running = Running::new(cron);
        let mut events = std::io::BufReader::new(running.child.stderr.take().unwrap());
        let due = next_event(&mut events, &["next"])["window"].clone();
        // The lock is the first request, the record of the windows the second.
        let fault = proxy.inject(Fault::at_request(2).and_every_later_one().cut());
        CronInOutage { proxy, fault, running, events, due }
    }

    /// Fails if the scheduler goes on to its next time before it has run this one.
    fn until_run(&mut self) {
        while !self.fault.fired() {
            assert!(self.running.child.try_wait().unwrap().is_none(), "it ended");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        self.proxy.cut_all();
        std::thread::sleep(std::time::Duration::from_secs(2));
        self.proxy.heal();
        loop {
            let event = next_event(&mut self.events, &["next", "window"]);
            assert_eq!(event["window"], self.due, "the window was skipped");
            if event["event"] == "window" {
                break;
            }
        }
        self.running.signal(Signal::TERM);
        assert_eq!(code(self.running.child.wait().unwrap()), 143);
    }
}

/// The next event of one of these kinds.
fn next_event(events: &mut impl std::io::BufRead, kinds: &[&str]) -> Value {
    loop {
        let mut line = String::new();
        assert!(events.read_line(&mut line).unwrap() > 0, "it ended");
        let event: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
        if kinds.iter().any(|kind| event["event"] == *kind) {
            return event;
        }
    }
}
