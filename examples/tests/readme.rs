//! Every command of the examples' README is run, with the programs that were built for this test.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use lockkeeper_testkit::servers::{self, PostgresOptions};

/// The README starts programs by `cargo run`; the test starts what cargo has built already.
const CARGO_RUN: &str = "cargo run -p lockkeeper-examples --bin ";

/// Waits for the address that the service prints, which is a free port here and `localhost:3000` in the README.
const START: &str = "LISTEN=127.0.0.1:0 axum-service > service.log &\n\
    until address=$(grep -m1 -o '127.0.0.1:[0-9]*' service.log); do sleep 0.05; done";

fn shell_blocks() -> Vec<String> {
    let page = include_str!("../README.md");
    page.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

/// The database of the README, which the test replaces by a server of its own.
const DATABASE: &str = "postgres://postgres@localhost/postgres";

fn run(name: &str, script: &str) -> String {
    let dir = std::env::temp_dir().join(format!("lk-examples-{}-{name}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let bin = PathBuf::from(env!("CARGO_BIN_EXE_axum-service"));
    let path = format!("{}:{}", bin.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let script = script
        .replace(&format!("{CARGO_RUN}axum-service &"), START)
        .replace(CARGO_RUN, "")
        .replace("localhost:3000", "\"$address\"");
    assert!(!script.contains("cargo"), "{script}");
    let done = Command::new("timeout")
        .args(["60", "bash", "-c", &format!("set -euo pipefail\n{script}")])
        .current_dir(&dir)
        .env("PATH", path)
        .env("LOCKKEEPER_EXAMPLES", &dir)
        .env_remove("LOCKKEEPER_STORE")
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{}\n{script}\n{out}\n{err}", done.status);
    fs::remove_dir_all(&dir).unwrap();
    out.into_owned()
}

#[test]
fn three_seats_are_sold_once_and_the_late_customer_is_refused() {
    let out = run("seats", &shell_blocks()[0]);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[..2], ["3 of 20 customers have one of 3 seats", "the couple has 14E and 14F"], "{out}");
    assert!(lines[2].starts_with("the late customer is refused: fence "), "{out}");
}

#[test]
fn the_nightly_job_runs_once_per_day() {
    let out = run("nightly", &shell_blocks()[1]);
    let lines: Vec<&str> = out.lines().collect();
    // Midnight may fall between the two runs: then both are right to settle.
    let again = lines[1].contains(" is settled already, by ")
        || lines[1].split(' ').nth(1) != lines[0].split(' ').nth(1);
    assert!(lines[0].contains(" settled with fence ") && again, "{out}");
}

#[test]
fn three_workers_share_a_list_and_the_silent_one_is_refused() {
    let out = run("pictures", &shell_blocks()[2]);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[0], "3 workers have done 20 of 20 pictures", "{out}");
    assert!(lines[1].starts_with("its late write is refused: "), "{out}");
    assert_eq!(lines[2..], ["its late completion is refused"], "{out}");
}

#[test]
fn one_of_fifty_pages_asks_the_source() {
    let out = run("rates", &shell_blocks()[3]);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[0], "50 pages show 0.92 euros, and the source was asked 1 time", "{out}");
    let old = "0.92 euros from before, because the source is down; asked 3 times";
    assert_eq!(lines[1..], [old; 3], "{out}");
}

#[test]
fn three_workers_pack_every_order_once() {
    let out = run("partitions", &shell_blocks()[4]);
    let lines: Vec<&str> = out.lines().collect();
    // On a slow machine one worker may be done before the others have joined.
    let last = lines.last().unwrap();
    assert!(last.starts_with("200 of 200 orders are packed, by "), "{out}");
    assert!(
        ["ada", "ben", "cleo"].iter().all(|name| lines.contains(&format!("{name} has left").as_str())),
        "{out}"
    );
}

#[test]
fn no_user_and_not_all_together_mail_too_fast() {
    let out = run("mails", &shell_blocks()[5]);
    let lines: Vec<&str> = out.lines().collect();
    for (line, says) in lines.iter().zip([
        "alice waits for mail/alice: ",
        "bob waits for mail/bob: ",
        "carol waits for mail/all: ",
    ]) {
        assert!(line.starts_with(says), "{out}");
    }
    assert_eq!(lines[3..], ["8 mails are sent", "one more: not within 10 ms"], "{out}");
}

#[test]
fn three_films_at_a_time_and_one_writer() {
    let out = run("videos", &shell_blocks()[6]);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(
        lines,
        [
            "10 films are transcoded, at most 3 at a time",
            "two read; a writer now: no",
            "a reader does not become the writer",
            "it is written, and read: unchanged",
        ]
    );
}

#[test]
fn three_workers_send_the_mails_of_a_table() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let script =
        shell_blocks()[7].replace(DATABASE, &format!("postgres://postgres@{}/postgres", server.addr()));
    let out = run("jobs", &script);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(
        lines,
        [
            "3 workers have sent 19 of 20 mails",
            "mail 13 has failed for good after 3 attempts: no such address",
            "the late completion is refused",
        ]
    );
}

#[test]
fn the_service_pays_once_ships_and_leads() {
    let out = run("service", &shell_blocks()[8]);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[0], "order 42 is open", "{out}");
    assert!(lines[1].starts_with("order 42 is paid, with fence "), "{out}");
    assert_eq!(lines[2], format!("{} (stored answer)", lines[1]), "{out}");
    assert!(lines[3].starts_with("order 42 is shipped, with fence "), "{out}");
    assert!(lines[4].contains(" leads in term "), "{out}");
    assert_eq!(lines[5], "ending", "{out}");
}
