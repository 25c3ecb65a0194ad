//! What makes a table a job table, and what is refused.

use lockkeeper::Error;
use lockkeeper::jobs::{ExistingRows, JobTable, Jobs, install, install_sql, uninstall};

use super::common::{Database, LONG};

#[tokio::test]
async fn a_table_becomes_a_job_table_and_back() {
    let Some(db) = Database::start().await else { return };
    db.sql(
        "CREATE SCHEMA \"My shop\"; CREATE TABLE \"My shop\".\"Mails\" (\"Id\" int PRIMARY KEY, body text); \
            INSERT INTO \"My shop\".\"Mails\" SELECT generate_series(1, 3)",
    )
    .await;
    let (mut client, name) = (db.client().await, "\"My shop\".\"Mails\"");
    let early = Jobs::open(&db.url(), name).await;
    assert!(matches!(&early, Err(Error::Invalid(why)) if why.contains("jobs install")), "{early:?}");
    let table = JobTable::find(&mut client, name).await.unwrap();
    assert_eq!((&*table.table, table.key_columns(), table.installed), (name, vec!["\"Id\""], false));
    // What is printed for others to run is what is run.
    client
        .batch_execute(&format!("BEGIN; {}; COMMIT", install_sql(&table, ExistingRows::Open)))
        .await
        .unwrap();
    let table = JobTable::find(&mut client, name).await.unwrap();
    assert!(table.installed && !install(&mut client, &table, ExistingRows::Open).await.unwrap());
    let jobs = db.open(name, LONG).await;
    assert_eq!(jobs.counts().await.unwrap().due, 3);
    assert!(uninstall(&mut client, &table).await.unwrap());
    let table = JobTable::find(&mut client, name).await.unwrap();
    assert!(!table.installed && !uninstall(&mut client, &table).await.unwrap());
    let left = "SELECT count(*) FROM pg_attribute WHERE attrelid = '\"My shop\".\"Mails\"'::regclass AND attnum > 0 \
                AND NOT attisdropped";
    assert_eq!(db.number(left).await, 2, "a column is left");
    let left = "SELECT count(*) FROM pg_index WHERE indrelid = '\"My shop\".\"Mails\"'::regclass";
    assert_eq!(db.number(left).await, 1, "an index is left");
    // Rows of before that are no jobs.
    assert!(install(&mut client, &table, ExistingRows::Done).await.unwrap());
    db.sql("INSERT INTO \"My shop\".\"Mails\" VALUES (4, 'new')").await;
    let counts = db.open(name, LONG).await.counts().await.unwrap();
    assert_eq!((counts.due, counts.done), (1, 3));
}

#[tokio::test]
async fn what_cannot_be_a_job_table_is_refused_and_left_as_it_is() {
    let Some(db) = Database::start().await else { return };
    db.sql("CREATE TABLE keyless (id int); CREATE VIEW seen AS SELECT 1 AS id; CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id); \
            CREATE TABLE taken (id int PRIMARY KEY, lk_state text); CREATE TABLE odd (at point, id int, PRIMARY KEY (id)); \
            CREATE TABLE json (id jsonb PRIMARY KEY); CREATE TABLE newer (id int PRIMARY KEY); \
            CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child () INHERITS (parent)").await;
    db.install("newer").await;
    db.sql("COMMENT ON COLUMN newer.lk_state IS 'lockkeeper jobs, format 2'").await;
    let before = "SELECT count(*) FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid WHERE relkind IN ('r', 'p', 'v') AND relname <> 'newer'";
    let (count, mut client) = (db.number(before).await, db.client().await);
    for (name, says) in [
        ("nowhere", "there is no table"),
        ("x'; DROP TABLE taken; --", "invalid"),
        ("", "name"),
        ("keyless", "no primary key"),
        ("seen", "no plain table"),
        ("parts", "partitioned"),
        ("parent", "inherits"),
        ("pg_catalog.pg_class", "belongs to the system"),
        ("taken", "not lockkeeper's"),
        ("json", "of type jsonb"),
        ("newer", "upgrade"),
    ] {
        let told = JobTable::find(&mut client, name).await;
        let text = told.as_ref().map(|_| String::new()).unwrap_or_else(|error| error.to_string());
        assert!(text.contains(says), "{name:?}: {told:?}");
        assert!(matches!(told, Err(Error::Invalid(_) | Error::Unsupported(_))), "{name:?}: {told:?}");
    }
    assert!(JobTable::find(&mut client, "odd").await.is_ok(), "only the key has to be of a usual type");
    assert_eq!(db.number(before).await, count, "a refused table was changed");
}

/// The statements that docs/jobs.md shows to programs in other languages do what it says.
#[tokio::test]
async fn the_statements_of_the_page_work() {
    let Some(db) = Database::start().await else { return };
    db.sql("CREATE TABLE mails (id bigint PRIMARY KEY)").await;
    db.install("mails").await;
    db.sql("INSERT INTO mails VALUES (7), (8)").await;
    let page = include_str!("../../../../docs/jobs.md");
    let blocks: Vec<&str> =
        page.split("```sql\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    let [claim, complete] = blocks[..] else { panic!("two statements: {blocks:?}") };
    let (client, claim) = (db.client().await, claim.split(';').next().unwrap());
    let claimed = client.query(claim, &[&10_i64, &1_i32, &30_f64, &"psql"]).await.unwrap();
    let (id, fence): (i64, i64) = (claimed[0].get(0), claimed[0].get(1));
    assert_eq!((claimed.len(), claimed[0].get::<_, &str>(3)), (2, "open"));
    let early = client.query(complete, &[&id, &(fence - 1)]).await.unwrap();
    assert!(early.is_empty(), "a late completion was taken");
    assert_eq!(client.query(complete, &[&id, &fence]).await.unwrap().len(), 1);
    // The last attempt of the other one is over.
    db.sql("UPDATE mails SET lk_run_at = now() WHERE lk_state = 'open'").await;
    let buried = client.query(claim, &[&10_i64, &1_i32, &30_f64, &"psql"]).await.unwrap();
    assert_eq!((buried.len(), buried[0].get::<_, &str>(3)), (1, "failed"));
    let counts = db.open("mails", LONG).await.counts().await.unwrap();
    assert_eq!((counts.done, counts.failed, counts.due), (1, 1, 0));
}
