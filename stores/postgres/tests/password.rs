//! Passwords, in each of the ways in which a server asks for them.

mod common;

use common::{open, refused_at_open, says, sql};
use lockkeeper_core::{AcquireOutcome, Error, Outcome};
use lockkeeper_testkit::laws::{eventually, give_back, request, take};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};

/// With what an address must not have in it as it is, and a letter that is not of ASCII.
const PASSWORD: &str = "p@ss:w/ö#%";
const IN_ADDRESS: &str = "p%40ss%3Aw%2F%C3%B6%23%25";
/// What the next step is.
const STEP: &str = "postgres://USER:PASSWORD@HOST/DATABASE";

/// Users are called by the way in which they log in, and each has a schema of its own.
const WAYS: [(&str, &str, &str); 3] = [
    ("scram", "scram-sha-256", "SCRAM-SHA-256$"),
    ("md5", "md5", "md5"),
    ("clear", "password", "SCRAM-SHA-256$"),
];

fn start() -> Option<Server> {
    let hba = WAYS.map(|(user, method, _)| format!("host all {user} 127.0.0.1/32 {method}")).to_vec();
    let server = servers::postgres(PostgresOptions { hba, ..PostgresOptions::default() }).ok()?;
    for (user, _, kept) in WAYS {
        let kind = if kept == "md5" { "md5" } else { "scram-sha-256" };
        sql(
            &server,
            &format!("SET password_encryption = '{kind}'; CREATE ROLE {user} LOGIN PASSWORD '{PASSWORD}'"),
        );
        sql(&server, &format!("CREATE SCHEMA {user} AUTHORIZATION {user}"));
        // A server that keeps it in another way would log in by another way too.
        let is = sql(&server, &format!("SELECT rolpassword FROM pg_authid WHERE rolname = '{user}'"));
        assert!(is.starts_with(kept), "{user}: {is}");
    }
    Some(server)
}

fn address(server: &Server, user: &str, password: &str) -> String {
    format!("postgres://{user}{password}@{}/postgres?schema={user}", server.addr())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_right_one_opens_and_a_wrong_one_is_denied_and_not_shown() {
    let Some(server) = start() else { return };
    for (user, _, _) in WAYS {
        let store = open(&address(&server, user, &format!(":{IN_ADDRESS}"))).await;
        let held = take(&store, &request("x")).await;
        give_back(&store, &held.key).await;
        let error = refused_at_open(&address(&server, user, ":mellon")).await;
        says(&error, Outcome::Denied, &["password authentication failed", user, STEP]);
        assert!(!error.to_string().contains("mellon"), "{error}");
    }
}

/// The driver finds out by itself that it needs one: nothing was refused by the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn none_is_denied_with_the_next_step() {
    let Some(server) = start() else { return };
    for (user, _, _) in WAYS {
        for none in ["", ":"] {
            let error = refused_at_open(&address(&server, user, none)).await;
            says(&error, Outcome::Denied, &["password", STEP]);
        }
    }
}

/// An open store is told what is wrong when it has to log in anew, and goes on when that is mended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_is_changed_is_denied_until_it_is_changed_back() {
    let Some(server) = start() else { return };
    let store = open(&address(&server, "scram", &format!(":{IN_ADDRESS}"))).await;
    let before = take(&store, &request("x")).await;
    give_back(&store, &before.key).await;
    sql(&server, "ALTER ROLE scram PASSWORD 'another'");
    sql(&server, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'scram'");
    eventually("it is denied", || async {
        match store.acquire(&request("y")).await {
            Err(Error::Denied(text)) => text.contains("password authentication failed"),
            Err(Error::Unknown(_) | Error::Unavailable(_)) => false,
            other => panic!("who may not log in is given nothing: {other:?}"),
        }
    })
    .await;
    sql(&server, &format!("ALTER ROLE scram PASSWORD '{PASSWORD}'"));
    eventually("it goes on", || async {
        matches!(store.acquire(&request("x")).await, Ok(AcquireOutcome::Granted(next)) if next.fence > before.fence)
    })
    .await;
}
