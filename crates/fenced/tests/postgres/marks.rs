//! The marks that deleted rows of a guarded table leave: what must not take them away, change them, or miss them.

use lockkeeper_core::Error;
use lockkeeper_fenced::postgres::refusal;
use lockkeeper_fenced::postgres::table::{TableGuardSpec, TriggerState, find, status, uninstall};
use tokio_postgres::Client;

use crate::common::Place;
use crate::table::{guard, spec};

/// What the table said to a statement: nothing, or a word for why it was refused.
async fn say(client: &Client, sql: &str) -> Option<&'static str> {
    let done = client.batch_execute(sql).await;
    if done.is_err() {
        client.batch_execute("ROLLBACK").await.unwrap();
    }
    done.err().map(|e| refusal(&e).map_or_else(|| panic!("{sql}: {e:?}"), |told| told.outcome().as_str()))
}

/// A row is deleted with 9. An INSERT with 10 meets the e-mail of another row and is not done, or moves there: the trigger before it had
/// taken the mark over already, and a late INSERT with 5 was taken.
#[tokio::test]
async fn an_insert_that_is_not_done_takes_no_mark_away() {
    let Some(place) = Place::start().await else { return };
    let mut client = place.client().await;
    let table = "CREATE TABLE orders (id int PRIMARY KEY, email text UNIQUE, fence bigint NOT NULL DEFAULT 0); \
                 INSERT INTO orders VALUES (1, 'one', 0), (2, 'taken', 0)";
    client.batch_execute(table).await.unwrap();
    guard(&mut client, &spec("orders")).await.unwrap();
    let delete = "BEGIN; SET LOCAL lockkeeper.fence = '9'; DELETE FROM orders WHERE id = 1; COMMIT";
    assert_eq!(say(&client, delete).await, None);
    for undone in
        ["ON CONFLICT DO NOTHING", "ON CONFLICT (email) DO UPDATE SET fence = excluded.fence WHERE false"]
    {
        let insert = format!("INSERT INTO orders VALUES (1, 'taken', 10) {undone}");
        assert_eq!(say(&client, &insert).await, None, "{undone}");
        let late = say(&client, "INSERT INTO orders VALUES (1, 'late', 5)").await;
        assert_eq!(late, Some("stale"), "{undone}");
    }
    // The 10 has written nothing: the 9 may still come back, and a writer with a fence below the row's is refused.
    assert_eq!(say(&client, "INSERT INTO orders VALUES (1, 'back', 9)").await, None);
    assert_eq!(say(&client, "UPDATE orders SET fence = 8 WHERE id = 1").await, Some("stale"));
    let upsert = |fence: u64| {
        format!(
            "INSERT INTO orders VALUES (1, 'up', {fence}) ON CONFLICT (id) DO UPDATE SET fence = excluded.fence"
        )
    };
    assert_eq!(say(&client, &upsert(11)).await, None);
    assert_eq!(say(&client, &upsert(10)).await, Some("stale"));
    // A key that never had a mark gets none by being inserted, and a row that is back has taken its mark over.
    assert_eq!(say(&client, "INSERT INTO orders VALUES (3, 'taken', 4) ON CONFLICT DO NOTHING").await, None);
    assert_eq!(marks(&client).await, None);
}

/// A trigger that keeps the newest two rows deletes a row after the statement that has brought it back.
#[tokio::test]
async fn a_row_that_other_triggers_delete_at_once_leaves_its_mark() {
    let Some(place) = Place::start().await else { return };
    let mut client = place.client().await;
    let table = "CREATE TABLE orders (id int PRIMARY KEY, fence bigint); INSERT INTO orders VALUES (3, 0); \
                 CREATE FUNCTION newest() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                 DELETE FROM orders WHERE id NOT IN (SELECT id FROM orders ORDER BY id LIMIT 2); RETURN NULL; END $$; \
                 CREATE TRIGGER a AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION newest()";
    client.batch_execute(table).await.unwrap();
    guard(&mut client, &spec("orders")).await.unwrap();
    for fence in [9, 10, 10] {
        let set = format!("BEGIN; SET LOCAL lockkeeper.fence = '{fence}'; DELETE FROM orders; COMMIT");
        assert_eq!(say(&client, &set).await, None);
        let insert = format!(
            "BEGIN; SET LOCAL lockkeeper.fence = '{fence}'; INSERT INTO orders VALUES (1), (2), (3); COMMIT"
        );
        assert_eq!(say(&client, &insert).await, None);
        assert_eq!(marks(&client).await, Some(format!("[3]={fence}")));
    }
    assert_eq!(say(&client, "INSERT INTO orders VALUES (3, 9)").await, Some("stale"));
}

async fn marks(client: &Client) -> Option<String> {
    let marks = "SELECT string_agg(key || '=' || fence, ' ' ORDER BY key) FROM lockkeeper_fence.mark \
                 WHERE guarded = current_schema || '.orders'";
    client.query_one(marks, &[]).await.unwrap().get(0)
}

/// The function works with the rights of the role that installed it. Any role could hang it on a temporary table of their own, and then write
/// marks of the guarded table there, and remove them.
#[tokio::test]
async fn who_may_only_write_to_the_database_can_neither_forge_marks_nor_read_keys() {
    let Some(place) = Place::start().await else { return };
    let mut client = place.client().await;
    client.batch_execute("CREATE TABLE orders (id text PRIMARY KEY, fence bigint)").await.unwrap();
    guard(&mut client, &spec("orders")).await.unwrap();
    // As it was once installed: installing again mends it.
    let function = "SELECT format('%s', oid::regprocedure) FROM pg_proc WHERE proname = (SELECT function \
                    FROM lockkeeper_fence.guarded WHERE name = current_schema || '.orders')";
    let function: String = client.query_one(function, &[]).await.unwrap().get(0);
    // Others install at the same time: two must not change the rights on one table at once.
    let open = format!(
        "SELECT pg_advisory_xact_lock(hashtextextended('lockkeeper fence', 0)); \
         GRANT EXECUTE ON FUNCTION {function} TO PUBLIC; GRANT SELECT ON lockkeeper_fence.mark TO PUBLIC"
    );
    client.batch_execute(&open).await.unwrap();
    guard(&mut client, &spec("orders")).await.unwrap();
    let (s, role) = (&place.schema, format!("stranger_{}", place.schema));
    let rights = format!(
        "CREATE ROLE {role}; GRANT USAGE ON SCHEMA {s} TO {role}; GRANT INSERT, DELETE, SELECT ON orders TO {role}; \
         SET ROLE {role}; CREATE TEMP TABLE mine (id text, fence bigint)"
    );
    client.batch_execute(&rights).await.unwrap();
    for denied in [
        &*format!(
            "CREATE TRIGGER t BEFORE INSERT ON mine FOR EACH ROW EXECUTE FUNCTION {}('check')",
            function.trim_end_matches("()")
        ),
        "SELECT key FROM lockkeeper_fence.mark",
        "SELECT fence FROM lockkeeper_fence.mark",
        "UPDATE lockkeeper_fence.mark SET fence = 1",
    ] {
        let told = client.batch_execute(denied).await.map_err(|e| e.code().cloned());
        let code = told.as_ref().err().and_then(|code| code.as_ref().map(|code| code.code()));
        assert_eq!(code, Some("42501"), "{denied}: {told:?}");
    }
    // What it may write it writes, and is measured; and it sees how many marks there are.
    assert_eq!(say(&client, "INSERT INTO orders VALUES ('a', 9)").await, None);
    assert_eq!(
        say(&client, "BEGIN; SET LOCAL lockkeeper.fence = '9'; DELETE FROM orders; COMMIT").await,
        None
    );
    assert_eq!(say(&client, "INSERT INTO orders VALUES ('a', 8)").await, Some("stale"));
    let all = status(&mut client).await.unwrap();
    let mine = all.iter().find(|one| one.table == format!("{s}.orders")).unwrap();
    assert_eq!((mine.state, mine.marks), (TriggerState::On, 1));
}

/// The mark is found by the key as text. Each session writes some values in its own way.
#[tokio::test]
async fn a_mark_is_found_whatever_the_settings_of_the_session() {
    let Some(place) = Place::start().await else { return };
    let mut client = place.client().await;
    client
        .batch_execute("CREATE TYPE size AS ENUM ('small', 'large'); CREATE DOMAIN code AS text")
        .await
        .unwrap();
    for (kind, key) in [
        ("timestamptz", "2026-11-18 12:00:00+00"),
        ("timestamp(3)", "2026-11-18 12:00:00.5"),
        ("date", "2026-11-18"),
        ("time", "12:00:00"),
        ("bytea", "\\x00ff"),
        ("char(5)", "ab"),
        ("varchar(5)", "ab"),
        ("code", "it's"),
        ("size", "large"),
        ("uuid", "6e7a4fbc-4d8a-4b7c-9c1b-0d2f6a0b4c11"),
        ("inet", "10.0.0.1"),
        ("boolean", "true"),
        ("smallint", "7"),
        ("bigint GENERATED BY DEFAULT AS IDENTITY", "7"),
    ] {
        let key = key.replace('\'', "''");
        let table =
            format!("DROP TABLE IF EXISTS orders; CREATE TABLE orders (id {kind} PRIMARY KEY, fence bigint)");
        client.batch_execute(&table).await.unwrap();
        guard(&mut client, &spec("orders")).await.unwrap();
        let insert = |fence: u64| format!("INSERT INTO orders VALUES ('{key}', {fence})");
        assert_eq!(say(&client, &insert(9)).await, None);
        let delete = "BEGIN; SET LOCAL lockkeeper.fence = '9'; DELETE FROM orders; COMMIT";
        assert_eq!(say(&client, delete).await, None);
        let other = "SET TimeZone = 'Asia/Tokyo'; SET bytea_output = 'escape'; SET DateStyle = 'SQL, DMY'; SET extra_float_digits = 0";
        let (session, late) = (place.client().await, insert(8));
        session.batch_execute(other).await.unwrap();
        assert_eq!(say(&session, &late).await, Some("stale"), "{kind}");
        assert!(uninstall(&mut client, "orders").await.unwrap());
    }
}

#[tokio::test]
async fn a_key_whose_equal_values_can_be_different_texts_is_refused() {
    let Some(place) = Place::start().await else { return };
    let mut client = place.client().await;
    let collation = "CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false); \
                     CREATE DOMAIN amount AS numeric; CREATE DOMAIN amounts AS amount";
    client.batch_execute(collation).await.unwrap();
    for (columns, says) in [
        ("id numeric PRIMARY KEY", "numeric"),
        ("id amount PRIMARY KEY", "amount"),
        ("id amounts PRIMARY KEY", "amounts"),
        ("id float8 PRIMARY KEY", "double precision"),
        ("id interval PRIMARY KEY", "interval"),
        ("id jsonb PRIMARY KEY", "jsonb"),
        ("id int[] PRIMARY KEY", "integer[]"),
        ("id bpchar PRIMARY KEY", "bpchar"),
        ("a int, id text COLLATE loose, PRIMARY KEY (a, id)", "collation"),
        ("a int, id int GENERATED ALWAYS AS (a + 1) STORED PRIMARY KEY", "generated"),
    ] {
        let table = format!("DROP TABLE IF EXISTS orders; CREATE TABLE orders ({columns}, fence bigint)");
        client.batch_execute(&table).await.unwrap();
        let told = find(&mut client, &spec("orders")).await;
        let Err(Error::Unsupported(text)) = told else { panic!("{columns}: {told:?}") };
        assert!(
            text.starts_with("id of ") && text.contains(says) && text.contains("--key"),
            "{columns}: {text}"
        );
    }
    // An index that compares in another way than its column.
    let table = "DROP TABLE orders; CREATE TABLE orders (id text, fence bigint); CREATE UNIQUE INDEX ON orders (id COLLATE loose)";
    client.batch_execute(table).await.unwrap();
    let told = find(&mut client, &TableGuardSpec { key: vec!["id".into()], ..spec("orders") }).await;
    assert!(matches!(&told, Err(Error::Unsupported(text)) if text.contains("collation")), "{told:?}");
}
