//! A PostgreSQL table whose rows are jobs: made, worked through, looked at, and let go.

mod common;
use std::process::{Command, Output};

use common::*;
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};
use serde_json::{Value, json as value};

fn jobs(place: &Place, server: &Server, words: &[&str]) -> Command {
    let url = format!("postgres://postgres@{}/postgres", server.addr());
    let mut command = place.lk([&["jobs", words[0], "--table", "work"], &words[1..]].concat());
    command.env("LOCKKEEPER_POSTGRES", url);
    command
}

fn run(place: &Place, server: &Server, words: &[&str]) -> Output {
    jobs(place, server, words).output().unwrap()
}

fn psql(server: &Server, sql: &str) -> String {
    let (host, port) = (server.addr().ip().to_string(), server.addr().port().to_string());
    let done = Command::new("psql")
        .args([
            "-h",
            &host,
            "-p",
            &port,
            "-U",
            "postgres",
            "-d",
            "postgres",
            "-XqAt",
            "-v",
            "ON_ERROR_STOP=1",
            "-c",
            sql,
        ])
        .output()
        .unwrap();
    assert!(done.status.success(), "{sql}: {}", errors(&done));
    text(&done).trim().to_owned()
}

fn status(place: &Place, server: &Server) -> Value {
    json(&run(place, server, &["status", "--json"]))
}

#[test]
fn a_table_is_made_worked_through_looked_at_and_let_go() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let place = Place::new("jobs");
    psql(&server, "CREATE TABLE work (id int PRIMARY KEY); INSERT INTO work SELECT generate_series(1, 6)");
    let early = run(&place, &server, &["status"]);
    assert_eq!(code(early.status), 64);
    assert!(errors(&early).contains("jobs install"), "{}", errors(&early));
    // What it prints does the same as what it does.
    psql(&server, &text(&run(&place, &server, &["install", "--sql"])));
    // A command starts with no signal blocked: Ctrl-Z did nothing to it.
    psql(&server, "CREATE TABLE other AS SELECT 1 AS id; ALTER TABLE other ADD PRIMARY KEY (id)");
    let other = |words: &[&str]| {
        let mut command = place.lk([&["jobs", words[0], "--table", "other"], &words[1..]].concat());
        let url = format!("postgres://postgres@{}/postgres", server.addr());
        command.env("LOCKKEEPER_POSTGRES", url).output().unwrap()
    };
    assert_eq!(code(other(&["install"]).status), 0);
    let blocked = other(&["run", "--drain", "--", "grep", "SigBlk", "/proc/self/status"]);
    assert_eq!(text(&blocked).trim(), "SigBlk:\t0000000000000000", "{}", errors(&blocked));
    // It does not see which database that is, with the password in its address.
    psql(&server, "INSERT INTO other VALUES (2)");
    let hidden = [
        "run",
        "--drain",
        "--hide-store",
        "--",
        "sh",
        "-c",
        "echo ${LOCKKEEPER_POSTGRES-none} ${LOCKKEEPER_STORE-none}",
    ];
    let hidden = other(&hidden);
    assert_eq!(text(&hidden).trim(), "none none", "{}", errors(&hidden));
    let again = run(&place, &server, &["install"]);
    assert_eq!((code(again.status), text(&again).contains("already")), (0, true), "{}", errors(&again));
    assert_eq!(status(&place, &server)["due"], 6);

    let script = "echo \"$LOCKKEEPER_JOB $LOCKKEEPER_FENCE $LOCKKEEPER_ATTEMPT\" >> runs; test $LOCKKEEPER_JOB != 3 || exit 9";
    let options = [
        "run",
        "--drain",
        "--parallel",
        "2",
        "--max-attempts",
        "2",
        "--backoff",
        "0s",
        "--backoff-max",
        "0s",
    ];
    let worked = run(&place, &server, &[&options[..], &["--", "sh", "-c", script]].concat());
    assert_eq!(code(worked.status), 9, "{}", errors(&worked));
    let runs = place.read("runs");
    assert_eq!(runs.lines().count(), 7, "six jobs, one of them twice: {runs}");
    let counts =
        value!({ "table": "public.work", "due": 0, "waiting": 0, "taken": 0, "done": 5, "failed": 1 });
    assert_eq!(status(&place, &server), counts);
    let failed = json(&run(&place, &server, &["failed", "--json"]));
    assert_eq!(
        (&failed["failed"][0]["job"], &failed["failed"][0]["error"]),
        (&"3".into(), &"exit code 9".into())
    );
    assert!(text(&run(&place, &server, &["failed"])).contains("exit code 9"));
    assert_eq!(code(run(&place, &server, &["retry", "4"]).status), 66);
    assert_eq!(text(&run(&place, &server, &["retry", "3"])), "1 job is tried again\n");
    assert_eq!(code(run(&place, &server, &["run", "--drain", "--quiet", "--", "true"]).status), 0);
    assert_eq!(status(&place, &server)["done"], 6);

    // The statements for other languages are the ones that run here.
    psql(&server, "INSERT INTO work VALUES (7)");
    let sql = json(&run(&place, &server, &["sql", "--json"]));
    let statement = |name: &str| sql["statements"][name].as_str().unwrap().to_owned();
    let claim = format!(
        "PREPARE c(int8, int4, float8, text) AS {}; EXECUTE c(10, 5, 30, 'psql')",
        statement("claim")
    );
    let claimed = psql(&server, &claim);
    let fields: Vec<&str> = claimed.split('|').collect();
    assert_eq!((fields[0], fields[2], fields[3]), ("{7}", "1", "open"), "{claimed}");
    let complete = |fence: &str| {
        psql(
            &server,
            &format!("PREPARE c(text[], int8) AS {}; EXECUTE c('{{7}}', {fence})", statement("complete")),
        )
    };
    assert_eq!(complete("1"), "", "a late completion was taken");
    assert_eq!(complete(fields[1]), "1", "the completion was refused");

    let gone = run(&place, &server, &["uninstall"]);
    assert_eq!(code(gone.status), 0, "{}", errors(&gone));
    assert_eq!(code(run(&place, &server, &["uninstall"]).status), 66);
    let left =
        "SELECT count(*) FROM pg_attribute WHERE attrelid = 'work'::regclass AND attname LIKE 'lk\\_%'";
    assert_eq!(psql(&server, left), "0");
}

#[test]
fn a_worker_goes_on_after_a_restart_of_the_database() {
    let Ok(mut server) = servers::postgres(PostgresOptions::default()) else { return };
    let place = Place::new("jobs_restart");
    psql(&server, "CREATE TABLE work (id int PRIMARY KEY)");
    assert_eq!(code(run(&place, &server, &["install"]).status), 0);
    let mut worker =
        jobs(&place, &server, &["run", "--poll", "100ms", "--", "sh", "-c", "echo $LOCKKEEPER_JOB"]);
    let mut worker = Running::new({
        worker.env("LOCKKEEPER_LOG", "off");
        worker
    });
    psql(&server, "INSERT INTO work VALUES (1)");
    assert_eq!(worker.line(), "1");
    server.kill9();
    server.restart();
    psql(&server, "INSERT INTO work VALUES (2)");
    // The first one is done again if the server did not get to record its end.
    while worker.line() != "2" {}
    worker.signal(rustix::process::Signal::TERM);
    assert_eq!(worker.end().0, 128 + 15);
}

#[test]
fn bad_calls_and_missing_rights_are_told() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let place = Place::new("jobs_bad");
    psql(
        &server,
        "CREATE TABLE work (id int PRIMARY KEY); CREATE ROLE clerk LOGIN; GRANT ALL ON work TO clerk",
    );
    let clerk = format!("postgres://clerk@{}/postgres", server.addr());
    let denied = run(&place, &server, &["install", "--postgres", &clerk]);
    assert_eq!(code(denied.status), 77, "{}", errors(&denied));
    assert!(errors(&denied).contains("--sql"), "{}", errors(&denied));
    let away =
        run(&place, &server, &["status", "--json", "--postgres", "postgres://postgres@127.0.0.1:1/postgres"]);
    assert_eq!(code(away.status), 69, "{}", errors(&away));
    assert_eq!(code(run(&place, &server, &["install"]).status), 0);
    for (words, says) in [
        (&["run"][..], "CMD"),
        (&["run", "--parallel", "0", "--", "true"], "0 is not in"),
        (&["run", "--lease", "5", "--", "true"], "add a unit"),
        (&["run", "--backoff", "10m", "--", "true"], "longer than --backoff-max"),
        (&["retry"], "KEY"),
        (&["retry", "x"], "invalid input syntax"),
        (&["status", "--postgres", "redis://h"], "not the address"),
    ] {
        let bad = run(&place, &server, words);
        assert_eq!(code(bad.status), 64, "{words:?}: {}", errors(&bad));
        assert!(errors(&bad).contains(says), "{words:?}: {}", errors(&bad));
    }
    assert_eq!(code(run(&place, &server, &["run", "--", "no-such-command"]).status), 127);
    let nowhere = place
        .lk(["jobs", "status", "--table", "x'; DROP TABLE work", "--postgres", &clerk])
        .output()
        .unwrap();
    assert_eq!(code(nowhere.status), 64, "{}", errors(&nowhere));
}
