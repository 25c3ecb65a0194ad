//! Signals that end a program end this one, also while the store is unreachable and while no process reads its output; and what
//! counts is the signal, not an exit code that looks like one.

mod common;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::*;
use rustix::process::{Pid, Signal, kill_process};

/// The exit code of a program that has no other reason to end than a signal.
fn ended(mut child: Child) -> i32 {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return code(status);
        }
        if started.elapsed() > LONG {
            child.kill().unwrap();
            panic!("it is still there");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn term(child: &Child) {
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), Signal::TERM).unwrap();
}

/// Waits until some lock of `place` looks as wanted.
fn until_locks(place: &Place, wanted: impl Fn(&serde_json::Value) -> bool) {
    let started = Instant::now();
    loop {
        let locks = json(&place.run("ls --json"));
        if locks["locks"].as_array().unwrap().iter().any(&wanted) {
            return;
        }
        assert!(started.elapsed() < LONG, "{locks}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The lock request of the one that waits is taken back in the background: the end used to wait for that, as long as it took.
#[test]
fn an_unreachable_store_does_not_keep_a_waiter_from_being_ended() {
    for words in [&["elect", "e"][..], &["once", "k"], &["run", "x"]] {
        let place = Place::new(&format!("unreachable-{}", words[0]));
        let start = |script: &str| {
            let mut command = place.lk(words);
            command.args(["--ttl", "60s", "--", "sh", "-c", script]).stderr(Stdio::null());
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
        };
        let mut first = start("read -r _");
        until_locks(&place, |lock| lock["held"] != serde_json::json!([]));
        let second = start("read -r _");
        until_locks(&place, |lock| lock["waiting"] == 1);
        let store = rusqlite::Connection::open(place.db()).unwrap();
        store.busy_timeout(LONG).unwrap();
        store.execute_batch("BEGIN IMMEDIATE").unwrap();
        term(&second);
        assert_eq!(ended(second), 143, "{words:?}");
        store.execute_batch("ROLLBACK").unwrap();
        drop(first.stdin.take());
        first.wait().unwrap();
    }
}

/// A program that writes to the store of `place` and does not end until it is dropped.
fn lock_up(place: &Place) -> rusqlite::Connection {
    let store = rusqlite::Connection::open(place.db()).unwrap();
    store.busy_timeout(LONG).unwrap();
    store.execute_batch("BEGIN IMMEDIATE").unwrap();
    store
}

/// `--skip` does not wait for the lock, but for the store: a signal was ignored for as long as that did not answer.
#[test]
fn an_unreachable_store_does_not_keep_skip_from_being_ended() {
    let place = Place::new("unreachable-skip");
    assert_eq!(code(place.run("run x -- true").status), 0);
    let _locked = lock_up(&place);
    let mut run = place.lk(["run", "x", "--skip", "--", "true"]).spawn().unwrap();
    until_caught(&mut run, Signal::TERM);
    term(&run);
    assert_eq!(ended(run), 143);
}

/// The signal was passed on to the command, which takes its time, and the term is lost meanwhile: the candidate forgot the signal, and
/// campaigned again.
#[test]
fn a_signal_before_the_loss_of_the_term_is_not_forgotten() {
    let place = Place::new("asked_then_lost");
    let script = "trap '' TERM; echo up; while :; do sleep 0.02; done";
    let mut elect = Running::new(place.lk(["elect", "e", "--ttl", "1s", "--", "sh", "-c", script]));
    assert_eq!(elect.line(), "up");
    elect.signal(Signal::TERM);
    let locked = lock_up(&place);
    let started = Instant::now();
    while elect.child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < LONG, "it campaigns again");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(locked);
    let (code, _, err) = elect.end();
    assert_eq!(code, 143, "{err}");
}

/// The command has ended, and no process reads its output.
#[test]
fn once_is_ended_by_a_signal_though_nobody_reads_its_output() {
    let place = Place::new("once_unread");
    let script = "echo x >>runs; head -c 900000 /dev/zero; exit 0";
    let once = || {
        let mut command = place.lk(["once", "k", "--", "sh", "-c", script]);
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let first = once();
    until(&place, |runs| runs.lines().count() == 1);
    let mut first = first;
    let unread = first.stdout.take().unwrap();
    // The output fills the pipe, and the rest waits for a reader.
    let full = rustix::pipe::fcntl_getpipe_size(&unread).unwrap() as u64;
    until(&place, |_| rustix::io::ioctl_fionread(&unread).unwrap() == full);
    term(&first);
    assert_eq!(ended(first), 143);
    drop(unread);
}

/// The command has ended, what it printed is less than a pipe holds, but our own stdout holds none of it.
#[test]
fn once_keeps_the_result_of_a_command_that_ended_though_nobody_reads() {
    use std::io::Write;
    let place = Place::new("once_kept");
    let (reader, mut full) = std::io::pipe().unwrap();
    rustix::fs::fcntl_setfl(&full, rustix::fs::OFlags::NONBLOCK).unwrap();
    while full.write(&[b'.'; 4096]).is_ok() {}
    while full.write(b".").is_ok() {}
    rustix::fs::fcntl_setfl(&full, rustix::fs::OFlags::empty()).unwrap();
    let script = "echo one; echo two; echo $$ >pid";
    let mut command = place.lk(["once", "k", "--", "sh", "-c", script]);
    let first = command.stdout(full).spawn().unwrap();
    until(&place, |_| !place.read("pid").trim().is_empty());
    // `once` has noticed the end of its command: no zombie is left of it.
    let process = format!("/proc/{}", place.read("pid").trim());
    until(&place, |_| !std::path::Path::new(&process).exists());
    term(&first);
    assert_eq!(ended(first), 143);
    drop(reader);
    // Done is done: it is not run again, and all of it is there.
    let again = place.lk(["once", "k", "--", "sh", "-c", script]).output().unwrap();
    assert_eq!((code(again.status), text(&again).as_str()), (0, "one\ntwo\n"));
    assert_eq!(place.read("pid").lines().count(), 1);
}

fn until(place: &Place, is: impl Fn(&str) -> bool) {
    let started = Instant::now();
    while !is(&place.read("runs")) {
        assert!(started.elapsed() < LONG);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Makes the record say that the newest window is four hours old, and was done.
fn set_back(place: &Place) {
    let page: serde_json::Value =
        serde_json::from_str(&text(&place.run("record get window/nightly"))).unwrap();
    let at = page["at_ms"].as_u64().unwrap() - 4 * 3_600_000;
    let older = format!(r#"{{"at_ms":{at},"fence":{},"done":true}}"#, page["fence"]);
    assert!(place.lk(["record", "set", "window/nightly", &older]).output().unwrap().status.success());
}

fn catch_up(place: &Place, script: &str) -> Running {
    assert_eq!(code(place.run("run nightly --window 1h -- true").status), 0);
    set_back(place);
    place.start("nightly --window 1h --catch-up 2", script)
}

/// 255 and 143 are exit codes like any other: they used to end the catching up.
#[test]
fn an_exit_code_that_looks_like_a_signal_does_not_end_a_catch_up() {
    for code in [255, 143] {
        let place = Place::new(&format!("looks_like-{code}"));
        let running = catch_up(&place, &format!("echo x >>runs; exit {code}"));
        assert_eq!(running.end().0, code);
        assert_eq!(place.read("runs").lines().count(), 3);
    }
}

/// A command that ends cleanly when it is asked to: the next window used to be begun all the same.
#[test]
fn a_signal_ends_a_catch_up_though_the_command_ends_cleanly() {
    let place = Place::new("cleanly");
    let script = "trap 'exit 0' TERM; echo x >>runs; echo up; while :; do sleep 0.02; done";
    let mut running = catch_up(&place, script);
    assert_eq!(running.line(), "up");
    running.signal(Signal::TERM);
    assert_eq!(running.end().0, 143);
    assert_eq!(place.read("runs").lines().count(), 1);
}

/// `nohup lockkeeper hold x &` was ended by the signal that nohup is there against.
#[test]
fn a_signal_that_was_ignored_at_the_start_stays_ignored() {
    for words in [&["hold", "x"][..], &["elect", "e", "--observe"], &["watch"]] {
        let place = Place::new(&format!("ignored-{}", words[0]));
        assert_eq!(code(place.run("run x -- true").status), 0);
        let mut command = std::process::Command::new("env");
        command.args(["--default-signal=INT,TERM", "--ignore-signal=HUP", PROGRAM]).args(words);
        command.env("LOCKKEEPER_STORE", place.url()).stdin(Stdio::piped());
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        let pid = Pid::from_raw(child.id() as i32).unwrap();
        until_caught(&mut child, Signal::TERM);
        kill_process(pid, Signal::HUP).unwrap();
        // It has no reason to end in this time, and had one before.
        std::thread::sleep(Duration::from_millis(300));
        kill_process(pid, Signal::TERM).unwrap();
        assert_eq!(ended(child), 143, "{words:?}");
    }
}

/// A server that accepts connections and never answers.
fn silent_server() -> (std::net::TcpListener, String) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}?timeout=60s", listener.local_addr().unwrap());
    (listener, url)
}

/// The gate caught signals before it opened the store, and looked at them only afterwards. While it has done nothing yet, the signal
/// ends it at once, as any program.
#[test]
fn a_signal_ends_what_opens_a_store_that_does_not_answer() {
    let gate = ["gate", "--upstream", "http://127.0.0.1:9", "--listen", "127.0.0.1:0"];
    for words in [&gate[..], &["watch"], &["elect", "e", "--observe"], &["record", "watch", "k"]] {
        let place = Place::new(&format!("opening-{}", words[0]));
        let (server, url) = silent_server();
        let child = place.lk(["--store", &url]).args(words).stderr(Stdio::null()).spawn().unwrap();
        let (_connection, _) = server.accept().unwrap();
        term(&child);
        assert_eq!(ended(child), -Signal::TERM.as_raw(), "{words:?}");
    }
}

/// Ctrl-Z did nothing to the command of `limit`, `cached`, `claim`, `jobs run` and `partitions`: it was started with SIGTSTP blocked.
/// `cron` has no schedule that is due at once: it starts its command as `run` does.
#[test]
fn a_command_starts_with_no_signal_blocked() {
    let place = Place::new("blocked");
    std::fs::write(place.dir.join("ids"), "item\n").unwrap();
    for line in [
        "run x --",
        "run x --window 1h --",
        "elect e --",
        "once k --",
        "cached c --ttl 1h --",
        "claim g --from ids --",
        "partitions g --count 1 --",
        "limit l --rate 1/s --",
    ] {
        let words = line.split(' ').chain(["grep", "SigBlk", "/proc/self/status"]);
        let done = place.lk(words).output().unwrap();
        assert_eq!(text(&done).trim(), "SigBlk:\t0000000000000000", "{line}: {}", errors(&done));
    }
}
