//! A schema of an older version is brought up to date under locks that are held.

mod common;

use common::{client_of, number, sql};
use lockkeeper_core::{Acquired, Renewal};
use lockkeeper_testkit::laws::{ask, give_back, name, refused, take, with};
use lockkeeper_testkit::servers::{self, PostgresOptions};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_held_in_version_one_is_held_in_this_one() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let old = client_of(&server).await;
    let held = take(&old, &with(ask("orders/42"), |ask| ask.lock_delay = ask.ttl)).await;
    let plain = take(&old, &ask("orders/43")).await;
    drop(old);
    // As version 1 had it.
    sql(&server, "ALTER TABLE lockkeeper.waiter DROP COLUMN ttl");
    sql(&server, "ALTER TABLE lockkeeper.client DROP COLUMN hears, DROP COLUMN since");
    sql(&server, "ALTER TABLE lockkeeper.state DROP COLUMN one; INSERT INTO lockkeeper.state VALUES (0, 0)");
    sql(&server, "DROP FUNCTION lockkeeper.key(text, text), lockkeeper.next_fence(bigint)");
    sql(
        &server,
        "CREATE FUNCTION lockkeeper.next_fence(_now bigint) RETURNS bigint LANGUAGE sql AS 'SELECT _now'",
    );
    sql(&server, "DELETE FROM lockkeeper.migration WHERE version > 1");
    sql(&server, "DROP FUNCTION lockkeeper.pass_on(text, bigint), lockkeeper.holds(text)");
    let holds = "CREATE FUNCTION lockkeeper.holds(_name text) RETURNS TABLE(attempt bytea) LANGUAGE sql AS 'SELECT NULL::bytea'";
    sql(&server, holds);
    sql(
        &server,
        "CREATE FUNCTION lockkeeper.look(text, int, bigint, text[]) RETURNS text LANGUAGE sql AS 'SELECT NULL::text'",
    );
    let new = client_of(&server).await;
    assert_eq!(number(&server, "SELECT max(version) FROM lockkeeper.migration"), 5);
    assert_eq!(number(&server, "SELECT count(*) FROM lockkeeper.state"), 1, "one row is left of two");
    assert_eq!(
        number(&server, "SELECT count(*) FROM pg_proc WHERE proname = 'look'"),
        1,
        "the old one is gone"
    );
    let other = new.acquire(&ask("orders/42")).await.unwrap();
    assert!(matches!(other, Acquired::Busy(_)), "{other:?}");
    let grants = [held.clone(), plain.clone()];
    assert_eq!(new.renew(&grants).await.unwrap(), [Renewal::Renewed, Renewal::Renewed]);
    new.revoke(&name("orders/43"), "the host is drained").await.unwrap();
    let told = new.renew(std::slice::from_ref(&plain)).await.unwrap();
    assert_eq!(told, [Renewal::Revoked("the host is drained".into())]);
    give_back(&new, &plain.claim).await;
    assert!(take(&new, &ask("orders/43")).await.fence > plain.fence);
    // Once more changes nothing.
    client_of(&server).await;
    assert_eq!(number(&server, "SELECT count(*) FROM lockkeeper.migration"), 5);
    assert_eq!(number(&server, "SELECT count(*) FROM lockkeeper.state"), 1, "one row is left of two");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_functions_of_version_two_are_replaced() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    drop(client_of(&server).await);
    // As version 2 had it, in a word.
    sql(&server, "DELETE FROM lockkeeper.migration WHERE version > 2");
    let step = "CREATE OR REPLACE FUNCTION lockkeeper.step(_client text, _epoch int, _claim bigint, _kind int, _name text, \
        _attempt bytea, _ttl bigint, _terms jsonb, _holder text) RETURNS text LANGUAGE sql AS 'SELECT NULL::text'";
    sql(&server, step);
    let new = client_of(&server).await;
    let held = take(&new, &ask("orders/42")).await;
    refused(&new, &ask("orders/42")).await;
    give_back(&new, &held.claim).await;
}
