//! Replies that get lost, and connections that break, between a worker and the database.

use std::time::Duration;

use lockkeeper::claim::AfterFailure;
use lockkeeper::{Clock, Error, SystemClock};
use lockkeeper_testkit::proxy::{Direction, Framing, Proxy};

use super::common::{Database, LONG, SHORT, open_at};

/// The reply to the end of a job gets lost: the worker asks again, and learns that it counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_whose_reply_is_lost_counts_once() {
    let Some(db) = Database::start().await else { return };
    db.jobs(3, LONG).await;
    let proxy = Proxy::start(db.server.addr(), Framing::Postgres);
    let url = format!("postgres://postgres@{}/{}?timeout=1s", proxy.addr(), db.name);
    for end in ["complete", "fail", "give back"] {
        let jobs = open_at(&url, "work", LONG).await;
        let job = jobs.claim(1).await.unwrap().pop().expect("one is due");
        let key: i32 = job.key().parse().unwrap();
        proxy.hold(Direction::Replies);
        let ending = tokio::spawn(async move {
            match end {
                "complete" => job.complete().await,
                "fail" => job.fail("why").await.map(|after| {
                    assert_eq!(after, AfterFailure::RetryAfter(Duration::ZERO));
                }),
                _ => job.give_back().await,
            }
        });
        let applied =
            format!("SELECT count(*) FROM work WHERE id = {key} AND lk_holder IS NULL AND lk_fence > 0");
        while db.number(&applied).await == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // The reply is lost with its connection, and the worker connects again.
        proxy.cut_all();
        proxy.heal();
        ending.await.unwrap().unwrap_or_else(|error| panic!("{end}: {error}"));
        db.sql(&format!("UPDATE work SET lk_state = 'done', lk_run_at = 'infinity' WHERE id = {key}")).await;
    }
}

/// The reply to a failure or to a return gets lost, another worker claims the row, and the retry meets a newer fence: "nothing has changed"
/// would be wrong, because the attempt was recorded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_whose_reply_is_lost_is_unknown_once_another_worker_has_the_job() {
    let Some(db) = Database::start().await else { return };
    db.jobs(3, LONG).await;
    let proxy = Proxy::start(db.server.addr(), Framing::Postgres);
    let url = format!("postgres://postgres@{}/{}?timeout=1s", proxy.addr(), db.name);
    let direct = format!("postgres://postgres@{}/{}", db.server.addr(), db.name);
    for end in ["fail", "give back"] {
        let jobs = open_at(&url, "work", LONG).await;
        let other = open_at(&direct, "work", LONG).await;
        let job = jobs.claim(1).await.unwrap().pop().expect("one is due");
        let key = job.key().to_owned();
        // Only this row is due.
        db.sql(&format!("UPDATE work SET lk_run_at = 'infinity' WHERE id <> {key}")).await;
        proxy.hold(Direction::Replies);
        let ending = tokio::spawn(async move {
            match end {
                "fail" => job.fail("why").await.map(drop),
                _ => job.give_back().await,
            }
        });
        let next = other.wait_for(1).await.unwrap().pop().expect("it is due again");
        assert_eq!(next.key(), key);
        proxy.cut_all();
        proxy.heal();
        let told = ending.await.unwrap();
        assert!(matches!(told, Err(Error::Unknown(_))), "{end}: {told:?}");
        next.complete().await.unwrap();
        db.sql("UPDATE work SET lk_run_at = now() WHERE lk_state = 'open'").await;
    }
}

/// The reply to a claim gets lost: no worker has the row, and it returns when the lease is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_reply_is_lost_returns_after_the_lease() {
    let Some(db) = Database::start().await else { return };
    db.jobs(1, SHORT).await;
    let proxy = Proxy::start(db.server.addr(), Framing::Postgres);
    let url = format!("postgres://postgres@{}/{}?timeout=1s", proxy.addr(), db.name);
    let jobs = open_at(&url, "work", SHORT).await;
    proxy.hold(Direction::Replies);
    let told = jobs.claim(1).await;
    assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    proxy.cut_all();
    proxy.heal();
    let job = jobs.wait_for(1).await.unwrap().pop().expect("it returns");
    assert_eq!(job.attempt_number(), 2, "an attempt without a reply counts");
    job.complete().await.unwrap();
}

/// While the database is unreachable a worker keeps trying to record what it has done, until its lease is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_database_is_away_gives_up_with_its_lease() {
    let Some(db) = Database::start().await else { return };
    db.jobs(1, SHORT).await;
    let proxy = Proxy::start(db.server.addr(), Framing::Postgres);
    let url = format!("postgres://postgres@{}/{}?timeout=1s", proxy.addr(), db.name);
    let job = open_at(&url, "work", SHORT).await.claim(1).await.unwrap().pop().expect("one is due");
    let deadline = job.deadline();
    proxy.hold(Direction::Requests);
    let lost = job.run(std::future::pending::<()>()).await;
    assert!(matches!(lost, Err(Error::Lost(_))), "{lost:?}");
    assert!(SystemClock.now() >= deadline.before(Duration::from_millis(1)));
    let told = job.complete().await;
    assert!(matches!(told, Err(Error::Unknown(_) | Error::Unavailable(_))), "{told:?}");
    assert_eq!(db.number("SELECT count(*) FROM work WHERE lk_state = 'open'").await, 1);
}
