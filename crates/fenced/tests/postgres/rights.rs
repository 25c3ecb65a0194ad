//! What `fence install` by a superuser must not hand on: each test is an attack by a role that may only use the database.

use lockkeeper_core::Error;
use lockkeeper_fenced::postgres::table::{TriggerState, install, install_sql, status, uninstall};
use lockkeeper_testkit::servers::{self, PostgresOptions};
use tokio_postgres::Client;

use crate::common::{Place, connect_as};
use crate::table::{guard, spec};

/// A server of its own, and the attacker's session there: one who may make schemas.
async fn attacked() -> Option<(Place, Client)> {
    let server = tokio::task::spawn_blocking(|| servers::postgres(PostgresOptions::default()).ok());
    let place = Place { server: server.await.unwrap()?.into(), schema: "public".into() };
    place.sql("CREATE ROLE mallory LOGIN; GRANT CREATE ON DATABASE postgres TO mallory; GRANT CREATE ON SCHEMA public TO mallory").await;
    let mallory = connect_as(&place.address(), "mallory").await;
    let all = "CREATE TYPE size AS ENUM ('small', 'large');".to_owned()
        + &code("to_json", "size", "json", "'\"small\"'")
        + &code("to_fence", "size", "bigint", "99")
        + &code("trigger_code", "", "trigger", "NEW");
    mallory.batch_execute(&all).await.unwrap();
    Some((place, mallory))
}

/// What the attacker wants to run with the rights of another role.
fn code(name: &str, takes: &str, returns: &str, end: &str) -> String {
    format!(
        "CREATE FUNCTION public.{name}({takes}) RETURNS {returns} LANGUAGE plpgsql AS $$ BEGIN \
         IF current_user <> 'mallory' THEN ALTER ROLE mallory SUPERUSER; END IF; RETURN {end}; END $$;"
    )
}

async fn is_superuser(client: &Client) -> bool {
    client.query_one("SELECT rolsuper FROM pg_roles WHERE rolname = 'mallory'", &[]).await.unwrap().get(0)
}

/// The owner of an enum makes a cast to `json` after the table was guarded. `jsonb_build_array` looked for such a cast, and ran it.
#[tokio::test]
async fn a_cast_of_a_keys_type_does_not_run_with_the_installers_rights() {
    let Some((place, mallory)) = attacked().await else { return };
    let mut client = place.client().await;
    let table = "CREATE TABLE orders (id size PRIMARY KEY, fence bigint); GRANT ALL ON orders TO mallory";
    client.batch_execute(table).await.unwrap();
    guard(&mut client, &spec("orders")).await.unwrap();
    mallory.batch_execute("CREATE CAST (size AS json) WITH FUNCTION to_json(size)").await.unwrap();
    mallory.batch_execute("INSERT INTO orders VALUES ('large', 9)").await.unwrap();
    let delete = "BEGIN; SET LOCAL lockkeeper.fence = '9'; DELETE FROM orders; COMMIT";
    mallory.batch_execute(delete).await.unwrap();
    assert!(!is_superuser(&client).await, "a cast ran as the installer");
    // And the mark is still found.
    let late = mallory.batch_execute("INSERT INTO orders VALUES ('large', 8)").await.unwrap_err();
    assert_eq!(late.code().unwrap().code(), "LK065");
}

/// The table's owner gives the name of the fence's column, or of the key, to a column of a type with casts of its own.
#[tokio::test]
async fn another_column_of_the_same_name_does_not_run_with_the_installers_rights() {
    let Some((place, mallory)) = attacked().await else { return };
    let mut client = place.client().await;
    mallory
        .batch_execute(
            "CREATE CAST (size AS bigint) WITH FUNCTION to_fence(size) AS IMPLICIT; \
             CREATE CAST (size AS json) WITH FUNCTION to_json(size); CREATE DOMAIN sizes AS size; CREATE DOMAIN code AS text",
        )
        .await
        .unwrap();
    for (key, column, kind) in
        [("int", "fence", "size"), ("int", "id", "size"), ("code", "id", "size"), ("code", "id", "sizes")]
    {
        let table = format!("CREATE TABLE orders (id {key} PRIMARY KEY, fence bigint)");
        mallory.batch_execute(&table).await.unwrap();
        guard(&mut client, &spec("orders")).await.unwrap();
        let swap = format!(
            "ALTER TABLE orders RENAME {column} TO old; ALTER TABLE orders ADD COLUMN {column} {kind}"
        );
        mallory.batch_execute(&swap).await.unwrap();
        let columns = if column == "id" {
            "old, id, fence) VALUES ('1', 'large', 5"
        } else {
            "id, fence) VALUES (1, 'large'"
        };
        let told = mallory.batch_execute(&format!("INSERT INTO orders ({columns})")).await;
        assert!(!is_superuser(&client).await, "{key} {column} {kind}: a cast ran as the installer");
        let told = told.unwrap_err();
        assert_eq!(told.code().unwrap().code(), "LK064", "{key} {column} {kind}: {told:?}");
        mallory.batch_execute("DROP TABLE orders").await.unwrap();
    }
}

/// The attacker prepares our schema, or a table in it, with a trigger. `CREATE … IF NOT EXISTS` took it for ours.
#[tokio::test]
async fn a_schema_that_another_role_has_prepared_is_refused() {
    let tables = "CREATE TABLE lockkeeper_fence.guarded (name text PRIMARY KEY, fence_column text, key text, allow_unfenced boolean, \
                  function text, since timestamptz); CREATE TABLE lockkeeper_fence.mark (guarded text, key text, fence bigint, \
                  PRIMARY KEY (guarded, key)); CREATE TRIGGER t BEFORE INSERT ON lockkeeper_fence.guarded FOR EACH ROW EXECUTE FUNCTION trigger_code()";
    let schema = "CREATE SCHEMA lockkeeper_fence";
    let lent = "CREATE SCHEMA lockkeeper_fence; GRANT ALL ON SCHEMA lockkeeper_fence TO mallory";
    for (ours, theirs, says) in [
        (
            "",
            format!("{schema}; {tables}; GRANT ALL ON ALL TABLES IN SCHEMA lockkeeper_fence TO PUBLIC"),
            "schema lockkeeper_fence belongs to mallory",
        ),
        ("", schema.to_owned(), "schema lockkeeper_fence belongs to mallory"),
        (lent, tables.to_owned(), "belongs to mallory"),
    ] {
        let Some((place, mallory)) = attacked().await else { return };
        let mut client = place.client().await;
        client
            .batch_execute(&format!("CREATE TABLE orders (id int PRIMARY KEY, fence bigint); {ours}"))
            .await
            .unwrap();
        mallory.batch_execute(&theirs).await.unwrap();
        let told = guard(&mut client, &spec("orders")).await;
        assert!(!is_superuser(&client).await, "{theirs}: a trigger ran as the installer");
        assert!(matches!(&told, Err(Error::Denied(text)) if text.contains(says)), "{theirs}: {told:?}");
    }
}

/// The owner of a table has lent the right to make triggers, and takes the tables over from the one it was lent to.
#[tokio::test]
async fn a_trigger_of_another_role_on_our_own_tables_is_refused() {
    let Some((place, mallory)) = attacked().await else { return };
    let mut client = place.client().await;
    client.batch_execute("CREATE TABLE orders (id int PRIMARY KEY, fence bigint)").await.unwrap();
    guard(&mut client, &spec("orders")).await.unwrap();
    client.batch_execute("GRANT TRIGGER ON lockkeeper_fence.guarded TO mallory").await.unwrap();
    let trigger = "CREATE TRIGGER t BEFORE INSERT ON lockkeeper_fence.guarded FOR EACH ROW EXECUTE FUNCTION trigger_code()";
    mallory.batch_execute(trigger).await.unwrap();
    let told = guard(&mut client, &spec("orders")).await;
    assert!(!is_superuser(&client).await, "a trigger ran as the installer");
    assert!(matches!(&told, Err(Error::Denied(text)) if text.contains("trigger")), "{told:?}");
}

/// A function in `public` that fits a call better than PostgreSQL's own (the class of CVE-2018-1058).
#[tokio::test]
async fn functions_in_the_search_path_of_the_installer_do_not_run() {
    let Some((place, mallory)) = attacked().await else { return };
    let mut client = place.client().await;
    let trap =
        code("hashtextextended", "text, int", "bigint", "1") + &code("quote_ident", "name", "text", "'x'");
    mallory.batch_execute(&trap).await.unwrap();
    client.batch_execute("CREATE TABLE orders (id int PRIMARY KEY, fence bigint)").await.unwrap();
    guard(&mut client, &spec("orders")).await.unwrap();
    assert!(!is_superuser(&client).await, "a function of another role ran as the installer");
    // What it prints for others to run, likewise.
    let guarded = lockkeeper_fenced::postgres::table::find(&mut client, &spec("orders")).await.unwrap();
    client.batch_execute(&format!("BEGIN; {}; COMMIT", install_sql(&guarded))).await.unwrap();
    install(&mut client, &guarded).await.unwrap();
    assert!(!is_superuser(&client).await, "a function of another role ran as the installer");
    assert!(status(&mut client).await.unwrap().iter().all(|one| one.state == TriggerState::On));
}

/// `uninstall` and `status` meet a prepared schema as well: a trigger on DELETE, and a view in place of a table.
#[tokio::test]
async fn looking_and_removing_run_no_code_of_another_role() {
    let guarded = "CREATE SCHEMA lockkeeper_fence; GRANT ALL ON SCHEMA lockkeeper_fence TO PUBLIC; \
                   CREATE TABLE lockkeeper_fence.mark (guarded text, key text, fence bigint); \
                   CREATE TABLE lockkeeper_fence.guarded (name text PRIMARY KEY, fence_column text, key text, allow_unfenced boolean, function text)";
    let trigger = "INSERT INTO lockkeeper_fence.guarded VALUES ('public.orders', 'fence', 'id', false, 'guard'); \
                   CREATE TRIGGER t BEFORE DELETE ON lockkeeper_fence.guarded FOR EACH ROW EXECUTE FUNCTION trigger_code()";
    let view = "DROP TABLE lockkeeper_fence.guarded; CREATE VIEW lockkeeper_fence.guarded AS SELECT 'a.b' AS name, 'fence' AS fence_column, \
                public.to_json('small')::text AS key, false AS allow_unfenced, 'guard' AS function";
    for trap in [trigger, view] {
        let Some((place, mallory)) = attacked().await else { return };
        let mut client = place.client().await;
        client.batch_execute("CREATE TABLE orders (id int PRIMARY KEY, fence bigint)").await.unwrap();
        mallory.batch_execute(&format!("{guarded}; {trap}")).await.unwrap();
        let told = uninstall(&mut client, "orders").await;
        assert!(matches!(told, Err(Error::Denied(_))), "{trap}: {told:?}");
        status(&mut client).await.ok();
        assert!(!is_superuser(&client).await, "{trap}: code of another role ran");
    }
}
