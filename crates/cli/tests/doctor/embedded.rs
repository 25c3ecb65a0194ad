//! The doctor on the embedded stores, on this host's pauses, and on calls that are wrong.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::common::*;
use crate::tools::{examine, examine_with};

/// A directory in a file system that forgets.
const MEMORY: &str = "/dev/shm";

#[test]
fn a_healthy_file_is_healthy_and_stays_as_it_was() {
    let place = Place::new("doctor_sqlite");
    let held = place.hold("nightly");
    let report = examine(&place, &place.url());
    // The directory of the tests may be on a file system that is not known to keep what was synced.
    let lossy: Vec<&str> = if report.exit_code() == 1 { vec!["the file is on"] } else { Vec::new() };
    report.is_healthy_but(&lossy);
    assert_eq!(report.0["locks"]["held"], 1, "{}", report.0);
    assert!(report.0["servers"][0]["facts"]["free_bytes"].as_str().unwrap().parse::<u64>().unwrap() > 0);
    drop(held);
    assert_eq!(text(&place.run("ls --json")).trim(), r#"{"locks":[]}"#);
    assert_eq!(text(&place.run("record ls")), "", "the doctor's record is gone");
}

#[test]
fn a_person_reads_the_verdicts_and_every_change() {
    let place = Place::new("doctor_text");
    let done = place.lk(["doctor", "--store", "memory:", "--ttl", "10m"]).output().unwrap();
    let shown = text(&done);
    for words in
        ["exclusion     kept", "durability    AT RISK", "private to one process", "good for correctness: no"]
    {
        assert!(shown.contains(words), "{words}: {shown}");
    }
    assert_eq!(done.status.code(), Some(1), "{shown}");
}

#[test]
fn a_file_system_that_forgets_is_a_risk() {
    let place = Place::new("doctor_tmpfs");
    let file = format!("{MEMORY}/lk-doctor-{}.db", std::process::id());
    let report = examine(&place, &format!("sqlite:{file}"));
    for suffix in ["", "-wal", "-shm"] {
        _ = std::fs::remove_file(format!("{file}{suffix}"));
    }
    report.has("risk", "tmpfs").advises("the path");
    assert_eq!((report.exit_code(), report.standing("durability").as_str()), (1, "at risk"));
    assert_eq!(report.0["correctness"]["good"], false);
}

/// A full disk, and one that is mounted read-only. Only root can mount them.
#[test]
fn a_full_disk_and_a_read_only_one_are_found() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: only root can mount a small file system");
    }
    let place = Place::new("doctor_disk");
    let disk = place.dir.join("disk");
    std::fs::create_dir(&disk).unwrap();
    let run = |words: &[&str]| {
        let done = std::process::Command::new(words[0]).args(&words[1..]).arg(&disk).status().unwrap();
        assert!(done.success(), "{words:?}");
    };
    run(&["mount", "-t", "tmpfs", "-o", "size=2m", "none"]);
    let url = format!("sqlite:{}", disk.join("locks.db").display());
    let little = examine(&place, &url);
    // The rest of the space goes, a block at a time.
    let mut filler = std::fs::File::create(disk.join("filler")).unwrap();
    while std::io::Write::write_all(&mut filler, &[0; 4096]).is_ok() {}
    // A file system with a file open for writing cannot become read-only.
    drop(filler);
    let full = examine(&place, &url);
    run(&["mount", "-o", "remount,ro"]);
    let read_only = examine(&place, &url);
    run(&["umount"]);
    little.has("risk", "KiB left");
    full.has("harm", "");
    assert_eq!(
        (full.exit_code() >= 2, full.standing("availability").as_str()),
        (true, "broken"),
        "{}",
        full.0
    );
    read_only.has("harm", "");
    assert!(read_only.exit_code() >= 2, "{}", read_only.0);
}

/// A host that is paused for longer than the ttl: the doctor is stopped again and again, and measures it.
#[test]
fn a_pause_of_this_host_is_compared_with_the_ttl() {
    let place = Place::new("doctor_pause");
    let mut doctor =
        Running::new(place.lk(["doctor", "--store", "memory:", "--ttl", "2s", "--json", "--timeout", "60s"]));
    let begun = Instant::now();
    while doctor.child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < LONG, "it does not end");
        doctor.signal(Signal::STOP);
        std::thread::sleep(Duration::from_millis(700));
        doctor.signal(Signal::CONT);
        std::thread::sleep(Duration::from_millis(100));
    }
    let (code, out, _) = doctor.end();
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    let found = report["findings"].as_array().unwrap();
    let pause = found.iter().find(|finding| finding["text"].as_str().unwrap().contains("this host paused"));
    assert_eq!(pause.unwrap()["changes"][0]["what"], "the ttl", "{report}");
    assert!(code >= 1, "{report}");
}

#[test]
fn a_store_that_is_not_there_ends_with_3_and_a_wrong_call_with_64() {
    let place = Place::new("doctor_missing");
    // A port that no server listens on: the test holds it without listening.
    let port = std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let report = examine_with(&place, &format!("redis://:secret@127.0.0.1:{port}"), &["--timeout", "5s"]);
    assert_eq!(report.exit_code(), 3);
    report
        .has("harm", "no server of the store can be reached")
        .has("risk", "cannot be reached: no connection to");
    assert_eq!(report.standing("exclusion"), "unknown");
    let unknown = examine_with(&place, "redis://no-such-host.invalid", &["--timeout", "5s"]);
    assert_eq!(unknown.exit_code(), 3);
    unknown.has("risk", "the name does not resolve");
    for wrong in ["nonsense", "mysql://127.0.0.1/db"] {
        assert_eq!(place.run(&format!("doctor --store {wrong}")).status.code(), Some(64), "{wrong}");
    }
    examine(&place, "sqlite:/proc/no/locks.db").has("harm", "the store cannot be opened");
}
