//! The checks when a store is opened, and the errors that they report.

mod common;

use std::time::Duration;

use common::{ask_for, client_of, open, refused_at_open, says, sql, url};
use lockkeeper_core::{Guarantee, Outcome, Purpose};
use lockkeeper_testkit::laws::{eventually, give_back, granted, join_queue, refused, request, take};
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
    // The tables of another role, which it may not use.
    drop(client_of(&server).await);
    says(&refused_at_open(&app).await, Outcome::Denied, &["GRANT SELECT, INSERT, UPDATE, DELETE"]);
    // The privileges that the error names are enough.
    sql(
        &server,
        "GRANT USAGE ON SCHEMA lockkeeper TO app; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA lockkeeper TO \
         app; GRANT USAGE, UPDATE ON ALL SEQUENCES IN SCHEMA lockkeeper TO app",
    );
    let (store, other) = (open(&app).await, open(&app).await);
    let held = take(&store, &request("x")).await;
    let waiter = join_queue(&other, &request("x"), 1).await;
    give_back(&store, &held.key).await;
    granted(waiter).await;
    // A role with a schema of its own creates its tables there.
    sql(&server, "CREATE SCHEMA own AUTHORIZATION app");
    take(&open(&format!("{app}?schema=own")).await, &request("x")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_weaken_guarantees_are_reported() {
    let Ok(server) = servers::postgres(with_setting("synchronous_commit", "off")) else { return };
    let profile = client_of(&server).await.profile();
    assert_eq!((profile.durable, profile.fence), (Guarantee::Likely, Guarantee::Likely));
    says(&profile.allows(Purpose::Correctness).unwrap_err(), Outcome::Unsupported, &["synchronous_commit"]);
    let Ok(server) = servers::postgres(with_setting("fsync", "off")) else { return };
    let profile = client_of(&server).await.profile();
    assert_eq!(profile.durable, Guarantee::No);
    says(&profile.allows(Purpose::Correctness).unwrap_err(), Outcome::Unsupported, &["fsync"]);
}

/// The page says so: a setting that is weakened later is no part of the profile of a client from before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_are_checked_when_the_store_is_opened() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let early = client_of(&server).await;
    sql(&server, "ALTER ROLE postgres SET synchronous_commit = off");
    let profile = client_of(&server).await.profile();
    assert_eq!((profile.durable, profile.fence), (Guarantee::Likely, Guarantee::Likely));
    take(&early, &request("x")).await;
    let profile = early.profile();
    assert_eq!((profile.durable, profile.fence), (Guarantee::Kept, Guarantee::Kept));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_cannot_keep_locks_is_refused_with_the_reason() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let addr = server.addr();
    says(
        &refused_at_open(&format!("postgres://stranger@{addr}/postgres")).await,
        Outcome::Denied,
        &["stranger"],
    );
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
async fn many_processes_may_open_a_new_store_at_once() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("{}?timeout=20s", url(server.addr()));
    let opened = futures_util::future::join_all((0..8).map(|_| open(&url))).await;
    let held = take(&opened[0], &request("x")).await;
    refused(&opened[7], &request("x")).await;
    give_back(&opened[0], &held.key).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_unix_socket_works() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let (dir, port) = (server.place().dir().display(), server.addr().port());
    let url = format!("postgres://postgres@:{port}/postgres?host={dir}");
    let (a, b) = (open(&url).await, open(&url).await);
    assert!(a.profile().watch, "notifications arrive: {:?}", a.profile().findings);
    let held = take(&a, &request("x")).await;
    let waiter = join_queue(&b, &request("x"), 1).await;
    give_back(&a, &held.key).await;
    granted(waiter).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_trusts_only_the_given_authority() {
    let tls = TlsFiles::new();
    let options = PostgresOptions { tls: Some(tls.clone()), ..PostgresOptions::default() };
    let Ok(server) = servers::postgres(options) else { return };
    let (addr, ca) = (server.addr(), tls.ca_path());
    for mode in ["require", "verify-full"] {
        let store = open(&format!("{}?sslmode={mode}&ca={}", url(addr), ca.display())).await;
        take(&store, &request(mode)).await;
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
async fn behind_a_pooler_it_reports_that_and_polls() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let Ok(pooler) = servers::pgbouncer(server.addr()) else { return };
    let (a, b) = (client_of(&server).await, open(&url(pooler.addr())).await);
    let profile = b.profile();
    assert!(
        !profile.watch && profile.findings.iter().any(|finding| finding.text.contains("PgBouncer")),
        "{:?}",
        profile.findings
    );
    says(&b.watch("").await.map(|_| ()).unwrap_err(), Outcome::Unsupported, &["pooler"]);
    // Some come through the pooler and some do not: they exclude each other all the same, and wait in one queue.
    let held = take(&a, &ask_for("x", Duration::from_secs(60))).await;
    let waiter = join_queue(&b, &request("x"), 1).await;
    give_back(&a, &held.key).await;
    let next = granted(waiter).await;
    refused(&a, &request("x")).await;
    let waiter = join_queue(&a, &request("x"), 1).await;
    give_back(&b, &next.key).await;
    assert!(granted(waiter).await.fence > next.fence);
}

/// Where EXECUTE is revoked by default, the usual rights on the tables are not enough. The message has the SQL that is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_execute_is_revoked_by_default_the_error_has_the_sql() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    sql(&server, "CREATE ROLE app LOGIN; ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC");
    drop(client_of(&server).await);
    sql(
        &server,
        "GRANT USAGE ON SCHEMA lockkeeper TO app; GRANT USAGE, UPDATE ON ALL SEQUENCES IN SCHEMA lockkeeper TO app; \
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA lockkeeper TO app",
    );
    let app = format!("postgres://app@{}/postgres", server.addr());
    let told = refused_at_open(&app).await;
    says(&told, Outcome::Denied, &["permission denied for function", "GRANT EXECUTE ON ALL FUNCTIONS"]);
    let told = told.to_string();
    let (_, grants) = told.split_once("the tables are there already: ").unwrap();
    sql(&server, grants);
    let store = open(&app).await;
    let held = take(&store, &request("x")).await;
    let waiter = join_queue(&store, &request("x"), 1).await;
    give_back(&store, &held.key).await;
    granted(waiter).await;
}
