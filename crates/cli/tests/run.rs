//! `lockkeeper run`: exit codes, the command's environment, waiting, modes, signals.

mod common;
use common::*;
use rustix::process::Signal;

#[test]
fn the_commands_own_exit_code_passes_through() {
    let place = Place::new("own_code");
    for code in [0, 1, 7, 75, 255] {
        let output = place.lk(["run", "x", "--", "sh", "-c", &format!("exit {code}")]).output().unwrap();
        assert_eq!(common::code(output.status), code, "{}", errors(&output));
        assert_eq!(errors(&output), "");
    }
    let output = place.lk(["run", "x", "--", "sh", "-c", "kill -USR1 $$"]).output().unwrap();
    assert_eq!(code(output.status), 128 + 10);
    assert_eq!(place.show("x")["lock"], serde_json::Value::Null, "released");
}

#[test]
fn the_command_sees_its_lock_and_owns_stdout() {
    let place = Place::new("environment");
    let script = r#"echo "$LOCKKEEPER_NAME $LOCKKEEPER_FENCE $LOCKKEEPER_STORE $LOCKKEEPER_TTL_MS""#;
    let output =
        place.lk(["run", "a b", "--ttl", "1m30s", "--json", "--", "sh", "-c", script]).output().unwrap();
    let events: Vec<serde_json::Value> =
        errors(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let kinds: Vec<&str> = events.iter().map(|e| e["event"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["granted", "released", "ended"]);
    let fence = &events[0]["fence"];
    assert_eq!(text(&output), format!("a b {fence} {} 90000\n", place.url()));
    assert_eq!((&events[2]["outcome"], &events[2]["exit_code"]), (&"done".into(), &0.into()));
}

#[test]
fn its_group_is_its_own_and_stdin_is_the_callers() {
    let place = Place::new("group");
    let mut running = place.start("x", "ps -o pid=,pgid= -p $$; cat");
    let ids = running.line();
    let ids: Vec<&str> = ids.split_whitespace().collect();
    assert_eq!(ids[0], ids[1]);
    running.say("hello\n");
    let (code, out, _) = running.end();
    assert_eq!((code, out.as_str()), (0, "hello\n"));
}

#[test]
fn busy_is_75_and_says_who() {
    let place = Place::new("busy");
    let _held = place.hold("x --label the-boss");
    for options in ["--skip", "--wait 100ms"] {
        let output = place.run(&format!("run x {options} -- touch ran"));
        assert_eq!(code(output.status), 75);
        assert!(errors(&output).contains("the-boss"), "{}", errors(&output));
        let output = place.run(&format!("run x {options} --json -- touch ran"));
        let last: serde_json::Value = serde_json::from_str(errors(&output).lines().last().unwrap()).unwrap();
        assert_eq!((&last["error"]["outcome"], &last["error"]["exit_code"]), (&"busy".into(), &75.into()));
    }
    assert!(!place.dir.join("ran").exists());
}

#[test]
fn a_waiter_says_who_is_in_the_way_and_comes_next() {
    let place = Place::new("waiter");
    let held = place.hold("x --label first");
    let mut waiter = place.start("x", "echo second");
    place.until("x", |seen| seen["lock"]["waiting"] == 1);
    // The line about the holder is written after a while of waiting.
    let mut err = std::io::BufReader::new(waiter.child.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut err, &mut line).unwrap();
    assert!(
        line.starts_with("lockkeeper: waiting for \"x\": held by first (") && line.contains("1 in the queue"),
        "{line}"
    );
    assert_eq!(held.end().0, 0);
    assert_eq!(waiter.line(), "second");
}

#[test]
fn a_waiter_that_is_interrupted_leaves_the_line() {
    let place = Place::new("leaves");
    let _held = place.hold("x");
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let waiter = place.start("x", "touch ran");
        place.until("x", |seen| seen["lock"]["waiting"] == 1);
        waiter.signal(signal);
        assert_eq!(waiter.end().0, code);
        assert_eq!(place.show("x")["lock"]["waiting"], 0);
    }
    assert!(!place.dir.join("ran").exists());
}

#[test]
fn several_names_are_all_or_nothing() {
    let place = Place::new("also");
    let held = place.hold("b");
    assert_eq!(code(place.run("run a --also b --also c --skip -- true").status), 75);
    for name in ["a", "c"] {
        assert_eq!(place.show(name)["lock"], serde_json::Value::Null, "{name} was left behind");
    }
    drop(held);
    let mut running = place.start("a --also b --also c", "echo up; read -r _");
    running.line();
    let fences: Vec<_> = ["a", "b", "c"].map(|n| place.show(n)["lock"]["held"][0]["fence"].clone()).to_vec();
    assert!(fences[0].is_u64() && fences.iter().all(|f| *f == fences[0]), "{fences:?}");
}

#[test]
fn shared_holders_and_permits() {
    let place = Place::new("modes");
    let _one = place.hold("s --shared");
    assert_eq!(code(place.run("run s --shared --skip -- true").status), 0);
    assert_eq!(code(place.run("run s --skip -- true").status), 75);
    let _first = place.hold("p --permits 2");
    let second = place.hold("p --permits 2");
    assert_eq!(code(place.run("run p --permits 2 --skip -- true").status), 75);
    drop(second);
    assert_eq!(code(place.run("run p --permits 2 --skip -- true").status), 0);
}

#[test]
fn a_minimum_hold_outlasts_a_quick_command() {
    let place = Place::new("min_hold");
    assert_eq!(code(place.run("run x --min-hold 1h -- true").status), 0);
    let output = place.run("run x --skip -- true");
    assert_eq!(code(output.status), 75);
    assert!(errors(&output).contains("min-hold"), "{}", errors(&output));
}

#[test]
fn signals_are_passed_on() {
    let place = Place::new("signals");
    for (name, signal) in [
        ("TERM", Signal::TERM),
        ("INT", Signal::INT),
        ("HUP", Signal::HUP),
        ("USR1", Signal::USR1),
        ("USR2", Signal::USR2),
    ] {
        let script = format!("trap 'echo got {name}; exit 3' {name}; echo up; while :; do sleep 0.05; done");
        let mut running = place.start("x", &script);
        running.line();
        running.signal(signal);
        let (code, out, _) = running.end();
        assert_eq!((code, out.as_str()), (3, format!("got {name}\n").as_str()));
    }
    let mut running = place.start("x", "echo up; exec sleep 60");
    running.line();
    running.signal(Signal::QUIT);
    assert_eq!(running.end().0, 128 + 3);
}

#[test]
fn interrupting_twice_kills() {
    let place = Place::new("twice");
    let script = "trap 'echo no' INT; (trap '' INT; echo $BASHPID; exec sleep 600) & echo up $!; while :; do sleep 0.05; done";
    let mut running = place.start("x", script);
    let grandchild = loop {
        let line = running.line();
        if let Some(pid) = line.strip_prefix("up ") {
            break pid.to_owned();
        }
    };
    running.signal(Signal::INT);
    while running.line() != "no" {}
    running.signal(Signal::INT);
    assert_eq!(running.end().0, 128 + 9);
    until_gone(&grandchild);
}

#[test]
fn what_was_ignored_stays_ignored() {
    let place = Place::new("nohup");
    let script =
        format!("trap '' HUP; exec {PROGRAM} run x -- sh -c 'kill -HUP $PPID; kill -HUP $$; echo alive'");
    let mut command = std::process::Command::new("sh");
    let output = command.args(["-c", &script]).env("LOCKKEEPER_STORE", place.url()).output().unwrap();
    assert_eq!((code(output.status), text(&output).as_str()), (0, "alive\n"));
}

#[test]
fn a_command_that_cannot_be_started_takes_no_lock() {
    let place = Place::new("cannot");
    let output = place.run("run x -- no-such-command-here");
    assert_eq!(code(output.status), 127);
    assert!(errors(&output).contains("no-such-command-here") && errors(&output).contains("next:"));
    std::fs::write(place.dir.join("file"), "").unwrap();
    assert_eq!(code(place.run("run x -- ./file").status), 126);
    assert!(!place.db().exists(), "the store was opened for nothing");
}

#[test]
fn a_command_that_leaves_something_behind_is_done_when_it_ends() {
    let place = Place::new("behind");
    let output =
        place.lk(["run", "x", "--", "sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"]).output().unwrap();
    assert_eq!(code(output.status), 0);
    let pid = text(&output);
    assert!(runs(&pid));
    assert_eq!(place.show("x")["lock"], serde_json::Value::Null);
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap(),
        Signal::KILL,
    )
    .unwrap();
}
