//! The guard row in transactions of the user's.

use futures_util::future::join_all;
use lockkeeper_core::{Error, Result};
use lockkeeper_fenced::postgres::Fences;
use tokio_postgres::{Client, IsolationLevel};

use crate::common::{Place, fence};

async fn place() -> Option<Place> {
    let place = Place::start().await?;
    let s = &place.schema;
    place.sql(&format!("CREATE TABLE {s}.orders (id int PRIMARY KEY, state text); INSERT INTO {s}.orders VALUES (42, 'open')")).await;
    Some(place)
}

async fn set(fences: &Fences, client: &mut Client, n: u64, state: &str) -> Result<()> {
    let tx = client.transaction().await.unwrap();
    let update = async { tx.execute("UPDATE orders SET state = $1 WHERE id = 42", &[&state]).await };
    // Both are sent at once; what comes back is looked at before anything is committed.
    let (checked, updated) = tokio::join!(fences.apply(&tx, "orders/42", fence(n)), update);
    checked?;
    updated.unwrap();
    tx.commit().await.unwrap();
    Ok(())
}

async fn state(client: &Client) -> String {
    client.query_one("SELECT state FROM orders", &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn the_users_write_and_the_mark_are_committed_together_or_not_at_all() {
    let Some(place) = place().await else { return };
    let (mut a, mut b) = (place.client().await, place.client().await);
    // Another schema and a name that needs quotes.
    let fences = Fences::new(&format!("{}.My \"Fences\"; --", place.schema)).unwrap();
    let missing = set(&fences, &mut a, 1, "x").await;
    assert!(matches!(&missing, Err(Error::Invalid(text)) if text.contains("CREATE TABLE")), "{missing:?}");
    fences.install(&a).await.unwrap();
    fences.install(&b).await.unwrap();
    let quick = fences.clone().prepared(&b).await.unwrap();
    set(&fences, &mut a, 5, "five").await.unwrap();
    set(&quick, &mut b, 7, "seven").await.unwrap();
    let late = set(&fences, &mut a, 6, "late").await;
    assert!(
        matches!(late, Err(Error::Stale { presented, seen }) if (presented, seen) == (fence(6), fence(7)))
    );
    let late = set(&quick, &mut b, 6, "late").await;
    assert!(matches!(late, Err(Error::Stale { .. })), "{late:?}");
    assert_eq!(state(&a).await, "seven");
    // Rolled back, the mark is as it was.
    {
        let tx = b.transaction().await.unwrap();
        fences.apply(&tx, "orders/42", fence(9)).await.unwrap();
    }
    set(&fences, &mut a, 8, "eight").await.unwrap();
    assert_eq!(state(&b).await, "eight");
    assert!(
        matches!(set(&Fences::default(), &mut a, 1, "x").await, Err(Error::Invalid(_))),
        "there is no such table"
    );
    for bad in ["", "a.b.c", "a.", &"n".repeat(64)] {
        assert!(matches!(Fences::new(bad), Err(Error::Invalid(_))), "{bad:?}");
    }
}

#[tokio::test]
async fn who_comes_while_a_transaction_is_open_waits_and_is_then_measured_by_it() {
    let Some(place) = place().await else { return };
    let (mut a, mut b, watcher) = (place.client().await, place.client().await, place.client().await);
    let fences = Fences::default();
    fences.install(&watcher).await.unwrap();
    for (isolation, wanted) in
        [(IsolationLevel::ReadCommitted, "stale"), (IsolationLevel::RepeatableRead, "unavailable")]
    {
        watcher.execute("DELETE FROM lockkeeper_fence", &[]).await.unwrap();
        let newer = a.transaction().await.unwrap();
        fences.apply(&newer, "orders/42", fence(9)).await.unwrap();
        let older = b.build_transaction().isolation_level(isolation).start().await.unwrap();
        older.query("SELECT FROM orders", &[]).await.unwrap();
        let late = fences.apply(&older, "orders/42", fence(7));
        let commit = async {
            let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%lockkeeper_fence%'";
            while watcher.query_one(waits, &[]).await.unwrap().get::<_, i64>(0) == 0 {
                tokio::task::yield_now().await;
            }
            newer.commit().await.unwrap();
        };
        let (late, ()) = tokio::join!(late, commit);
        assert_eq!(late.unwrap_err().outcome().as_str(), wanted);
    }
}

/// `CREATE TABLE IF NOT EXISTS` fails for all but one of several sessions that begin at once (23505 in a catalogue). Each worker of a fleet
/// that starts installs the table.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_several_install_first_is_made_once() {
    let Some(place) = place().await else { return };
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(place.client().await);
    }
    for round in 0..20 {
        let fences = Fences::new(&format!("{}.first_{round}", place.schema)).unwrap();
        for made in join_all(clients.iter().map(|client| fences.install(client))).await {
            made.unwrap();
        }
    }
}

/// The table is made inside of the caller's transaction too, which goes on if another session has made it meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_outlives_the_installation_by_another() {
    let Some(place) = place().await else { return };
    let (mut a, mut b) = (place.client().await, place.client().await);
    let fences = Fences::new(&format!("{}.in $do$ $_do$ a transaction", place.schema)).unwrap();
    let first = a.transaction().await.unwrap();
    fences.install(&first).await.unwrap();
    let second = b.transaction().await.unwrap();
    let pid: i32 = second.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let watcher = place.client().await;
    let waits = async {
        let waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = $1";
        while watcher.query_one(waits, &[&pid]).await.unwrap().get::<_, Option<bool>>(0) != Some(true) {
            tokio::task::yield_now().await;
        }
        first.commit().await.unwrap();
    };
    let (installed, ()) = tokio::join!(fences.install(&second), waits);
    installed.unwrap();
    fences.apply(&second, "orders/42", fence(7)).await.unwrap();
    second.commit().await.unwrap();
}

/// A name that is taken by something else is an error, and not a table that is there.
#[tokio::test]
async fn a_type_with_the_name_of_the_table_is_told() {
    let Some(place) = place().await else { return };
    let client = place.client().await;
    place.sql(&format!("CREATE TYPE {}.taken AS ENUM ('a')", place.schema)).await;
    let fences = Fences::new(&format!("{}.taken", place.schema)).unwrap();
    let told = fences.install(&client).await.unwrap_err();
    assert!(told.to_string().contains("already exists"), "{told}");
}

#[tokio::test]
async fn who_may_not_make_the_table_is_told_the_sql() {
    let Some(place) = place().await else { return };
    let client = place.client().await;
    let role = format!("poor_{}", place.schema);
    client
        .batch_execute(&format!(
            "CREATE ROLE {role}; GRANT USAGE ON SCHEMA {} TO {role}; SET ROLE {role}",
            place.schema
        ))
        .await
        .unwrap();
    let told = Fences::default().install(&client).await;
    assert!(matches!(&told, Err(Error::Denied(text)) if text.contains("CREATE TABLE")), "{told:?}");
}

/// The default table follows the `search_path`, as the page says; a table with its schema does not.
#[tokio::test]
async fn a_table_that_is_named_with_its_schema_is_the_same_for_every_search_path() {
    let Some(place) = place().await else { return };
    let s = &place.schema;
    let (mut here, mut there) = (place.client().await, place.client().await);
    place
        .sql(&format!("CREATE SCHEMA {s}_b; CREATE TABLE {s}_b.orders (id int PRIMARY KEY, state text)"))
        .await;
    there.batch_execute(&format!("SET search_path = {s}_b")).await.unwrap();
    let (default, named) = (Fences::default(), Fences::new(&format!("{s}.lockkeeper_fence_named")).unwrap());
    for client in [&here, &there] {
        default.install(client).await.unwrap();
        named.install(client).await.unwrap();
    }
    set(&default, &mut here, 9, "nine").await.unwrap();
    set(&default, &mut there, 8, "another table").await.unwrap();
    set(&named, &mut here, 9, "nine").await.unwrap();
    let late = set(&named, &mut there, 8, "late").await;
    assert!(matches!(late, Err(Error::Stale { .. })), "{late:?}");
}
