//! Tables that check by themselves, written to by clients that know nothing of us.

use std::sync::Arc;

use async_trait::async_trait;
use lockkeeper_core::{Error, Fence, Result};
use lockkeeper_fenced::postgres::table::{self, TableGuardSpec, TriggerState};
use lockkeeper_fenced::postgres::{refusal, tokio_postgres};
use lockkeeper_fenced::{Fenced, GuardedValue};
use lockkeeper_testkit::fenced::FencedHarness;
use tokio_postgres::Client;

use crate::common::{Place, Plain, connect};

pub fn spec(table: &str) -> TableGuardSpec {
    TableGuardSpec { table: table.into(), column: "fence".into(), key: vec![], allow_unfenced: false }
}

pub async fn guard(client: &mut Client, spec: &TableGuardSpec) -> Result<()> {
    let guarded = table::find(client, spec).await?;
    table::install(client, &guarded).await
}

/// A guarded table, and plain statements.
struct Guarded(Place);

#[async_trait]
impl FencedHarness for Guarded {
    async fn start() -> Option<Self> {
        let place = Place::start().await?;
        let mut client = place.client().await;
        client
            .batch_execute("CREATE TABLE things (name text PRIMARY KEY, value bytea, fence bigint)")
            .await
            .unwrap();
        guard(&mut client, &spec("things")).await.unwrap();
        Some(Guarded(place))
    }

    fn address(&self) -> String {
        self.0.address()
    }

    async fn client(address: &str) -> Arc<dyn Fenced> {
        Arc::new(Statements { client: connect(address).await, turn: tokio::sync::Mutex::default() })
    }

    async fn twin(address: &str) -> Arc<dyn Fenced> {
        Plain::open(address).await
    }
}

struct Statements {
    client: Client,
    turn: tokio::sync::Mutex<()>,
}

impl Statements {
    fn told(error: tokio_postgres::Error) -> Error {
        refusal(&error).unwrap_or_else(|| Error::Unavailable(format!("{error:?}")))
    }
}

#[async_trait]
impl Fenced for Statements {
    async fn put(&self, resource: &str, fence: Fence, value: &[u8]) -> Result<()> {
        let sql = "INSERT INTO things VALUES ($1, $2, $3) ON CONFLICT (name) DO UPDATE SET value = excluded.value, fence = excluded.fence";
        let _turn = self.turn.lock().await;
        self.client
            .execute(sql, &[&resource, &value, &(fence.get() as i64)])
            .await
            .map(drop)
            .map_err(Self::told)
    }

    async fn delete(&self, resource: &str, fence: Fence) -> Result<()> {
        // A DELETE of nothing calls no trigger: the row is made first.
        let name = resource.replace('\'', "''");
        let sql = format!(
            "BEGIN; SET LOCAL lockkeeper.fence = '{fence}'; \
             INSERT INTO things VALUES ('{name}') ON CONFLICT (name) DO UPDATE SET value = NULL; \
             DELETE FROM things WHERE name = '{name}'; COMMIT"
        );
        let _turn = self.turn.lock().await;
        let done = self.client.batch_execute(&sql).await;
        if done.is_err() {
            self.client.batch_execute("ROLLBACK").await.unwrap();
        }
        done.map_err(Self::told)
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        let _turn = self.turn.lock().await;
        // In one statement: between two, a row may come or go.
        let sql = "SELECT coalesce(t.fence, m.fence), t.value FROM (SELECT $1::text AS name) n \
                   LEFT JOIN things t ON t.name = n.name LEFT JOIN lockkeeper_fence.mark m ON \
                   m.guarded = current_schema || '.things' AND m.key = jsonb_build_array(n.name)::text";
        let row = self.client.query_one(sql, &[&resource]).await.map_err(Self::told)?;
        let fence: Option<i64> = row.get(0);
        Ok(fence.map(|fence| GuardedValue { fence: Fence::new(fence as u64).unwrap(), value: row.get(1) }))
    }
}

mod laws {
    use super::*;
    lockkeeper_testkit::fenced_laws!(Guarded);
}

/// A table with a row that has seen 7, guarded.
async fn orders(place: &Place) {
    let mut client = place.client().await;
    let table = "CREATE TABLE orders (id int PRIMARY KEY, state text, fence bigint NOT NULL DEFAULT 0); \
                 INSERT INTO orders VALUES (42, 'open')";
    client.batch_execute(table).await.unwrap();
    guard(&mut client, &spec("orders")).await.unwrap();
    client.batch_execute("UPDATE orders SET state = 'seven', fence = 7").await.unwrap();
}

#[tokio::test]
async fn whatever_psql_sends_is_checked() {
    let Some(place) = Place::start().await else { return };
    orders(&place).await;
    let refused = |sql: &str, code: &str, says: &str| {
        let done = place.psql(sql);
        let told = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(!done.status.success() && told.contains(code) && told.contains(says), "{sql}: {told}");
    };
    let taken = |sql: &str, answer: &str| {
        let done = place.psql(sql);
        assert!(done.status.success(), "{sql}: {}", String::from_utf8_lossy(&done.stderr));
        assert_eq!(String::from_utf8_lossy(&done.stdout).trim(), answer, "{sql}");
    };
    refused(
        "UPDATE orders SET state = 'late', fence = 6 WHERE id = 42",
        "LK065",
        "fence 6 is stale: 7 was seen already",
    );
    refused(
        "BEGIN; SET LOCAL lockkeeper.fence = '6'; UPDATE orders SET state = 'late'; COMMIT",
        "LK065",
        "fence 6 is stale",
    );
    refused(
        "BEGIN; SET LOCAL lockkeeper.fence = '6'; DELETE FROM orders; COMMIT",
        "LK065",
        "fence 6 is stale",
    );
    // Nothing presented, or nothing good.
    refused("UPDATE orders SET state = 'unfenced'", "LK064", "no fence is presented");
    refused("DELETE FROM orders", "LK064", "no fence is presented");
    refused("TRUNCATE orders", "LK064", "TRUNCATE would forget");
    refused("UPDATE orders SET fence = NULL", "LK064", "NULL is not a fence");
    refused("UPDATE orders SET fence = -8", "LK064", "-8 is not a fence");
    refused("UPDATE orders SET fence = 9007199254740992", "LK064", "is not a fence");
    refused("BEGIN; SET LOCAL lockkeeper.fence = 'x'; DELETE FROM orders; COMMIT", "LK064", "is not a fence");
    refused("BEGIN; SET LOCAL lockkeeper.fence = '0'; DELETE FROM orders; COMMIT", "LK064", "is not a fence");
    refused(
        "BEGIN; SET LOCAL lockkeeper.fence = '8'; UPDATE orders SET fence = 9; COMMIT",
        "LK064",
        "two fences",
    );
    refused("INSERT INTO orders VALUES (1, 'x', -1)", "LK064", "-1 is not a fence");
    taken("SELECT state, fence FROM orders", "seven|7");
    // The same fence again, by the column and by the setting; a higher one; rows that are new.
    taken(
        "UPDATE orders SET state = 'seven again', fence = 7; SELECT state, fence FROM orders",
        "seven again|7",
    );
    taken(
        "BEGIN; SET LOCAL lockkeeper.fence = '8'; UPDATE orders SET state = 'eight'; COMMIT; SELECT state, fence FROM orders",
        "eight|8",
    );
    taken("INSERT INTO orders VALUES (1, 'new'); SELECT fence FROM orders WHERE id = 1", "0");
    taken("INSERT INTO orders VALUES (2, 'new', 3); SELECT fence FROM orders WHERE id = 2", "3");
    // A deleted row leaves its mark, a row that comes back takes it over.
    taken("BEGIN; SET LOCAL lockkeeper.fence = '9'; DELETE FROM orders WHERE id = 42; COMMIT", "");
    refused("INSERT INTO orders VALUES (42, 'late', 8)", "LK065", "fence 8 is stale: 9 was seen already");
    refused("INSERT INTO orders VALUES (42, 'unfenced')", "LK064", "9 was seen before the row was deleted");
    refused(
        "BEGIN; SET LOCAL lockkeeper.fence = '8'; INSERT INTO orders VALUES (42, 'late'); COMMIT",
        "LK065",
        "stale",
    );
    refused(
        "BEGIN; SET LOCAL lockkeeper.fence = '8'; UPDATE orders SET id = 42 WHERE id = 1; COMMIT",
        "LK065",
        "fence 8 is stale",
    );
    taken(
        "BEGIN; SET LOCAL lockkeeper.fence = '9'; INSERT INTO orders VALUES (42, 'back'); COMMIT; \
           SELECT fence FROM orders WHERE id = 42",
        "9",
    );
    taken("SELECT count(*) FROM lockkeeper_fence.mark WHERE guarded = current_schema || '.orders'", "0");
    // A key that moves takes its mark away and leaves it behind.
    taken("UPDATE orders SET id = 43, fence = 10 WHERE id = 42", "");
    refused("INSERT INTO orders VALUES (42, 'late', 9)", "LK065", "fence 9 is stale: 10 was seen already");
    taken("SELECT id, fence FROM orders ORDER BY id", "1|0\n2|3\n43|10");
}

#[tokio::test]
async fn the_three_lines_of_the_page_are_right() {
    let Some(place) = Place::start().await else { return };
    place
        .sql(&format!(
            "CREATE TABLE {0}.orders (id int, state text); INSERT INTO {0}.orders VALUES (42, 'open')",
            place.schema
        ))
        .await;
    let page = include_str!("../../../../docs/fenced/postgres.md");
    let block = page.split("```sql\n").nth(1).unwrap().split("```").next().unwrap();
    let [alter, update, told] = block.lines().collect::<Vec<_>>()[..] else { panic!("three lines: {block}") };
    let say = |sql: &str| String::from_utf8(place.psql_with("-At", sql).stdout).unwrap().trim().to_owned();
    assert_eq!(say(alter), "ALTER TABLE");
    assert!(told.contains("UPDATE 1") && told.contains("UPDATE 0"));
    // The first page and the guide show the same statements.
    let others =
        [include_str!("../../../../README.md"), include_str!("../../../../docs/guide/do-i-need-a-fence.md")];
    assert!(others.iter().all(|page| page.contains(alter) && page.contains(update)));
    assert_eq!((say(update), say(update)), ("UPDATE 1".into(), "UPDATE 1".into()), "the same fence again");
    assert_eq!(say(&update.replace("1794775452413713", "1794775452413712")), "UPDATE 0", "a late one");
    assert_eq!(say(&update.replace("1794775452413713", "1794775452413714")), "UPDATE 1");
    assert_eq!(say("SELECT state, fence FROM orders"), "paid|1794775452413714");
}

#[tokio::test]
async fn an_insert_waits_for_a_delete_that_is_not_committed_and_is_then_measured_by_it() {
    let Some(place) = Place::start().await else { return };
    orders(&place).await;
    let (mut a, mut b, watcher) = (place.client().await, place.client().await, place.client().await);
    for (isolation, code, mark) in [("READ COMMITTED", "LK065", 9), ("REPEATABLE READ", "40001", 11)] {
        let newer = a.transaction().await.unwrap();
        let delete = format!("SET LOCAL lockkeeper.fence = '{mark}'; DELETE FROM orders WHERE id = 42");
        newer.batch_execute(&delete).await.unwrap();
        let older = b.transaction().await.unwrap();
        older.batch_execute(&format!("SET TRANSACTION ISOLATION LEVEL {isolation}; SELECT 1")).await.unwrap();
        let insert = format!("INSERT INTO orders VALUES (42, 'late', {})", mark - 1);
        let late = older.batch_execute(&insert);
        let commit = async {
            let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT INTO orders%'";
            while watcher.query_one(waits, &[]).await.unwrap().get::<_, i64>(0) == 0 {
                tokio::task::yield_now().await;
            }
            newer.commit().await.unwrap();
        };
        let (late, ()) = tokio::join!(late, commit);
        assert_eq!(late.unwrap_err().code().unwrap().code(), code, "{isolation}");
        older.rollback().await.unwrap();
        watcher.batch_execute(&format!("INSERT INTO orders VALUES (42, 'back', {mark})")).await.unwrap();
    }
}

#[tokio::test]
async fn unfenced_writes_can_be_allowed_and_forget_no_mark() {
    let Some(place) = Place::start().await else { return };
    orders(&place).await;
    let mut client = place.client().await;
    guard(&mut client, &TableGuardSpec { allow_unfenced: true, ..spec("orders") }).await.unwrap();
    let told = |error: tokio_postgres::Error| refusal(&error).map(|error| error.outcome().as_str());
    client.batch_execute("UPDATE orders SET state = 'unfenced'").await.unwrap();
    client.batch_execute("DELETE FROM orders").await.unwrap();
    let late = client.batch_execute("INSERT INTO orders VALUES (42, 'late', 6)").await;
    assert_eq!(late.map_err(told), Err(Some("stale")));
    client.batch_execute("INSERT INTO orders VALUES (42, 'unfenced')").await.unwrap();
    let late = client.batch_execute("UPDATE orders SET fence = 6").await;
    assert_eq!(late.map_err(told), Err(Some("stale")));
    assert!(table::status(&mut client).await.unwrap().iter().any(|one| one.allow_unfenced));
}

#[tokio::test]
async fn strange_names_install_and_go_without_a_trace() {
    let Some(place) = Place::start().await else { return };
    let mut client = place.client().await;
    let (s, odd) = (&place.schema, r#""It's $guard0$ a ""table""; @T --""#);
    let make = format!(
        r#"CREATE TABLE {odd} ("a.b" text, "C" int, "@C $guard0$" bigint, PRIMARY KEY ("C", "a.b"))"#
    );
    client.batch_execute(&make).await.unwrap();
    let odd_spec = TableGuardSpec { column: "@C $guard0$".into(), ..spec(odd) };
    guard(&mut client, &odd_spec).await.unwrap();
    guard(&mut client, &odd_spec).await.unwrap();
    client.batch_execute(&format!("INSERT INTO {odd} VALUES ('x', 1, 7)")).await.unwrap();
    let late = client.batch_execute(&format!(r#"UPDATE {odd} SET "@C $guard0$" = 6"#)).await.unwrap_err();
    assert!(matches!(refusal(&late), Some(Error::Stale { .. })), "{late:?}");
    client
        .batch_execute(&format!("SET lockkeeper.fence = '8'; DELETE FROM {odd}; RESET lockkeeper.fence"))
        .await
        .unwrap();
    let late = client.batch_execute(&format!("INSERT INTO {odd} VALUES ('x', 1, 7)")).await.unwrap_err();
    assert!(matches!(refusal(&late), Some(Error::Stale { .. })), "{late:?}");
    let all = table::status(&mut client).await.unwrap();
    let mine = all.iter().find(|one| one.table.contains("It's")).unwrap();
    assert_eq!((mine.state, mine.marks, mine.key.as_str()), (TriggerState::On, 1, r#""C", "a.b""#));
    // Under another name it is guarded as before, and found.
    let renamed = format!(
        r#"ALTER TABLE {odd} RENAME TO "It's another"; INSERT INTO "It's another" VALUES ('y', 1, 7)"#
    );
    client.batch_execute(&renamed).await.unwrap();
    let late = client.batch_execute(r#"UPDATE "It's another" SET "@C $guard0$" = 6"#).await.unwrap_err();
    assert!(matches!(refusal(&late), Some(Error::Stale { .. })), "{late:?}");
    let all = table::status(&mut client).await.unwrap();
    assert!(
        all.iter().any(|one| one.table.ends_with(r#""It's another""#) && one.state == TriggerState::On),
        "{all:?}"
    );
    client.batch_execute(&format!(r#"ALTER TABLE "It's another" RENAME TO {odd}"#)).await.unwrap();
    // Disabled, it is told; dropped, too.
    client.batch_execute(&format!("ALTER TABLE {odd} DISABLE TRIGGER USER")).await.unwrap();
    let state = async |client: &mut Client| {
        table::status(client)
            .await
            .unwrap()
            .into_iter()
            .find(|one| one.table.contains("It's"))
            .map(|one| one.state)
    };
    assert_eq!(state(&mut client).await, Some(TriggerState::Off));
    assert!(table::uninstall(&mut client, odd).await.unwrap());
    assert!(!table::uninstall(&mut client, odd).await.unwrap(), "there is nothing any more");
    let left = format!(
        "SELECT (SELECT count(*) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
         WHERE n.nspname = '{s}' AND NOT tgisinternal)"
    );
    assert_eq!(client.query_one(&left, &[]).await.unwrap().get::<_, i64>(0), 0);
    client.batch_execute(&format!("INSERT INTO {odd} VALUES ('x', 1, 7)")).await.unwrap();
    guard(&mut client, &odd_spec).await.unwrap();
    client.batch_execute(&format!("DROP TABLE {odd}")).await.unwrap();
    assert_eq!(state(&mut client).await, Some(TriggerState::Gone));
    let name = table::status(&mut client)
        .await
        .unwrap()
        .into_iter()
        .find(|one| one.table.contains("It's"))
        .unwrap()
        .table;
    assert!(table::uninstall(&mut client, &name).await.unwrap());
    assert_eq!(state(&mut client).await, None);
}

#[tokio::test]
async fn what_cannot_be_guarded_is_told() {
    let Some(place) = Place::start().await else { return };
    let mut client = place.client().await;
    let make = "CREATE TABLE bare (id int PRIMARY KEY); CREATE TABLE small (id int PRIMARY KEY, fence int); \
                CREATE TABLE keyless (id int, fence bigint); CREATE VIEW seen AS SELECT * FROM keyless; \
                CREATE TABLE parts (id int PRIMARY KEY, fence bigint) PARTITION BY RANGE (id); \
                CREATE TABLE parent (id int PRIMARY KEY, fence bigint); CREATE TABLE child () INHERITS (parent); \
                CREATE TABLE made (id int PRIMARY KEY, fence bigint GENERATED ALWAYS AS (id) STORED)";
    client.batch_execute(make).await.unwrap();
    for (table, key, says) in [
        ("nowhere", "", "there is no table"),
        ("a b c", "", "invalid name"),
        ("x'; DROP TABLE bare; --", "", "invalid name"),
        ("bare", "", "ADD COLUMN fence bigint"),
        ("small", "", "plain bigint"),
        ("made", "", "plain bigint"),
        ("keyless", "", "no primary key"),
        ("keyless", "id", "not unique"),
        ("keyless", "nope", "no column"),
        ("seen", "", "no plain table"),
        ("parts", "", "partitioned"),
        ("parent", "", "inherit"),
        ("child", "id", "inherit"),
    ] {
        let key = Some(key.to_owned()).filter(|key| !key.is_empty()).into_iter().collect();
        let told = table::find(&mut client, &TableGuardSpec { key, ..spec(table) }).await.unwrap_err();
        assert!(told.to_string().contains(says), "{table}: {told}");
    }
}

#[tokio::test]
async fn who_has_no_rights_is_told_and_who_writes_needs_none_of_ours() {
    let Some(place) = Place::start().await else { return };
    orders(&place).await;
    let mut client = place.client().await;
    let (s, role) = (&place.schema, format!("clerk_{}", place.schema));
    let rights = format!(
        "CREATE ROLE {role}; GRANT USAGE ON SCHEMA {s} TO {role}; GRANT ALL ON orders TO {role}; SET ROLE {role}"
    );
    client.batch_execute(&rights).await.unwrap();
    let denied = guard(&mut client, &spec("orders")).await.unwrap_err();
    assert!(matches!(denied, Error::Denied(_)), "{denied}");
    let denied = table::uninstall(&mut client, "orders").await.unwrap_err();
    assert!(matches!(denied, Error::Denied(_)), "{denied}");
    client.batch_execute("UPDATE orders SET fence = 8").await.unwrap();
    client
        .batch_execute("BEGIN; SET LOCAL lockkeeper.fence = '9'; DELETE FROM orders; COMMIT")
        .await
        .unwrap();
    assert!(client.batch_execute("INSERT INTO orders VALUES (42, 'late', 8)").await.is_err());
    assert!(
        client.batch_execute("DELETE FROM lockkeeper_fence.mark").await.is_err(),
        "a mark can be taken away"
    );
    assert!(table::status(&mut client).await.unwrap().iter().any(|one| one.state == TriggerState::On));
}
