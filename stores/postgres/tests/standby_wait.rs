//! A grant that waits for a standby, and the wait is cancelled: PostgreSQL commits it here, warns, and replies as usual.

mod common;

use common::{client_of, no_standby, number, sql, wait_for_missing_standby};
use lockkeeper_core::{Error, RenewOutcome};
use lockkeeper_testkit::laws::{eventually, join_queue, request, soon, take};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};

async fn cancel_the_wait(server: &Server) {
    let waits = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    eventually("it waits for the standby", || async {
        number(server, &format!("SELECT count(*) {waits}")) > 0
    })
    .await;
    sql(server, &format!("SELECT pg_cancel_backend(pid) {waits}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_wait_for_the_standby_is_no_grant() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = client_of(&server).await;
    wait_for_missing_standby(&server);
    let asked = request("x");
    let (client, again) = (store.clone(), asked.clone());
    let asking = tokio::spawn(async move { client.acquire(&again).await });
    cancel_the_wait(&server).await;
    let outcome = soon("the request ends", asking).await.unwrap();
    assert!(matches!(outcome, Err(Error::Unknown(_))), "{outcome:?}");
    no_standby(&server);
    let held = take(&store, &asked).await;
    assert_eq!(store.renew(&[held]).await.unwrap(), [RenewOutcome::Renewed]);
}

/// The release was committed here alone: the waiter that was handed the lock writes before it uses the grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_off_that_the_standby_may_not_have_is_not_used() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let (a, b) = (client_of(&server).await, client_of(&server).await);
    let held = take(&a, &request("x")).await;
    let waiter = join_queue(&b, &request("x"), 1).await;
    wait_for_missing_standby(&server);
    let releasing = tokio::spawn(async move { a.release(&held.key).await });
    cancel_the_wait(&server).await;
    // On a busy machine the waiter's request may have timed out by now: its new connection waits for the standby then.
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' \
                 AND (query LIKE '%run_request%' OR query LIKE '%begin_epoch%')";
    eventually("the waiter waits for the standby too", || async {
        assert!(!waiter.is_finished(), "it uses a grant that the standby may not have");
        releasing.is_finished() && number(&server, waits) > 0
    })
    .await;
    no_standby(&server);
    soon("the release ends", releasing).await.unwrap().ok();
    soon("the waiter is granted the lock", waiter).await.unwrap().unwrap();
}
