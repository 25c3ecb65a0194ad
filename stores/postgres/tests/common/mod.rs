//! Helpers of the tests on real servers.
#![allow(dead_code, reason = "every test uses some of it")]

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use lockkeeper::{Lockkeeper, SystemClock};
use lockkeeper_core::{Error, LockRequest, Outcome, Result, Store};
use lockkeeper_postgres::{Options, PostgresStore};
use lockkeeper_testkit::laws::{request, soon, with};
use lockkeeper_testkit::servers::{self, ClockShim, PostgresOptions, Server};

/// One client: a store with connections of its own.
pub type Client = Arc<dyn Store>;

pub async fn try_open(url: &str) -> Result<Client> {
    let options = Options::from_url(url)?;
    let store = soon("the store opens, or says why not", PostgresStore::open(options)).await?;
    Ok(Arc::new(store))
}

pub async fn open(url: &str) -> Client {
    try_open(url).await.unwrap_or_else(|e| panic!("{url} was to open: {e:?}"))
}

/// The error of `open`, which must refuse.
pub async fn refused_at_open(url: &str) -> Error {
    match try_open(url).await {
        Ok(store) => panic!("{url} was not to open: {:?}", store.profile()),
        Err(error) => error,
    }
}

pub fn url(addr: impl std::fmt::Display) -> String {
    format!("postgres://postgres@{addr}/postgres")
}

/// Creates the schema, so that a test with a short timeout does not do it within that.
pub async fn migrate(server: &Server) {
    client_of(server).await;
}

pub async fn client_of(server: &Server) -> Client {
    open(&url(server.addr())).await
}

/// A server whose wall clock a test can set, and a client of it.
pub async fn on_a_clock() -> Option<(Server, ClockShim, Client)> {
    let clock = ClockShim::build().ok()?;
    let options = PostgresOptions { clock: Some(clock.clone()), ..PostgresOptions::default() };
    let server = servers::postgres(options).ok()?;
    let store = open(&format!("{}?poll=100ms", url(server.addr()))).await;
    Some((server, clock, store))
}

pub fn keeper(store: &Client) -> Lockkeeper {
    Lockkeeper::with_store(store.clone(), Arc::new(SystemClock))
}

/// Runs SQL as the superuser, which must succeed. Returns a line for each row.
pub fn sql(server: &Server, text: &str) -> String {
    sql_in(server, "postgres", text)
}

pub fn sql_in(server: &Server, database: &str, text: &str) -> String {
    psql(server, "postgres", database, text)
}

/// The same, as another role.
pub fn sql_as(server: &Server, role: &str, text: &str) -> String {
    psql(server, role, "postgres", text)
}

pub fn set_standbys(server: &Server, names: &str) {
    sql(server, &format!("ALTER SYSTEM SET synchronous_standby_names = '{names}'"));
    sql(server, "SELECT pg_reload_conf()");
}

pub fn no_standby(server: &Server) {
    set_standbys(server, "");
}

/// From the return on, every commit waits for a standby that does not exist. PostgreSQL's checkpointer applies the setting some time
/// after the reload, and no view shows when: a commit that does wait is the proof.
pub fn wait_for_missing_standby(server: &Server) {
    set_standbys(server, "gone");
    let waits =
        "FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query LIKE '%pg_logical_emit_message%'";
    let probe = "SELECT pg_logical_emit_message(true, 'probe', '')";
    loop {
        let mut commit = psql_command(server, "postgres", "postgres", probe)
            .stdout(Stdio::null())
            .spawn()
            .expect("psql runs");
        while commit.try_wait().expect("psql is our child").is_none() {
            if sql(server, &format!("SELECT pg_cancel_backend(pid) {waits}")) == "t" {
                commit.wait().expect("psql is our child");
                return;
            }
        }
    }
}

fn psql(server: &Server, role: &str, database: &str, text: &str) -> String {
    try_psql(server, role, database, text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Runs SQL; returns the text of the error if PostgreSQL rejects it.
pub fn try_sql(server: &Server, text: &str) -> std::result::Result<String, String> {
    try_psql(server, "postgres", "postgres", text)
}

/// The same, as another role.
pub fn try_sql_as(server: &Server, role: &str, text: &str) -> std::result::Result<String, String> {
    try_psql(server, role, "postgres", text)
}

fn psql_command(server: &Server, role: &str, database: &str, text: &str) -> Command {
    let addr = server.addr();
    let mut command = Command::new("psql");
    command
        .args(["-h", &addr.ip().to_string(), "-p", &addr.port().to_string()])
        .args(["-U", role, "-d", database, "-v", "ON_ERROR_STOP=1", "-qAtc", text])
        .stderr(Stdio::piped());
    command
}

fn try_psql(server: &Server, role: &str, database: &str, text: &str) -> std::result::Result<String, String> {
    let done = psql_command(server, role, database, text).output().expect("psql runs");
    match done.status.success() {
        true => Ok(String::from_utf8_lossy(&done.stdout).trim().to_owned()),
        false => Err(String::from_utf8_lossy(&done.stderr).into_owned()),
    }
}

pub fn number(server: &Server, text: &str) -> i64 {
    let value = sql(server, text);
    value.parse().unwrap_or_else(|_| panic!("{text} must return a number: {value:?}"))
}

pub fn ask_for(text: &str, ttl: Duration) -> LockRequest {
    with(request(text), |request| request.ttl = ttl)
}

/// Asserts that the error has this outcome, and that its text contains all of these words.
#[track_caller]
pub fn says(error: &Error, outcome: Outcome, words: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.outcome(), outcome, "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
}

/// Loads a golden fixture: the tables of one version with their rows, moved to the present.
pub fn load_golden(server: &Server, fixture: &str) {
    sql(server, fixture);
    let written_at = fixture.lines().find_map(|line| line.strip_prefix("-- written_at ")).expect("a time");
    let six = fixture.contains("place bigint");
    let (free_at, alive_until) = if six { ("free", "gone") } else { ("free_at", "alive_until") };
    let shift = format!("(date_part('epoch', clock_timestamp()) * 1000000)::bigint - {written_at}");
    sql(
        server,
        &format!(
            "UPDATE lockkeeper.lock SET since = since + {shift} WHERE since > 0; \
             UPDATE lockkeeper.lock SET expires = expires + {shift}, {free_at} = {free_at} + {shift} WHERE expires > 0; \
             UPDATE lockkeeper.hold SET since = since + {shift}, expires = expires + {shift}; \
             UPDATE lockkeeper.waiter SET since = since + {shift}; \
             UPDATE lockkeeper.client SET {alive_until} = {alive_until} + {shift} + 60000000"
        ),
    );
}
