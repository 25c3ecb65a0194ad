//! MERGE: one statement with several actions. PostgreSQL tells a trigger which columns all of them name together, and not which the action
//! of this row names.

use lockkeeper_core::Error;
use lockkeeper_fenced::postgres::refusal;
use tokio_postgres::Client;

use crate::common::Place;
use crate::table::{guard, spec};

async fn say(client: &Client, sql: &str) -> Result<(), Error> {
    let done = client.batch_execute(sql).await;
    if done.is_err() {
        client.batch_execute("ROLLBACK").await.unwrap();
    }
    done.map_err(|e| refusal(&e).unwrap_or_else(|| panic!("{sql}: {e:?}")))
}

#[tokio::test]
async fn a_merge_is_checked_if_each_action_names_the_fence_or_none_does() {
    let Some(place) = Place::start().await else { return };
    let mut client = place.client().await;
    let version: i32 =
        client.query_one("SELECT current_setting('server_version_num')::int", &[]).await.unwrap().get(0);
    if version < 150_000 {
        return;
    }
    let table = "CREATE TABLE orders (id int PRIMARY KEY, state text, fence bigint); INSERT INTO orders VALUES (1, 'open'), (2, 'open')";
    client.batch_execute(table).await.unwrap();
    guard(&mut client, &spec("orders")).await.unwrap();
    client.batch_execute("UPDATE orders SET fence = 7").await.unwrap();
    let merge = |first: &str, rest: &str| {
        format!(
            "MERGE INTO orders USING (VALUES (1), (2), (3)) AS n(id) ON orders.id = n.id \
             WHEN MATCHED AND n.id = 1 THEN UPDATE SET state = 'first'{first} WHEN MATCHED THEN UPDATE SET state = 'rest'{rest} \
             WHEN NOT MATCHED THEN INSERT VALUES (3, 'new', 9)"
        )
    };
    // Every action names it.
    let told = say(&client, &merge(", fence = 6", ", fence = 9")).await;
    assert!(matches!(told, Err(Error::Stale { .. })), "{told:?}");
    say(&client, &merge(", fence = 7", ", fence = 7")).await.unwrap();
    // None does, and the transaction says it for all.
    let unsaid = say(&client, &merge("", "")).await;
    assert!(matches!(&unsaid, Err(Error::Invalid(text)) if text.contains("no fence")), "{unsaid:?}");
    let all =
        |fence: u64, merge: String| format!("BEGIN; SET LOCAL lockkeeper.fence = '{fence}'; {merge}; COMMIT");
    let told = say(&client, &all(6, merge("", ""))).await;
    assert!(matches!(told, Err(Error::Stale { .. })), "{told:?}");
    say(&client, &all(9, merge("", ""))).await.unwrap();
    // One does and another does not: that one seems to present what its row has, as the page says. The process that says their fence for the
    // transaction as well is told.
    say(&client, &merge("", ", fence = 9")).await.unwrap();
    let mixed = say(&client, &all(10, merge("", ", fence = 10"))).await;
    assert!(matches!(&mixed, Err(Error::Invalid(text)) if text.contains("two fences")), "{mixed:?}");
}
