//! The guard row as SQL text, in transactions of another client: sqlx.

use lockkeeper_core::Error;
use lockkeeper_fenced::{postgres::Fences, sql};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};

use crate::common::{Place, fence};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// As on the page.
async fn set(pool: &PgPool, n: u64, state: &str) -> Outcome {
    let mut tx = pool.begin().await?;
    let apply = sqlx::query_scalar(sql::APPLY).bind("orders/42").bind(sql::parameter(fence(n)));
    sql::check(fence(n), apply.fetch_one(&mut *tx).await?)?;
    sqlx::query("UPDATE orders SET state = $1 WHERE id = 42").bind(state).execute(&mut *tx).await?;
    Ok(tx.commit().await?)
}

fn is_stale(outcome: &Outcome) -> bool {
    let error = outcome.as_ref().err().and_then(|e| e.downcast_ref::<Error>());
    matches!(error, Some(Error::Stale { .. }))
}

#[tokio::test]
async fn another_client_checks_the_same_marks() {
    let Some(place) = Place::start().await else { return };
    let s = &place.schema;
    place.sql(&format!("CREATE TABLE {s}.orders (id int PRIMARY KEY, state text); INSERT INTO {s}.orders VALUES (42, 'open')")).await;
    let mut ours = place.client().await;
    Fences::default().install(&ours).await.unwrap();
    let addr = place.server.addr();
    let options = PgConnectOptions::new_without_pgpass()
        .host(&addr.ip().to_string())
        .port(addr.port())
        .username("postgres")
        .database("postgres")
        .options([("search_path", s.as_str())]);
    let pool = PgPoolOptions::new().max_connections(2).connect_with(options).await.unwrap();

    // The table is there already, and the statement that makes it says so without an error.
    sqlx::query(sql::CREATE).execute(&pool).await.unwrap();
    set(&pool, 5, "five").await.unwrap();
    set(&pool, 5, "five again").await.unwrap();
    let tx = ours.transaction().await.unwrap();
    Fences::default().apply(&tx, "orders/42", fence(7)).await.unwrap();
    tx.commit().await.unwrap();
    let late = set(&pool, 6, "late").await;
    assert!(is_stale(&late), "{late:?}");
    let state: String = sqlx::query_scalar("SELECT state FROM orders").fetch_one(&pool).await.unwrap();
    assert_eq!(state, "five again");
}
