//! The end of a batch in one statement: each job has its own outcome.

use lockkeeper::Error;
use lockkeeper_testkit::proxy::{Direction, Framing, Proxy};

use super::common::{Database, LONG, SHORT, open_at};

#[tokio::test]
async fn a_late_job_and_a_refused_row_hold_up_no_other_job_of_a_batch() {
    let Some(db) = Database::start().await else { return };
    let jobs = db.jobs(5, LONG).await;
    let mut batch = jobs.claim(5).await.unwrap();
    batch.sort_by(|a, b| a.key().cmp(b.key()));
    // Another worker has the first, the second is gone, the third is done already, the database refuses the fourth.
    db.sql("UPDATE work SET lk_fence = lk_fence + 1 WHERE id = 1; DELETE FROM work WHERE id = 2").await;
    db.sql("UPDATE work SET lk_state = 'done', lk_holder = NULL WHERE id = 3").await;
    db.sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
         IF new.id = 4 THEN RAISE invalid_parameter_value; END IF; RETURN new; END $$; \
         CREATE TRIGGER t BEFORE UPDATE ON work FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    .await;
    let ends = jobs.complete_all(batch).await;
    assert!(
        matches!(
            ends[..],
            [Err(Error::Stale { .. }), Err(Error::Lost(_)), Ok(()), Err(Error::Invalid(_)), Ok(())]
        ),
        "{ends:?}"
    );
    assert_eq!(db.number("SELECT sum(id) FROM work WHERE lk_state = 'done'").await, 8);
    assert!(jobs.complete_all(Vec::new()).await.is_empty());
}

#[tokio::test]
async fn a_batch_of_a_key_of_several_columns_and_of_two_tables_is_completed() {
    let Some(db) = Database::start().await else { return };
    let jobs = db.jobs(2, LONG).await;
    db.sql("CREATE TABLE pairs (a text, b bigint, PRIMARY KEY (a, b))").await;
    db.install("pairs").await;
    db.sql("INSERT INTO pairs SELECT 'it''s {' || n, n % 2 FROM generate_series(1, 4) AS n").await;
    let pairs = db.open("pairs", LONG).await;
    let mut batch = jobs.claim(2).await.unwrap();
    batch.extend(pairs.claim(9).await.unwrap());
    for end in pairs.complete_all(batch).await {
        end.unwrap();
    }
    assert_eq!((pairs.counts().await.unwrap().done, jobs.counts().await.unwrap().done), (4, 2));
}

/// The reply to the statement gets lost: the worker asks again for each job, and learns that it counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_whose_reply_is_lost_counts_once() {
    let Some(db) = Database::start().await else { return };
    db.jobs(3, LONG).await;
    let proxy = Proxy::start(db.server.addr(), Framing::Postgres);
    let url = format!("postgres://postgres@{}/{}?timeout=1s", proxy.addr(), db.name);
    let jobs = open_at(&url, "work", LONG).await;
    let mut batch = jobs.claim(3).await.unwrap();
    batch.sort_by(|a, b| a.key().cmp(b.key()));
    proxy.hold(Direction::Replies);
    let ending = tokio::spawn(async move { jobs.complete_all(batch).await });
    let done = "SELECT count(*) FROM work WHERE lk_state = 'done'";
    while db.number(done).await < 3 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    // The row of the last one is deleted: whether its end was recorded cannot be seen any more.
    db.sql("DELETE FROM work WHERE id = 3").await;
    proxy.cut_all();
    proxy.heal();
    let ends = ending.await.unwrap();
    assert!(matches!(ends[..], [Ok(()), Ok(()), Err(Error::Unknown(_))]), "{ends:?}");
}

#[tokio::test]
async fn a_late_batch_is_refused() {
    let Some(db) = Database::start().await else { return };
    let late = db.jobs(2, SHORT).await.claim(2).await.unwrap();
    let other = db.open("work", LONG).await;
    let mut newer = other.wait_for(2).await.unwrap();
    while newer.len() < 2 {
        newer.extend(other.wait_for(2).await.unwrap());
    }
    for end in other.complete_all(late).await {
        assert!(matches!(end, Err(Error::Stale { .. })), "{end:?}");
    }
    assert_eq!(db.number("SELECT count(*) FROM work WHERE lk_state = 'open'").await, 2);
}
