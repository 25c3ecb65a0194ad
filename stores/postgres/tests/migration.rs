//! A schema of an older version is upgraded while locks are held.

mod common;

use common::{client_of, number, sql};
use lockkeeper_core::{AcquireOutcome, RenewOutcome};
use lockkeeper_testkit::laws::{give_back, name, refused, request, take, with};
use lockkeeper_testkit::servers::{self, PostgresOptions};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_held_in_version_one_is_held_after_the_upgrade() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let old = client_of(&server).await;
    let held = take(&old, &with(request("orders/42"), |request| request.lock_delay = request.ttl)).await;
    let plain = take(&old, &request("orders/43")).await;
    drop(old);
    // Back to version 1: its column names, without what the versions after it added.
    sql(
        &server,
        "ALTER TABLE lockkeeper.waiter DROP COLUMN ttl; ALTER TABLE lockkeeper.waiter RENAME COLUMN position TO place; \
         ALTER SEQUENCE lockkeeper.queue_position RENAME TO place; \
         ALTER TABLE lockkeeper.client DROP COLUMN listens, DROP COLUMN alive_since; \
         ALTER TABLE lockkeeper.client RENAME COLUMN alive_until TO gone; \
         ALTER TABLE lockkeeper.hold RENAME COLUMN seq TO turn; \
         ALTER TABLE lockkeeper.lock RENAME COLUMN free_at TO free; \
         ALTER TABLE lockkeeper.lock RENAME COLUMN delayed_until TO back; \
         ALTER TABLE lockkeeper.state DROP COLUMN singleton, DROP COLUMN channel; \
         ALTER TABLE lockkeeper.state RENAME COLUMN watched_until TO watched; \
         ALTER TABLE lockkeeper.state RENAME COLUMN swept_at TO tidied; INSERT INTO lockkeeper.state VALUES (0, 0); \
         DELETE FROM lockkeeper.migration; INSERT INTO lockkeeper.migration VALUES (1); \
         DROP FUNCTION lockkeeper.holds(text), lockkeeper.next_fence(bigint), lockkeeper.renew(text, bytea)",
    );
    // Functions of version 1 whose parameters or results have changed.
    for function in [
        "next_fence(_now bigint) RETURNS bigint LANGUAGE sql AS 'SELECT _now'",
        "holds(_name text) RETURNS TABLE(attempt bytea) LANGUAGE sql AS 'SELECT NULL::bytea'",
        "look(text, int, bigint, text[]) RETURNS text LANGUAGE sql AS 'SELECT NULL::text'",
        "renew(_name text, _attempt bytea) RETURNS bool LANGUAGE sql AS 'SELECT true'",
    ] {
        sql(&server, &format!("CREATE FUNCTION lockkeeper.{function}"));
    }
    let new = client_of(&server).await;
    assert_eq!(number(&server, "SELECT max(version) FROM lockkeeper.migration"), 9);
    assert_eq!(number(&server, "SELECT count(*) FROM lockkeeper.state"), 1, "one row is left of two");
    assert_eq!(
        number(&server, "SELECT count(*) FROM pg_proc WHERE proname = 'look'"),
        0,
        "the old function is dropped"
    );
    let other = new.acquire(&request("orders/42")).await.unwrap();
    assert!(matches!(other, AcquireOutcome::Busy(_)), "{other:?}");
    let grants = [held.clone(), plain.clone()];
    assert_eq!(new.renew(&grants).await.unwrap(), [RenewOutcome::Renewed, RenewOutcome::Renewed]);
    new.revoke(&name("orders/43"), "the host is drained").await.unwrap();
    let outcome = new.renew(std::slice::from_ref(&plain)).await.unwrap();
    assert_eq!(outcome, [RenewOutcome::Revoked("the host is drained".into())]);
    give_back(&new, &plain.key).await;
    assert!(take(&new, &request("orders/43")).await.fence > plain.fence);
    // Opening the store once more changes nothing.
    client_of(&server).await;
    assert_eq!(number(&server, "SELECT count(*) FROM lockkeeper.migration"), 2);
    assert_eq!(number(&server, "SELECT count(*) FROM lockkeeper.state"), 1, "one row is left of two");
}

/// The migration keeps a function that is not the store's own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_function_of_the_user_survives_the_upgrade_from_version_six() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    common::load_golden(&server, include_str!("golden/6.sql"));
    sql(&server, "CREATE FUNCTION lockkeeper.report() RETURNS int LANGUAGE sql AS 'SELECT 42'");
    let step =
        "CREATE FUNCTION lockkeeper.step(_client text) RETURNS text LANGUAGE sql AS 'SELECT NULL::text'";
    sql(&server, step);
    let new = client_of(&server).await;
    assert_eq!(number(&server, "SELECT lockkeeper.report()"), 42);
    assert_eq!(number(&server, "SELECT count(*) FROM pg_proc WHERE proname = 'step'"), 0);
    let held = take(&new, &request("orders/42")).await;
    refused(&new, &request("orders/42")).await;
    give_back(&new, &held.key).await;
}
