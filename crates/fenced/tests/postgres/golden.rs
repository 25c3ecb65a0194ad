//! What is stored in PostgreSQL, as an earlier version wrote it: the guard rows, and a guarded table with its function, its
//! triggers and its marks. This version must write the same, and read it. `LOCKKEEPER_BLESS=1` writes the SQL of the guarded table.

use std::sync::Arc;

use lockkeeper_core::Error;
use lockkeeper_fenced::postgres::table::{TriggerState, find, install_sql, status, uninstall};
use lockkeeper_fenced::postgres::{Fences, PostgresFenced, refusal};
use lockkeeper_fenced::{Fenced, GuardedValue};
use tokio_postgres::Client;

use crate::common::{Place, fence};
use crate::table::{guard, spec};

const FENCE_TABLE: &str = include_str!("../golden/postgres-fence.sql");
/// As an earlier version guarded a table, and as this one does.
const GUARDED_TABLE: &str = include_str!("../golden/postgres-guarded-table.sql");
const GUARDED_TABLE_NOW: &str = include_str!("../golden/postgres-guarded-table-2.sql");

/// The columns, the index and the rows of the table `lockkeeper_fence`.
async fn dump(client: &Client) -> Vec<String> {
    let sql = "SELECT format('%s %s %s %s', a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, l.collname) \
        FROM pg_attribute a LEFT JOIN pg_collation l ON l.oid = a.attcollation \
        WHERE a.attrelid = 'lockkeeper_fence'::regclass AND a.attnum > 0 \
        UNION ALL SELECT regexp_replace(pg_get_indexdef(indexrelid), ' ON \\S+ ', ' ON ') FROM pg_index \
        WHERE indrelid = 'lockkeeper_fence'::regclass \
        UNION ALL SELECT reloptions::text FROM pg_class WHERE oid = 'lockkeeper_fence'::regclass \
        UNION ALL SELECT f::text FROM lockkeeper_fence f ORDER BY 1";
    client.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

#[tokio::test]
async fn the_golden_guard_rows_are_read_and_written() {
    let (Some(old), Some(new)) = (Place::start().await, Place::start().await) else { return };
    old.sql(FENCE_TABLE).await;
    let fences = Fences::default();
    let mut client = new.client().await;
    fences.install(&client).await.unwrap();
    let tx = client.transaction().await.unwrap();
    fences.apply(&tx, "applied", fence(42)).await.unwrap();
    tx.commit().await.unwrap();
    let values = PostgresFenced::new(new.client().await, fences.clone());
    values.put("value", fence(42), b"the").await.unwrap();
    values.delete("deleted", fence(42)).await.unwrap();
    assert_eq!(dump(&client).await, dump(&old.client().await).await, "the stored format has changed");

    let mut client = old.client().await;
    for (resource, value) in [("applied", None), ("deleted", None), ("value", Some(b"the".to_vec()))] {
        let values = PostgresFenced::new(Arc::new(old.client().await), fences.clone());
        let expected = Some(GuardedValue { fence: fence(42), value });
        assert_eq!(values.read(resource).await.unwrap(), expected, "{resource}");
        let tx = client.transaction().await.unwrap();
        let late = fences.apply(&tx, resource, fence(41)).await;
        assert!(matches!(late, Err(Error::Stale { seen, .. }) if seen == fence(42)), "{resource}: {late:?}");
        fences.apply(&tx, resource, fence(43)).await.unwrap();
    }
}

/// What the table said to a statement: nothing, or a word for why it was refused.
async fn say(client: &Client, sql: &str) -> Option<&'static str> {
    let error = client.batch_execute(sql).await.err()?;
    Some(refusal(&error).map_or_else(|| panic!("{sql}: {error:?}"), |told| told.outcome().as_str()))
}

#[tokio::test]
async fn the_golden_guarded_table_is_read_and_written() {
    let Some(place) = Place::start().await else { return };
    place
        .sql("CREATE SCHEMA golden; CREATE TABLE golden.orders (id int PRIMARY KEY, note text, fence bigint)")
        .await;
    let mut client = place.client().await;
    let table = spec("golden.orders");
    let written = install_sql(&find(&mut client, &table).await.unwrap()) + "\n";
    if std::env::var_os("LOCKKEEPER_BLESS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/postgres-guarded-table-2.sql");
        std::fs::write(path, &written).unwrap();
    }
    assert!(
        written == GUARDED_TABLE_NOW,
        "the SQL of a guarded table has changed: keep the file, which must still be read, and add one"
    );

    // The table of the earlier version, with a row and the mark of a deleted one.
    place.sql(&format!("BEGIN; {GUARDED_TABLE} COMMIT")).await;
    place
        .sql("INSERT INTO golden.orders VALUES (1, 'one', 42); INSERT INTO lockkeeper_fence.mark VALUES ('golden.orders', '[2]', 42)")
        .await;
    // First with the function of the earlier version, then with that of this one.
    for round in ["earlier", "this"] {
        let statuses = status(&mut client).await.unwrap();
        let ours = statuses.iter().find(|one| one.table == "golden.orders").expect("it is guarded");
        assert_eq!((ours.state, ours.marks, &*ours.key), (TriggerState::On, 1, "id"), "{round}");
        for late in [
            "UPDATE golden.orders SET note = 'late', fence = 41",
            "INSERT INTO golden.orders VALUES (2, 'late', 41)",
        ] {
            assert_eq!(say(&client, late).await, Some("stale"), "{round}: {late}");
        }
        assert_eq!(say(&client, "UPDATE golden.orders SET note = 'good', fence = 42").await, None, "{round}");
        guard(&mut client, &table).await.unwrap();
    }
    assert!(uninstall(&mut client, "golden.orders").await.unwrap());
    let left = "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'golden.orders'::regclass";
    assert_eq!(client.query_one(left, &[]).await.unwrap().get::<_, i64>(0), 0, "a trigger is left");
}
