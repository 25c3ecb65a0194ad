//! What happens when the lock is lost, and when `lockkeeper run` itself is hurt: nothing runs on without its lock.

mod common;
use std::time::Duration;

use common::*;
use rustix::process::{Resource, Rlimit, Signal, getrlimit, prlimit};

/// Writes the time since boot into a file every 20 ms, whatever signal comes.
const BEAT: &str = "while :; do read -r up _ </proc/uptime; echo $up >>$1; sleep 0.02; done";

/// A command that does not want to end, with a child in its group and one in a session of its own.
fn stubborn() -> String {
    format!(
        "trap '' TERM; echo '{BEAT}' >beat.sh
         sh beat.sh group & echo $! >>pids
         setsid sh beat.sh session & echo $! >>pids
         echo $$ >>pids
         while ! test -s group || ! test -s session; do sleep 0.01; done
         echo up; exec sh beat.sh own"
    )
}

/// The last time of all heartbeats.
fn last_beat(place: &Place) -> f64 {
    let last =
        |file: &str| place.read(file).lines().filter(|l| l.contains('.')).map(seconds).fold(0.0, f64::max);
    ["own", "group", "session"].map(last).into_iter().fold(0.0, f64::max)
}

fn nobody_runs(place: &Place) {
    for pid in place.read("pids").lines() {
        assert!(!runs(pid), "{pid} still runs");
    }
}

/// What a command writes down when it is let in.
const ENTER: &str = "read -r up _ </proc/uptime; echo $up >entered";

/// Fails if a process of the first command ran beside the next one, which has ended.
fn none_ran_beside_the_next(place: &Place) {
    let (last, entered) = (last_beat(place), seconds(&place.read("entered")));
    assert!(last <= entered, "the last beat was at {last}, the next one entered at {entered}");
}

#[test]
fn a_broken_lock_ends_everything_before_the_next_one_enters() {
    let place = Place::new("broken");
    let mut running = place.start("x --ttl 5s --grace 300ms", &stubborn());
    assert_eq!(running.line(), "up");
    let next = place.start("x", ENTER);
    place.until("x", |seen| seen["lock"]["waiting"] == 1);
    assert_eq!(code(place.run("break x --reason test --yes").status), 0);
    let (code, _, err) = running.end();
    assert_eq!(code, 76, "{err}");
    assert!(err.contains("broken") && err.contains("next:"), "{err}");
    nobody_runs(&place);
    assert_eq!(next.end().0, 0);
    none_ran_beside_the_next(&place);
}

// `break` used to let the next one in at once, beside a command that took its time to end.
#[test]
fn a_broken_lock_goes_to_the_next_when_its_command_has_ended() {
    let place = Place::new("break_waits");
    let script = "trap 'sleep 0.5; read -r up _ </proc/uptime; echo $up >ended; exit 0' TERM; echo up; while :; do sleep 0.02; done";
    let mut running = place.start("x --ttl 4s", script);
    running.line();
    let next = place.start("x", "read -r up _ </proc/uptime; echo $up >entered");
    place.until("x", |seen| seen["lock"]["waiting"] == 1);
    let said = text(&place.run("break x --reason 'drained' --yes"));
    assert!(said.contains("asked to stop") && said.contains("when they have stopped"), "{said}");
    let (code, _, err) = running.end();
    assert_eq!(code, 76, "{err}");
    assert!(err.contains("it was broken: 'drained'"), "{err}");
    assert_eq!(next.end().0, 0);
    let (ended, entered) = (place.read("ended"), place.read("entered"));
    assert!(
        seconds(&ended) <= seconds(&entered),
        "the next one entered at {entered}, the first ended at {ended}"
    );
}

#[test]
fn term_comes_first() {
    let place = Place::new("term_first");
    let script = "trap 'echo finished; exit 0' TERM; echo up; while :; do sleep 0.02; done";
    let mut running = place.start("x --ttl 3s", script);
    running.line();
    place.run("break x --reason test --yes");
    let (code, out, _) = running.end();
    assert_eq!((code, out.as_str()), (76, "finished\n"));
}

#[test]
fn a_silent_store_ends_everything_before_the_deadline() {
    const TTL: f64 = 12.0;
    let place = Place::new("silent");
    // More grace than there is time: it is the deadline that counts.
    let mut running = place.start("x --ttl 12s --grace 11s", &stubborn());
    assert_eq!(running.line(), "up");
    let outage = StoreOutage::begin(&place);
    let expiry = outage.expiry();
    place.read("pids").lines().for_each(until_gone);
    let last = last_beat(&place);
    drop(outage);
    let (code, _, err) = running.end();
    assert_eq!(code, 76, "{err}");
    assert!(err.contains("renew"), "{err}");
    assert!(last < expiry, "the last beat was at {last}, the lock was gone at {expiry}");
    assert!(last > expiry - TTL / 3.0, "it was given up on too soon: {last}, {expiry}");
}

#[test]
fn a_blip_shorter_than_the_lease_leaves_it_alone() {
    let place = Place::new("blip");
    let mut running = place.start("x --ttl 18s --grace 200ms", "echo up; read -r _; echo still here");
    assert_eq!(running.line(), "up");
    let outage = StoreOutage::begin(&place);
    let expiry = outage.expiry();
    outage.last_over_first_renewals(18.0);
    // Past the deadline that it would have had without a renewal.
    let renewed = place.until_renewed("x", &mut running.child, expiry);
    place.until_renewed("x", &mut running.child, renewed);
    running.say("\n");
    let (code, out, err) = running.end();
    assert_eq!((code, out.as_str()), (0, "still here\n"), "{err}");
}

#[test]
fn a_maximum_hold_ends_the_command() {
    let place = Place::new("max_hold");
    let mut running = place.start("x --max-hold 1s", &stubborn());
    assert_eq!(running.line(), "up");
    let (code, _, err) = running.end();
    assert_eq!(code, 76, "{err}");
    assert!(err.contains("max-hold") && !err.contains("renewed"), "{err}");
    nobody_runs(&place);
}

// Without a file descriptor for its timer the clock's thread ended silently: nothing was renewed, no deadline was kept, and the command
// ran on beside the next holder. Whatever the limit is, a command has its lock for as long as it runs, or does not run.
#[test]
fn whatever_the_limit_of_descriptors_is_nothing_runs_without_its_lock() {
    // A few at a time: each has processes of its own that must not be late.
    let limits: Vec<u32> = (8..=20).collect();
    let ran: Vec<bool> = limits
        .chunks(4)
        .flat_map(|limits| {
            std::thread::scope(|scope| {
                let all: Vec<_> =
                    limits.iter().map(|limit| scope.spawn(|| runs_under_limit(*limit))).collect();
                all.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
            })
        })
        .collect();
    assert!(!ran[0] && ran[12], "the limits are not those between too few and enough: {ran:?}");
}

/// Whether the command was started with so few descriptors.
fn runs_under_limit(limit: u32) -> bool {
    let place = Place::new(&format!("descriptors-{limit}"));
    assert_eq!(
        code(place.run("run x -- true").status),
        0,
        "a new store needs more descriptors than one that is there"
    );
    // For more than two ttls.
    let beats = "i=0; while [ $i -lt 35 ]; do i=$((i+1)); read -r up _ </proc/uptime; echo $up >>beats; sleep 0.2; done";
    std::fs::write(place.dir.join("beats.sh"), beats).unwrap();
    // One beats in the command's group, one in a session of its own.
    let script = "setsid sh beats.sh & sh beats.sh; wait";
    let limited = format!("ulimit -n {limit}; exec {PROGRAM} run x --ttl 3s -- sh -c '{script}'");
    let mut command = with_default_signals("sh");
    command.args(["-c", &limited]).current_dir(&place.dir).env("LOCKKEEPER_STORE", place.url());
    let mut running = Running::new(command);
    let started = std::time::Instant::now();
    while place.read("beats").is_empty() && running.child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < LONG, "neither started nor refused");
        std::thread::sleep(Duration::from_millis(10));
    }
    if place.read("beats").is_empty() {
        let (code, _, err) = running.end();
        assert!([69, 74, 126].contains(&code), "{limit} descriptors: {code}: {err}");
        return false;
    }
    let rival =
        place.lk(["run", "x", "--", "sh", "-c", "read -r up _ </proc/uptime; echo $up >rival"]).output();
    assert!(rival.unwrap().status.success());
    let (code, _, err) = running.end();
    assert!([0, 76].contains(&code), "{limit} descriptors: {code}: {err}");
    let beats = place.read("beats");
    let last = beats.lines().map(seconds).fold(0.0, f64::max);
    let entered = seconds(place.read("rival").trim());
    assert!(last <= entered, "{limit} descriptors: two for {:.2} s", last - entered);
    true
}

// Without a free descriptor `run` cannot read /proc, and took that for "no process is left": it dismissed the watchdog, and what the
// command had started in a session of its own lived on beside the next holder.
#[test]
fn a_loss_without_a_free_descriptor_ends_everything() {
    let place = Place::new("no_descriptor");
    let mut running = place.start("x --ttl 2s --grace 200ms", &stubborn());
    assert_eq!(running.line(), "up");
    let none = Rlimit { current: Some(3), maximum: getrlimit(Resource::Nofile).maximum };
    prlimit(Some(running.pid()), Resource::Nofile, none).unwrap();
    let next = place.start("x", ENTER);
    place.until("x", |seen| seen["lock"]["waiting"] == 1);
    assert_eq!(code(place.run("break x --reason test --yes").status), 0);
    // Not to the end of its output: a process that lives on would keep that open.
    let ended = code(running.child.wait().unwrap());
    let pids = place.read("pids");
    let left: Vec<&str> = pids.lines().filter(|pid| runs(pid)).collect();
    for pid in &left {
        let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
    }
    assert!(left.is_empty(), "{left:?} lived on");
    let (_, _, err) = running.end();
    assert_eq!(ended, 76, "{err}");
    assert!(!err.contains("could not be killed"), "{err}");
    assert_eq!(next.end().0, 0);
    none_ran_beside_the_next(&place);
}

#[test]
fn stopped_past_its_deadline_the_command_is_ended_all_the_same() {
    let place = Place::new("stopped");
    let mut running = place.start("x --ttl 5s", &stubborn());
    assert_eq!(running.line(), "up");
    let next = place.start("x", ENTER);
    place.until("x", |seen| seen["lock"]["waiting"] == 1);
    // The watchdog has been sent the deadline: that is before the command starts.
    running.stop(&place);
    // The watchdog acts while `run` cannot.
    place.read("pids").lines().for_each(until_gone);
    assert_eq!(next.end().0, 0);
    none_ran_beside_the_next(&place);
    running.signal(Signal::CONT);
    let (code, _, err) = running.end();
    assert_eq!(code, 76, "{err}");
}

#[test]
fn killed_with_kill_9_it_takes_everything_with_it() {
    let place = Place::new("kill9");
    let mut running = place.start("x", &stubborn());
    assert_eq!(running.line(), "up");
    running.signal(Signal::KILL);
    place.read("pids").lines().for_each(until_gone);
    drop(running.child.stdin.take());
    assert_eq!(running.end().0, -9);
    // The store sees that the process is dead and does not wait for the ttl of 30 s.
    assert_eq!(code(place.run("run x --wait 10s -- true").status), 0);
}

#[test]
fn killed_in_its_first_moment_it_takes_the_command_with_it() {
    let place = Place::new("kill9_early");
    let mut running = place.start("x", "echo $$; exec sleep 600");
    let pid = running.line();
    running.signal(Signal::KILL);
    until_gone(&pid);
}

#[test]
fn the_next_one_starts_after_the_last_one_is_gone() {
    let place = Place::new("next");
    let mut running = place.start("x --ttl 3s --grace 300ms", &stubborn());
    assert_eq!(running.line(), "up");
    let mut next = place.start("x", "cat /proc/uptime");
    place.until("x", |seen| seen["lock"]["waiting"] == 1);
    // A stopped `run` loses its lock to the next waiter.
    std::thread::sleep(Duration::from_millis(200));
    running.stop(&place);
    let started = seconds(&next.line());
    assert!(last_beat(&place) < started, "{} {started}", last_beat(&place));
    running.signal(Signal::CONT);
    assert_eq!(running.end().0, 76);
}

#[test]
fn what_goes_wrong_on_the_way_is_told() {
    for (options, warning) in [
        ("x --ttl 1s", "lockkeeper: warn: the file was deleted or replaced: its locks are lost; path: "),
        (
            "x --ttl 1s --json",
            r#""level":"warn","message":"the file was deleted or replaced: its locks are lost""#,
        ),
    ] {
        let place = Place::new("told");
        let mut running = place.start(options, "echo up; exec sleep 60");
        assert_eq!(running.line(), "up");
        for suffix in ["", "-wal", "-shm"] {
            std::fs::remove_file(format!("{}{suffix}", place.db().display())).unwrap();
        }
        let (code, _, err) = running.end();
        assert_eq!(code, 76, "{err}");
        assert!(err.contains(warning), "{err}");
        if options.contains("--json") {
            err.lines().for_each(|line| drop(serde_json::from_str::<serde_json::Value>(line).expect(line)));
        }
    }
}

/// After `kill -9` the `sqlite:` store frees the lock at once, and the watchdog needs a moment to kill what has left the command's group. A
/// lock-delay covers that moment.
#[test]
fn with_a_lock_delay_nothing_runs_beside_the_next_one_after_kill_9() {
    let place = Place::new("kill9_delay");
    let mut running = place.start("x --lock-delay 5s", &stubborn());
    assert_eq!(running.line(), "up");
    let next = place.start("x", ENTER);
    place.until("x", |seen| seen["lock"]["waiting"] == 1);
    running.signal(Signal::KILL);
    running.child.wait().unwrap();
    assert_eq!(next.end().0, 0);
    nobody_runs(&place);
    none_ran_beside_the_next(&place);
}

/// A process that has become another user cannot be killed by a `run` without root's rights. The lock was released beside it.
#[test]
fn a_lock_is_not_released_beside_a_process_that_cannot_be_killed() {
    std::thread::scope(|scope| {
        scope.spawn(|| lose_beside_an_unkillable_process("unkillable_broken", "run", &[], true));
        let same_work = ["--fingerprint", "f"];
        scope.spawn(move || lose_beside_an_unkillable_process("unkillable_once", "once", &same_work, true));
        // Its holder loses it long before the lease is over.
        scope.spawn(|| {
            lose_beside_an_unkillable_process("unkillable_max_hold", "run", &["--max-hold", "5s"], false)
        });
    });
}

fn lose_beside_an_unkillable_process(test: &str, subcommand: &str, options: &[&str], breaks: bool) {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new(test);
    let mode = |file: &std::path::Path, mode| {
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    // A copy of setpriv(1) with which any process may become another user.
    let raise = place.dir.join("raise");
    let found = std::process::Command::new("sh").args(["-c", "command -v setpriv"]).output().unwrap();
    if !rustix::process::geteuid().is_root() || std::fs::copy(text(&found).trim(), &raise).is_err() {
        return eprintln!("SKIPPED: needs root and setpriv(1)");
    }
    mode(&raise, 0o4755);
    mode(&place.dir, 0o777);
    let unprivileged = |words: &[&str]| {
        let mut command = with_default_signals("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", PROGRAM]).args(words);
        command.current_dir(&place.dir).env("LOCKKEEPER_STORE", place.url());
        command
    };
    let script = "setsid ./raise --reuid=61001 --regid=61001 --clear-groups sleep 600 & echo $! >pid
         while ! grep -qs '^Uid:.61001' /proc/$!/status; do test -d /proc/$! || { echo no; exit 1; }; sleep 0.01; done
         echo up; exec sleep 600";
    let mut run = unprivileged(&[subcommand, "x", "--ttl", "20s", "--grace", "0s"]);
    run.args(options).args(["--", "sh", "-c", script]);
    let mut running = Running::new(run);
    let kill_escaped = || {
        let pid = place.read("pid").trim().parse().ok().and_then(rustix::process::Pid::from_raw);
        let _ = pid.map(|pid| rustix::process::kill_process(pid, Signal::KILL));
    };
    if running.line() != "up" {
        kill_escaped();
        return eprintln!("SKIPPED: no process can run or take another user here: {}", running.end().2);
    }
    let mut next = unprivileged(&[subcommand, "x"]);
    next.args(options).args(["--", "sh", "-c", ENTER]);
    let next = Running::new(next);
    let lock = if subcommand == "once" { "once/x" } else { "x" };
    let show = || json(&unprivileged(&["show", lock, "--json"]).output().unwrap());
    let started = std::time::Instant::now();
    while show()["lock"]["waiting"] != 1 && place.read("entered").is_empty() {
        assert!(started.elapsed() < LONG, "{}", show());
        std::thread::sleep(Duration::from_millis(20));
    }
    if breaks {
        let broken = unprivileged(&["break", lock, "--reason", "test", "--yes"]).output().unwrap();
        assert_eq!(code(broken.status), 0, "{}", errors(&broken));
    }
    // The store renews it no more.
    let before = uptime();
    // If the next one is not waiting any more, the machine is slow, and the test shows nothing.
    let seen = show();
    let left = seen["lock"]["held"][0]["expires_in_ms"].as_f64().filter(|_| seen["lock"]["waiting"] == 1);
    let left = left.unwrap_or(0.0);
    let expiry = before + left / 1000.0;
    assert_eq!(code(running.child.wait().unwrap()), 76);
    assert_eq!(next.end().0, 0);
    assert!(runs(&place.read("pid")), "it was killed: the test shows nothing");
    kill_escaped();
    let entered = seconds(&place.read("entered"));
    // /proc/uptime has hundredths of a second.
    assert!(
        left == 0.0 || entered + 0.02 >= expiry,
        "the next one entered at {entered}, and the lease ended at {expiry}"
    );
    let (_, _, err) = running.end();
    assert!(err.contains("could not be killed"), "{err}");
}
