//! A grant that waits for a standby, and somebody cancels the wait: PostgreSQL commits it here, warns, and answers as usual.

mod common;

use common::{client_of, no_standby, number, sql, wait_for_missing_standby};
use lockkeeper_core::{Error, Renewal};
use lockkeeper_testkit::laws::{ask, eventually, soon, stand_in_line, take};
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
    let asked = ask("x");
    let (client, again) = (store.clone(), asked.clone());
    let asking = tokio::spawn(async move { client.acquire(&again).await });
    cancel_the_wait(&server).await;
    let told = soon("it is told", asking).await.unwrap();
    assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    no_standby(&server);
    let held = take(&store, &asked).await;
    assert_eq!(store.renew(&[held]).await.unwrap(), [Renewal::Renewed]);
}

/// The release was committed here alone: the waiter that was handed the lock writes before it believes that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_off_that_the_standby_may_not_have_is_not_believed() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let (a, b) = (client_of(&server).await, client_of(&server).await);
    let held = take(&a, &ask("x")).await;
    let waiter = stand_in_line(&b, &ask("x"), 1).await;
    wait_for_missing_standby(&server);
    let releasing = tokio::spawn(async move { a.release(&held.claim).await });
    cancel_the_wait(&server).await;
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query LIKE '%step%'";
    eventually("the waiter waits for the standby too", || async {
        assert!(!waiter.is_finished(), "it believes what the standby may not have");
        number(&server, waits) > 0
    })
    .await;
    no_standby(&server);
    soon("the release ends", releasing).await.unwrap().ok();
    soon("the waiter is served", waiter).await.unwrap().unwrap();
}
