//! The watchdog beside every command: it is there before the command is, it is replaced when it dies, and nothing that the
//! command started outlives a `lockkeeper run` that was killed.

mod common;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::*;
use rustix::process::{Pid, Signal, kill_process};

const LOOP: &str = "while :; do sleep 0.02; done";

/// A command with a child in its group and one in a session of its own, whose pids are in the file `pids`.
fn parent() -> String {
    format!(
        "sh -c '{LOOP}' & echo $! >>pids
         setsid sh -c '{LOOP}' & echo $! >>pids
         echo $$ >>pids; echo up; wait"
    )
}

/// Killing `run` in the first 50 ms used to leave the command's children alive beside the next holder.
#[test]
fn killed_in_its_first_moment_it_takes_the_commands_children_with_it() {
    for round in 0..5 {
        let place = Place::new(&format!("first_moment-{round}"));
        let mut running = place.start("x", &parent());
        assert_eq!(running.line(), "up");
        running.signal(Signal::KILL);
        let pids = place.read("pids");
        assert_eq!(pids.lines().count(), 3);
        pids.lines().for_each(until_gone);
    }
}

/// A watchdog that was killed used not to be replaced.
#[test]
fn a_watchdog_that_dies_or_is_stopped_is_replaced() {
    for signal in [Signal::KILL, Signal::STOP] {
        let place = Place::new(&format!("replaced-{}", signal.as_raw()));
        let mut running = place.start("x", &parent());
        assert_eq!(running.line(), "up");
        let first = until_watched(running.pid(), None);
        kill_process(first, signal).unwrap();
        let second = until_watched(running.pid(), Some(first));
        kill_process(second, signal).unwrap();
        until_watched(running.pid(), Some(second));
        assert!(!runs(&first.as_raw_pid().to_string()));
        // And the one that is there now does what the first would have done.
        running.signal(Signal::KILL);
        place.read("pids").lines().for_each(until_gone);
        let (_, _, err) = running.end();
        assert!(err.contains("watchdog"), "{err}");
    }
}

/// The loss of the watchdog is no loss of the lock: the command goes on under the new one, to its own end.
#[test]
fn the_command_goes_on_when_its_watchdog_dies() {
    let place = Place::new("goes_on");
    let mut running = place.start("x", "echo up; read -r _; echo still here; exit 3");
    assert_eq!(running.line(), "up");
    let first = until_watched(running.pid(), None);
    kill_process(first, Signal::KILL).unwrap();
    until_watched(running.pid(), Some(first));
    running.say("\n");
    let (code, out, _) = running.end();
    assert_eq!((code, out.as_str()), (3, "still here\n"));
}

/// Where a cgroup of version 2 for this process is, if it may make one below it.
fn cgroup() -> Option<PathBuf> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?.to_owned();
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"))?;
    let home = PathBuf::from(mount.split(' ').nth(1)?).join(path);
    let probe = home.join(format!("probe-{}", std::process::id()));
    std::fs::create_dir(&probe).ok()?;
    let usable = probe.join("cgroup.kill").exists()
        && std::fs::read_to_string(home.join("cgroup.subtree_control")).is_ok_and(|on| on.trim().is_empty());
    std::fs::remove_dir(&probe).unwrap();
    usable.then_some(home)
}

fn ours(home: &Path, run: Pid) -> bool {
    let tag = format!("lockkeeper-{}-", run.as_raw_pid());
    let mut dirs = std::fs::read_dir(home).unwrap().flatten();
    dirs.any(|dir| dir.file_name().to_string_lossy().starts_with(&tag))
}

fn until(what: &str, is: impl Fn() -> bool) {
    let started = Instant::now();
    while !is() {
        assert!(started.elapsed() < LONG, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process without our variables, in a session of its own, was out of reach once `run` was dead.
#[test]
fn a_cgroup_reaches_what_carries_no_mark() {
    let Some(home) = cgroup() else {
        return eprintln!("SKIPPED: no cgroup of version 2 can be made here");
    };
    let place = Place::new("no_mark");
    let script = format!("env -i PATH=\"$PATH\" setsid sh -c '{LOOP}' & echo $! >>pids; echo up; wait");
    let mut running = place.start("x", &script);
    assert_eq!(running.line(), "up");
    let pids = place.read("pids");
    let group = || std::fs::read_to_string(format!("/proc/{}/cgroup", pids.trim())).unwrap_or_default();
    until("it never came into a cgroup", || group().contains("lockkeeper-"));
    running.signal(Signal::KILL);
    until_gone(&pids);
    until("the cgroup is left behind", || !ours(&home, running.pid()));
}

/// A command that leaves something behind counts as done: what it left goes on, and our cgroup does not stay for it.
#[test]
fn what_is_left_behind_lives_on_without_our_cgroup() {
    let Some(home) = cgroup() else {
        return eprintln!("SKIPPED: no cgroup of version 2 can be made here");
    };
    let place = Place::new("left_behind");
    let script = format!("setsid sh -c '{LOOP}' >/dev/null 2>&1 & echo $! >>pids; echo up; read -r _");
    let mut running = place.start("x", &script);
    assert_eq!(running.line(), "up");
    let pids = place.read("pids");
    let group = || std::fs::read_to_string(format!("/proc/{}/cgroup", pids.trim())).unwrap_or_default();
    until("it never came into a cgroup", || group().contains("lockkeeper-"));
    running.say("\n");
    let pid = running.pid();
    assert_eq!(running.end().0, 0);
    until("the cgroup is left behind", || !ours(&home, pid));
    assert!(runs(&pids));
    let left = Pid::from_raw(pids.trim().parse().unwrap()).unwrap();
    kill_process(left, Signal::KILL).unwrap();
}

/// A pipe that is full and has no reader.
fn full_pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    use std::io::Write;
    let (reader, mut writer) = std::io::pipe().unwrap();
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK).unwrap();
    while writer.write(&[b'.'; 4096]).is_ok() {}
    while writer.write(b".").is_ok() {}
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::empty()).unwrap();
    (reader, writer)
}

/// `run` used to say that the lock was lost before it ended the command: with stderr full, it never came to that.
#[test]
fn a_full_stderr_does_not_keep_the_command_alive() {
    let place = Place::new("full_stderr");
    let (_reader, writer) = full_pipe();
    let mut command = place.lk(["run", "x", "--ttl", "45s", "--grace", "200ms", "--", "sh", "-c"]);
    command.arg(format!("trap '' TERM; {}", parent())).stdout(std::process::Stdio::piped()).stderr(writer);
    let mut run = command.spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(run.stdout.take().unwrap()), &mut line).unwrap();
    assert_eq!(code(place.run("break x --reason test --yes").status), 0);
    // Silently, after the next renewal, and before the deadline: the watchdog would act after this test has given up.
    place.read("pids").lines().for_each(until_gone);
    assert_eq!(code(run.wait().unwrap()), 76);
}

/// The thread that renews says what went wrong: with stderr full, it used to stop there, and the lock was lost.
#[test]
fn a_full_stderr_does_not_stop_the_renewals() {
    let place = Place::new("full_renewals");
    let (_reader, writer) = full_pipe();
    let mut command = place.lk(["run", "x", "--ttl", "18s", "--grace", "200ms", "--", "sh", "-c"]);
    command.arg("echo up; read -r _; exit 3");
    // So much that more than one message comes from the thread that renews.
    command.env("LOCKKEEPER_LOG", "trace").stdin(std::process::Stdio::piped());
    command.stdout(std::process::Stdio::piped()).stderr(writer);
    let mut run = command.spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(run.stdout.take().unwrap()), &mut line).unwrap();
    let outage = StoreOutage::begin(&place);
    let expiry = outage.expiry();
    outage.last_over_first_renewals(18.0);
    // Beyond the deadline that it would have had without a renewal.
    let renewed = place.until_renewed("x", &mut run, expiry);
    place.until_renewed("x", &mut run, renewed);
    drop(run.stdin.take());
    assert_eq!(code(run.wait().unwrap()), 3);
}

/// A watchdog that found no free descriptor for its timer took that for the end of `run`, and killed a command that had its lock.
#[test]
fn a_watchdog_without_descriptors_kills_nothing() {
    use rustix::process::{Resource, Rlimit, prlimit};
    let place = Place::new("no_descriptors");
    let mut running = place.start("x --ttl 6s", "echo up; read -r _; exit 3");
    assert_eq!(running.line(), "up");
    let watchdog = until_watched(running.pid(), None);
    prlimit(Some(watchdog), Resource::Nofile, Rlimit { current: Some(0), maximum: Some(0) }).unwrap();
    // Each renewal moves the deadline, and the watchdog waits anew.
    let mut expiry = place.expiry("x");
    for _ in 0..2 {
        expiry = place.until_renewed("x", &mut running.child, expiry);
    }
    assert_eq!(until_watched(running.pid(), None), watchdog, "it had to be replaced");
    running.say("\n");
    assert_eq!(running.end().0, 3);
}

/// A parent that had SIGCHLD blocked made `run` wait for ever, with the lock.
#[test]
fn signals_that_the_parent_had_blocked_are_heard() {
    let place = Place::new("blocked");
    let mut command = std::process::Command::new("env");
    command.args(["--block-signal=CHLD,TERM", PROGRAM, "run", "x", "--ttl", "2s", "--", "true"]);
    command.env("LOCKKEEPER_STORE", place.url());
    let mut run = command.spawn().unwrap();
    let started = Instant::now();
    let status = loop {
        if let Some(status) = run.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > LONG {
            run.kill().unwrap();
            panic!("it still waits for a command that has ended");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(code(status), 0);
}
