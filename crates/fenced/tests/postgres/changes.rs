//! What happens to a guarded table after it was guarded: other names, heirs, and transactions that meet.

use lockkeeper_fenced::postgres::refusal;
use lockkeeper_fenced::postgres::table::{TriggerState, status, uninstall};
use tokio_postgres::Client;

use crate::common::Place;
use crate::table::{guard, spec};

async fn do_all(client: &Client, sql: &str) {
    client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
}

async fn is_stale(client: &Client, sql: &str) {
    let told = client.batch_execute(sql).await.expect_err(sql);
    assert_eq!(refusal(&told).map(|told| told.outcome().as_str()), Some("stale"), "{sql}: {told:?}");
}

async fn states(client: &mut Client, schema: &str) -> Vec<(String, TriggerState, i64)> {
    let all = status(client).await.unwrap().into_iter();
    let mine = all.filter_map(|one| {
        Some((one.table.strip_prefix(&format!("{schema}."))?.to_owned(), one.state, one.marks))
    });
    mine.collect()
}

const SWAP: &str = "ALTER TABLE orders RENAME TO orders_old; ALTER TABLE orders_new RENAME TO orders";

/// A copy takes the place of the table and is guarded in its turn. Both had one function and one set of marks: a row that came back in
/// one table took the mark of the other away.
#[tokio::test]
async fn a_table_that_takes_the_name_of_another_has_marks_of_its_own() {
    let Some(place) = Place::start().await else { return };
    let mut client = place.client().await;
    do_all(&client, "CREATE TABLE orders (id int PRIMARY KEY, fence bigint); CREATE TABLE orders_new (LIKE orders INCLUDING ALL)").await;
    guard(&mut client, &spec("orders")).await.unwrap();
    do_all(&client, SWAP).await;
    guard(&mut client, &spec("orders")).await.unwrap();
    guard(&mut client, &spec("orders")).await.unwrap();
    let delete = |table: &str| {
        format!(
            "INSERT INTO {table} VALUES (1, 9); BEGIN; SET LOCAL lockkeeper.fence = '9'; DELETE FROM {table}; COMMIT"
        )
    };
    do_all(&client, &delete("orders_old")).await;
    do_all(&client, "INSERT INTO orders VALUES (1, 10)").await;
    is_stale(&client, "INSERT INTO orders_old VALUES (1, 5)").await;
    // An older fence than that of another table is none of this one's business.
    do_all(&client, "INSERT INTO orders VALUES (2, 3)").await;
    let both = [("orders".to_owned(), TriggerState::On, 0), ("orders_old".to_owned(), TriggerState::On, 1)];
    assert_eq!(states(&mut client, &place.schema).await, both);
    // And back: each is found by its triggers, whatever it is called.
    do_all(&client, "ALTER TABLE orders RENAME TO orders_new; ALTER TABLE orders_old RENAME TO orders").await;
    guard(&mut client, &spec("orders")).await.unwrap();
    is_stale(&client, "INSERT INTO orders VALUES (1, 5)").await;
    assert!(uninstall(&mut client, "orders_new").await.unwrap());
    assert_eq!(states(&mut client, &place.schema).await, [("orders".to_owned(), TriggerState::On, 1)]);
    is_stale(&client, "INSERT INTO orders VALUES (1, 5)").await;
    do_all(&client, "INSERT INTO orders_new VALUES (1, 1) ON CONFLICT (id) DO UPDATE SET fence = 1").await;
}

/// Both are guarded, and change their names. `uninstall` of one removed the triggers of the other.
#[tokio::test]
async fn guarded_tables_that_swap_names_keep_their_marks() {
    let Some(place) = Place::start().await else { return };
    let mut client = place.client().await;
    do_all(&client, "CREATE TABLE orders (id int PRIMARY KEY, fence bigint); CREATE TABLE orders_new (LIKE orders INCLUDING ALL)").await;
    guard(&mut client, &spec("orders")).await.unwrap();
    guard(&mut client, &spec("orders_new")).await.unwrap();
    do_all(&client, "INSERT INTO orders VALUES (1, 9); BEGIN; SET LOCAL lockkeeper.fence = '9'; DELETE FROM orders; COMMIT").await;
    do_all(&client, SWAP).await;
    guard(&mut client, &spec("orders")).await.unwrap();
    guard(&mut client, &spec("orders_old")).await.unwrap();
    do_all(&client, "INSERT INTO orders VALUES (1, 5)").await;
    is_stale(&client, "INSERT INTO orders_old VALUES (1, 8)").await;
    assert!(uninstall(&mut client, "orders").await.unwrap());
    is_stale(&client, "INSERT INTO orders_old VALUES (1, 8)").await;
    assert_eq!(states(&mut client, &place.schema).await, [("orders_old".to_owned(), TriggerState::On, 1)]);
    assert!(!uninstall(&mut client, "orders").await.unwrap(), "orders is not guarded any more");
}

/// What was found may be another table by the time the printed SQL is run.
#[tokio::test]
async fn sql_that_was_printed_before_a_swap_is_refused() {
    let Some(place) = Place::start().await else { return };
    let mut client = place.client().await;
    do_all(&client, "CREATE TABLE orders (id int PRIMARY KEY, fence bigint); CREATE TABLE orders_new (LIKE orders INCLUDING ALL)").await;
    guard(&mut client, &spec("orders")).await.unwrap();
    let found = lockkeeper_fenced::postgres::table::find(&mut client, &spec("orders")).await.unwrap();
    do_all(&client, SWAP).await;
    let told = lockkeeper_fenced::postgres::table::install(&mut client, &found).await.unwrap_err();
    assert!(told.to_string().contains("orders_old"), "{told}");
}

/// A table that inherits has rows that `orders` shows and no trigger sees.
#[tokio::test]
async fn a_table_with_heirs_is_not_on() {
    let Some(place) = Place::start().await else { return };
    let mut client = place.client().await;
    do_all(&client, "CREATE TABLE orders (id int PRIMARY KEY, fence bigint)").await;
    guard(&mut client, &spec("orders")).await.unwrap();
    assert_eq!(states(&mut client, &place.schema).await, [("orders".to_owned(), TriggerState::On, 0)]);
    do_all(&client, "CREATE TABLE heir () INHERITS (orders); INSERT INTO heir VALUES (1, 9)").await;
    // PostgreSQL calls no row trigger of `orders` here: that is why the state must say so.
    do_all(&client, "UPDATE orders SET fence = 5").await;
    assert_eq!(states(&mut client, &place.schema).await, [("orders".to_owned(), TriggerState::Inherited, 0)]);
    do_all(&client, "DROP TABLE heir").await;
    assert_eq!(states(&mut client, &place.schema).await, [("orders".to_owned(), TriggerState::On, 0)]);
}

/// One transaction updates a row, another upserts it and waits for the row, the first upserts it too: PostgreSQL alone lets both go on. The
/// second had written to the mark before it waited for the row, and the first waited for the mark.
#[tokio::test]
async fn an_update_and_upserts_of_one_key_meet_in_no_deadlock() {
    let Some(place) = Place::start().await else { return };
    let (mut a, mut b, watcher) = (place.client().await, place.client().await, place.client().await);
    do_all(&a, "CREATE TABLE orders (id int PRIMARY KEY, fence bigint); INSERT INTO orders VALUES (1, 1)")
        .await;
    guard(&mut a, &spec("orders")).await.unwrap();
    let first = a.transaction().await.unwrap();
    first.batch_execute("UPDATE orders SET fence = 8 WHERE id = 1").await.unwrap();
    let upsert = |n: u64| {
        format!("INSERT INTO orders VALUES (1, {n}) ON CONFLICT (id) DO UPDATE SET fence = excluded.fence")
    };
    let (late, second) = (upsert(9), b.transaction().await.unwrap());
    let waiting = second.batch_execute(&late);
    let go_on = async {
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT INTO orders VALUES (1, 9)%'";
        while watcher.query_one(waits, &[]).await.unwrap().get::<_, i64>(0) == 0 {
            tokio::task::yield_now().await;
        }
        let done = first.batch_execute(&upsert(8)).await;
        done.expect("the first transaction goes on");
        first.commit().await.unwrap();
    };
    let (second_done, ()) = tokio::join!(waiting, go_on);
    second_done.expect("the second transaction goes on");
    second.commit().await.unwrap();
    is_stale(&watcher, "UPDATE orders SET fence = 8").await;
}

/// An INSERT with 5 meets no mark, and waits for a row that a transaction deletes with 20. That commits; then an INSERT with 30 finds the mark, turns
/// its sign, and is not done, because it meets another row. The first INSERT took the sign for its own, and both the stale row and the end of the
/// mark were taken.
#[tokio::test]
async fn an_insert_that_waited_takes_no_mark_for_its_own() {
    let Some(place) = Place::start().await else { return };
    let (mut a, late, mut deletes, blocker) =
        (place.client().await, place.client().await, place.client().await, place.client().await);
    // A trigger of the user, which takes its time before ours looks at the mark.
    let table = "CREATE TABLE orders (id int PRIMARY KEY, email text UNIQUE, fence bigint NOT NULL DEFAULT 0); \
                 INSERT INTO orders VALUES (1, 'one', 0), (2, 'taken', 0); CREATE TABLE slow (); \
                 CREATE FUNCTION takes_time() RETURNS trigger LANGUAGE plpgsql AS \
                 $$ BEGIN LOCK TABLE slow IN SHARE MODE; RETURN NULL; END $$; \
                 CREATE TRIGGER a AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION takes_time()";
    do_all(&a, table).await;
    guard(&mut a, &spec("orders")).await.unwrap();
    let delete = deletes.transaction().await.unwrap();
    delete.batch_execute("SET LOCAL lockkeeper.fence = '20'; DELETE FROM orders WHERE id = 1").await.unwrap();
    do_all(&blocker, "BEGIN; LOCK TABLE slow").await;
    let pid: i32 = late.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let waits_for = async |lock: &str| {
        let waits =
            "SELECT wait_event_type = 'Lock' AND wait_event = $2 FROM pg_stat_activity WHERE pid = $1";
        while a.query_one(waits, &[&pid, &lock]).await.unwrap().get::<_, Option<bool>>(0) != Some(true) {
            tokio::task::yield_now().await;
        }
    };
    let insert = tokio::spawn(async move {
        late.batch_execute("INSERT INTO orders VALUES (1, 'late', 5)").await.map_err(|error| refusal(&error))
    });
    waits_for("transactionid").await;
    delete.commit().await.unwrap();
    waits_for("relation").await;
    do_all(&a, "INSERT INTO orders VALUES (1, 'taken', 30) ON CONFLICT (email) DO NOTHING").await;
    do_all(&blocker, "COMMIT").await;
    let refused = insert.await.unwrap().expect_err("the stale row was taken");
    assert_eq!(refused.map(|error| error.outcome().as_str()), Some("stale"));
    is_stale(&a, "INSERT INTO orders VALUES (1, 'late', 5)").await;
}
