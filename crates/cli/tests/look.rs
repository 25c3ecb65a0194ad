//! `hold`, `ls`, `show`, `watch`, `break`: what people and machines are told.

mod common;
use std::sync::atomic::{AtomicBool, Ordering};

use common::*;
use rustix::process::Signal;
use serde_json::{Value, json};

#[test]
fn hold_ends_with_its_pipe_a_signal_or_its_time() {
    let place = Place::new("hold");
    let held = place.hold("x");
    assert_eq!(code(place.run("run x --skip -- true").status), 75);
    assert_eq!(held.end().0, 0);
    let mut held = place.hold("x");
    held.signal(Signal::TERM);
    // Its stdin stays open, which waiting would close: only the signal can end it.
    let _open = held.child.stdin.take();
    assert_eq!(code(held.child.wait().unwrap()), 143);
    assert_eq!(code(place.run("hold x --for 100ms").status), 0);
    assert_eq!(place.show("x")["lock"], Value::Null);

    let output = place.run("hold x --for 100ms --json");
    let events: Vec<Value> = text(&output).lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(events[0]["event"], "granted");
    assert_eq!((&events[1]["event"], &events[1]["fence"]), (&"released".into(), &events[0]["fence"]));
}

#[test]
fn hold_tells_when_it_is_lost() {
    let place = Place::new("hold_lost");
    let mut held = place.hold("x --ttl 1s");
    place.run("break x --reason test --yes");
    let shown = text(&place.run("show x"));
    let revoked = shown.contains("asked to stop  because") && !shown.contains("unless renewed");
    assert!(revoked || shown.contains("is free"), "{shown}");
    // Its stdin stays open, which waiting would close: only the loss can end it.
    let _open = held.child.stdin.take();
    assert_eq!(code(held.child.wait().unwrap()), 76);
}

/// An unreachable store delayed the message that the lock is lost until the release had failed, long past the deadline.
#[test]
fn hold_tells_its_loss_before_it_asks_the_store() {
    let place = Place::new("hold_unreachable");
    let mut held = Running::new(place.lk(["hold", "x", "--ttl", "1s", "--json"]));
    assert!(held.line().contains("granted"));
    let outage = StoreOutage::begin(&place);
    outage.feign_progress(&place);
    let locked = std::time::Instant::now();
    assert!(held.line().contains("lost"));
    // The lease ends after 1 s, and a release fails after 30 s.
    assert!(locked.elapsed() < LONG / 2, "{:?}", locked.elapsed());
}

#[test]
fn ls_shows_every_page_of_locks() {
    let place = Place::new("ls");
    let output = place.run("ls");
    assert_eq!((code(output.status), text(&output).as_str()), (0, ""));
    assert_eq!(json(&place.run("ls --json")), json!({ "locks": [] }));

    let _held: Vec<Running> =
        ["orders/1 --label boss", "orders/2 --shared", "stock"].map(|o| place.hold(o)).into();
    let _second = place.hold("orders/2 --shared");
    let table = text(&place.run("ls"));
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 5, "{table}");
    for (line, word) in lines.iter().zip(["NAME", "boss (", "orders/2", ", pid ", "stock"]) {
        assert!(line.contains(word) && !line.contains('\t') && !line.contains('\u{1b}'), "{line}");
    }
    let column = lines[0].find("HOLDER").unwrap();
    assert!(lines[1][column..].starts_with("boss"), "{table}");
    assert!(
        lines[4][column..].starts_with("lockkeeper hold ("),
        "without a label, the process's name: {table}"
    );
    let names = |output: &std::process::Output| -> Vec<String> {
        let locks = json(output)["locks"].clone();
        locks.as_array().unwrap().iter().map(|l| l["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&place.run("ls --json")), ["orders/1", "orders/2", "stock"]);
    assert_eq!(names(&place.run("ls orders/ --json")), ["orders/1", "orders/2"]);
}

#[test]
fn show_tells_about_holders_the_line_and_the_store() {
    let place = Place::new("show");
    let free = text(&place.run("show x"));
    assert!(free.starts_with("\"x\" is free\n") && free.contains("store sqlite:"), "{free}");
    let held = place.hold("x --label boss");
    let next = place.start("x --label next", "true");
    let seen = place.until("x", |seen| seen["lock"]["waiting"] == 1);
    assert_eq!(seen["lock"]["queue"][0]["holder"]["label"], "next");
    assert_eq!(seen["store"]["fence"], "kept");
    let page = text(&place.run("show x"));
    for word in ["is held", "boss (", "exclusive", "unless renewed", "1 in the queue", "1.", "next ("] {
        assert!(page.contains(word), "{word:?} is not in {page}");
    }
    drop(held);
    assert_eq!(next.end().0, 0);
}

#[test]
fn watch_prints_what_happens() {
    let place = Place::new("watch");
    // The store is there before a process watches it.
    place.run("run x -- true");
    let mut people = Running::new(place.lk(["watch"]));
    let mut machines = Running::new(place.lk(["watch", "x", "--json"]));
    // Both have to be up: locks come and go until each has seen one.
    let seen = AtomicBool::new(false);
    let (fence, line) = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !seen.load(Ordering::Relaxed) {
                place.run("run x --label me -- true");
            }
        });
        let events = (machines.line(), people.line());
        seen.store(true, Ordering::Relaxed);
        events
    });
    let event: Value = serde_json::from_str(&fence).unwrap();
    assert!(event["at_us"].is_u64() && event["name"] == "x" && event["event"].is_string(), "{event}");
    let at: &str = line.split("  ").next().unwrap();
    assert!(at.len() == 24 && at.ends_with('Z') && at.contains('T'), "{line}");
    place.run("run y -- true");
    place.run("break x --now --yes --reason because");
    let broken = loop {
        let event: Value = serde_json::from_str(&machines.line()).unwrap();
        assert_eq!(event["name"], "x");
        if event["event"] == "broken" {
            break event;
        }
    };
    assert_eq!(broken["reason"], "because");
    while !people.line().contains("because: because") {}
    people.signal(Signal::INT);
    machines.signal(Signal::TERM);
    assert_eq!((people.end().0, machines.end().0), (130, 143));
}

#[test]
fn break_says_which_holder_stops_or_is_removed() {
    let place = Place::new("break");
    let mut held = place.hold("x --label boss --ttl 2s");
    let fence = place.show("x")["lock"]["held"][0]["fence"].as_u64().unwrap();
    let output = place.run("break x --reason because");
    assert_eq!(code(output.status), 0, "no terminal: no confirmation");
    let said = text(&output);
    assert!(said.contains("asked to stop: boss (") && said.contains(&format!("fence {fence}")), "{said}");
    // Its stdin stays open, which waiting would close: only the loss can end it.
    let _open = held.child.stdin.take();
    assert_eq!(code(held.child.wait().unwrap()), 76);
    let held = place.hold("x --label boss --ttl 2s");
    let output = text(&place.run("break x --now --reason because"));
    assert!(output.contains("removed: boss (") && output.contains("beside them"), "{output}");
    assert_eq!(held.end().0, 76);
    let output = json(&place.run("break x --reason again --json"));
    assert!(output["fence"].as_u64().unwrap() > fence && output["holders"] == json!([]), "{output}");
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let place = Place::new("pipe");
    let line = format!("{PROGRAM} man | head -1; {PROGRAM} completions bash | head -1");
    let output = std::process::Command::new("sh").args(["-c", &line]).output().unwrap();
    assert_eq!(errors(&output), "");
    drop(place);
}

#[test]
fn completions_and_manual_pages_are_sound() {
    let place = Place::new("pages");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = place.run(&format!("completions {shell}"));
        assert!(code(output.status) == 0 && text(&output).contains("min-hold"), "{shell}");
        std::fs::write(place.dir.join(shell), &output.stdout).unwrap();
    }
    let check = std::process::Command::new("bash").arg("-n").arg(place.dir.join("bash")).output().unwrap();
    assert!(check.status.success(), "{}", errors(&check));
    let page = text(&place.run("man"));
    assert!(
        page.contains(".TH lockkeeper 1") && page.contains("EXIT STATUS") && page.contains("\n75\n"),
        "{page}"
    );
    assert!(!page.contains("__exec") && !page.contains("__watchdog"));
    let page = text(&place.run("man run"));
    assert!(page.contains(".TH lockkeeper\\-run 1") || page.contains(".TH lockkeeper-run 1"), "{page}");
    assert!(page.contains("lock\\-delay"), "{page}");
}
