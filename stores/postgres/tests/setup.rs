//! What is looked at when a store is opened, and what is said when something is amiss.

mod common;

use std::time::Duration;

use common::{ask_for, client_of, open, refused_at_open, says, sql, url};
use lockkeeper_core::{Outcome, Promise, Purpose};
use lockkeeper_testkit::laws::{ask, eventually, give_back, granted, refused, stand_in_line, take};
use lockkeeper_testkit::servers::{self, PostgresOptions, TlsFiles};

fn with_setting(key: &str, value: &str) -> PostgresOptions {
    PostgresOptions { settings: vec![(key.into(), value.into())], ..PostgresOptions::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_right_comes_with_the_sql_to_run() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    sql(&server, "CREATE ROLE app LOGIN; REVOKE CREATE ON DATABASE postgres FROM PUBLIC");
    let app = format!("postgres://app@{}/postgres", server.addr());
    let error = refused_at_open(&app).await;
    says(&error, Outcome::Denied, &["CREATE SCHEMA", "GRANT USAGE, CREATE ON SCHEMA lockkeeper TO \"app\""]);
    // The tables of somebody else, which it may not use.
    drop(client_of(&server).await);
    says(&refused_at_open(&app).await, Outcome::Denied, &["GRANT SELECT, INSERT, UPDATE, DELETE"]);
    // What was said is enough.
    sql(
        &server,
        "GRANT USAGE ON SCHEMA lockkeeper TO app; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA lockkeeper TO \
         app; GRANT USAGE, UPDATE ON ALL SEQUENCES IN SCHEMA lockkeeper TO app",
    );
    let (store, other) = (open(&app).await, open(&app).await);
    let held = take(&store, &ask("x")).await;
    let waiter = stand_in_line(&other, &ask("x"), 1).await;
    give_back(&store, &held.claim).await;
    granted(waiter).await;
    // Enough to make its own.
    sql(&server, "CREATE SCHEMA own AUTHORIZATION app");
    take(&open(&format!("{app}?schema=own")).await, &ask("x")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_break_promises_are_told() {
    let Ok(server) = servers::postgres(with_setting("synchronous_commit", "off")) else { return };
    let profile = client_of(&server).await.profile();
    assert_eq!((profile.durable, profile.fence), (Promise::Likely, Promise::Likely));
    says(&profile.allows(Purpose::Correctness).unwrap_err(), Outcome::Unsupported, &["synchronous_commit"]);
    let Ok(server) = servers::postgres(with_setting("fsync", "off")) else { return };
    let profile = client_of(&server).await.profile();
    assert_eq!(profile.durable, Promise::No);
    says(&profile.allows(Purpose::Correctness).unwrap_err(), Outcome::Unsupported, &["fsync"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_work_is_refused_with_the_reason() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let addr = server.addr();
    says(&refused_at_open(&format!("postgres://nobody@{addr}/postgres")).await, Outcome::Denied, &["nobody"]);
    says(&refused_at_open(&format!("postgres://postgres@{addr}/none")).await, Outcome::Invalid, &["none"]);
    says(&refused_at_open("postgres://postgres@127.0.0.1:1/x").await, Outcome::Unavailable, &["127.0.0.1:1"]);
    sql(
        &server,
        "CREATE ROLE strict LOGIN SUPERUSER; ALTER ROLE strict SET default_transaction_isolation = 'serializable'",
    );
    let strict = format!("postgres://strict@{addr}/postgres");
    says(&refused_at_open(&strict).await, Outcome::Invalid, &["ALTER ROLE", "read committed"]);
    sql(
        &server,
        "CREATE ROLE reader LOGIN SUPERUSER; ALTER ROLE reader SET default_transaction_read_only = on",
    );
    let reader = format!("postgres://reader@{addr}/postgres");
    says(&refused_at_open(&reader).await, Outcome::Denied, &["default_transaction_read_only = off"]);
    sql(&server, "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0");
    let latin = format!("postgres://postgres@{addr}/latin");
    says(&refused_at_open(&latin).await, Outcome::Unsupported, &["LATIN1"]);
    drop(client_of(&server).await);
    sql(&server, "INSERT INTO lockkeeper.migration VALUES (99)");
    says(&refused_at_open(&url(addr)).await, Outcome::Unsupported, &["99", "newer lockkeeper"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_may_be_the_first() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("{}?timeout=20s", url(server.addr()));
    let opened = futures_util::future::join_all((0..8).map(|_| open(&url))).await;
    let held = take(&opened[0], &ask("x")).await;
    refused(&opened[7], &ask("x")).await;
    give_back(&opened[0], &held.claim).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_socket_of_this_machine_will_do() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let (dir, port) = (server.place().dir().display(), server.addr().port());
    let url = format!("postgres://postgres@:{port}/postgres?host={dir}");
    let (a, b) = (open(&url).await, open(&url).await);
    assert!(a.profile().watch, "messages come through: {:?}", a.profile().notes);
    let held = take(&a, &ask("x")).await;
    let waiter = stand_in_line(&b, &ask("x"), 1).await;
    give_back(&a, &held.claim).await;
    granted(waiter).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_believes_only_whom_it_was_told_to() {
    let tls = TlsFiles::new();
    let options = PostgresOptions { tls: Some(tls.clone()), ..PostgresOptions::default() };
    let Ok(server) = servers::postgres(options) else { return };
    let (addr, ca) = (server.addr(), tls.ca_path());
    for mode in ["require", "verify-full"] {
        let store = open(&format!("{}?sslmode={mode}&ca={}", url(addr), ca.display())).await;
        take(&store, &ask(mode)).await;
    }
    let used = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE ssl AND application_name = 'lockkeeper'";
    let store = open(&format!("{}?sslmode=require&ca={}", url(addr), ca.display())).await;
    eventually("those of the stores before are closed", || async { sql(&server, used) == "1" }).await;
    drop(store);
    let other = TlsFiles::new();
    let stranger = format!("{}?sslmode=require&ca={}", url(addr), other.ca_path().display());
    says(&refused_at_open(&stranger).await, Outcome::Unavailable, &["certificate"]);
    // A server that does not encrypt.
    let Ok(plain) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("{}?sslmode=require&ca={}", url(plain.addr()), ca.display());
    says(&refused_at_open(&url).await, Outcome::Unavailable, &["TLS"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_a_pooler_it_says_so_and_looks_for_itself() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let Ok(pooler) = servers::pgbouncer(server.addr()) else { return };
    let (a, b) = (client_of(&server).await, open(&url(pooler.addr())).await);
    let profile = b.profile();
    assert!(
        !profile.watch && profile.notes.iter().any(|note| note.contains("PgBouncer")),
        "{:?}",
        profile.notes
    );
    says(&b.watch("").await.map(|_| ()).unwrap_err(), Outcome::Unsupported, &["pooler"]);
    // Some come through the pooler and some do not: they exclude each other all the same, and stand in one line.
    let held = take(&a, &ask_for("x", Duration::from_secs(60))).await;
    let waiter = stand_in_line(&b, &ask("x"), 1).await;
    give_back(&a, &held.claim).await;
    let next = granted(waiter).await;
    refused(&a, &ask("x")).await;
    let waiter = stand_in_line(&a, &ask("x"), 1).await;
    give_back(&b, &next.claim).await;
    assert!(granted(waiter).await.fence > next.fence);
}
