//! What workers may rely on: one at a time, fences that grow, late ends that are refused, limits.

use std::collections::BTreeSet;
use std::time::Duration;

use lockkeeper::Error;
use lockkeeper::claim::AfterFailure;
use lockkeeper::jobs::{Jobs, TakenJob};

use super::common::{Database, LONG, SHORT};

async fn one(jobs: &Jobs) -> TakenJob {
    let claimed = tokio::time::timeout(Duration::from_secs(60), jobs.wait_for(1)).await;
    claimed.expect("a job is due").unwrap().pop().expect("at least one")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_of_many_workers_are_disjoint() {
    let Some(db) = Database::start().await else { return };
    db.jobs(60, LONG).await;
    let mut workers = Vec::new();
    for _ in 0..6 {
        let jobs = db.open("work", LONG).await;
        workers.push(tokio::spawn(async move {
            let mut mine = Vec::new();
            loop {
                let batch = jobs.claim(4).await.unwrap();
                assert!(batch.len() <= 4);
                if batch.is_empty() {
                    return mine;
                }
                mine.extend(batch.iter().map(|job| (job.key().to_owned(), job.fence())));
                for job in batch {
                    job.complete().await.unwrap();
                }
            }
        }));
    }
    let (mut keys, mut count) = (BTreeSet::new(), 0);
    for worker in workers {
        let mine = worker.await.unwrap();
        count += mine.len();
        keys.extend(mine.into_iter().map(|(key, _)| key));
    }
    assert_eq!((count, keys.len()), (60, 60), "a row was claimed twice, or not at all");
    assert_eq!(
        db.number("SELECT count(*) FROM work WHERE lk_state = 'done' AND lk_holder IS NULL").await,
        60
    );
}

#[tokio::test]
async fn a_silent_worker_loses_its_job_to_a_higher_fence_and_its_late_end_is_refused() {
    let Some(db) = Database::start().await else { return };
    let jobs = db.jobs(1, SHORT).await;
    late_ends_are_refused(&db, jobs).await;
}

/// The law above, for a worker `jobs` with a short lease that may be spoilt.
pub async fn late_ends_are_refused(db: &Database, jobs: Jobs) {
    let other = db.open("work", LONG).await;
    for end in ["complete", "complete all", "fail", "give back", "complete in"] {
        let late = one(&jobs).await;
        let newer = one(&other).await;
        assert!(!late.is_held(), "the job went to another worker while the first one believed to have it");
        assert!(newer.fence() > late.fence() && newer.attempt_number() == late.attempt_number() + 1);
        assert!(matches!(late.extend().await, Err(Error::Lost(_))), "a lease that was over came back");
        let (presented, seen) = (late.fence(), newer.fence());
        let told = match end {
            "complete" => late.complete().await,
            "complete all" => jobs.complete_all(vec![late]).await.pop().expect("one outcome"),
            "fail" => late.fail("late").await.map(drop),
            "give back" => late.give_back().await,
            _ => {
                let mut client = db.client().await;
                let tx = client.transaction().await.unwrap();
                late.complete_in(&tx).await
            }
        };
        match told {
            Err(Error::Stale { presented: p, seen: s }) => assert_eq!((p, s), (presented, seen), "{end}"),
            other => panic!("{end}: a late end was to be refused: {other:?}"),
        }
        // So that there is another attempt for the next round.
        newer.give_back().await.unwrap();
        db.sql("UPDATE work SET lk_attempts = 0").await;
    }
    one(&other).await.complete().await.unwrap();
    assert!(other.claim(1).await.unwrap().is_empty(), "what is done was claimed again");
}

/// The record decides: a job that no other worker has claimed is done, however late.
#[tokio::test]
async fn a_late_completion_counts_if_no_worker_took_over() {
    let Some(db) = Database::start().await else { return };
    let job = one(&db.jobs(1, SHORT).await).await;
    while job.is_held() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    job.complete().await.unwrap();
    assert_eq!(db.number("SELECT count(*) FROM work WHERE lk_state = 'done'").await, 1);
}

#[tokio::test]
async fn attempts_are_limited_and_what_failed_is_kept_and_can_be_tried_again() {
    let Some(db) = Database::start().await else { return };
    let jobs = db.jobs(2, SHORT).await;
    db.sql("UPDATE work SET note = 'deadly' WHERE id = 2").await;
    let (mut bad, mut deadly) = (Vec::new(), 0);
    // The second one kills its workers: they never say how it ended.
    while db.number("SELECT count(*) FROM work WHERE lk_state = 'open'").await > 0 {
        for job in jobs.claim(2).await.unwrap() {
            match job.key() {
                "1" => bad.push(job.fail("it is bad\0").await.unwrap()),
                _ => deadly += 1,
            }
        }
    }
    let again = AfterFailure::RetryAfter(Duration::ZERO);
    assert_eq!((bad, deadly), (vec![again, again, AfterFailure::FailedForGood], 3));
    let mut failed = jobs.failed(10).await.unwrap();
    failed.sort_by(|a, b| a.key.cmp(&b.key));
    let told: Vec<_> = failed.iter().map(|job| (&*job.key, job.attempts, &*job.error)).collect();
    let silent = "no worker completed it: the last attempt ended with its lease";
    assert_eq!(told, [("1", 3, "it is bad"), ("2", 3, silent)]);
    assert!(
        jobs.retry("1").await.unwrap() && !jobs.retry("1").await.unwrap(),
        "only what failed is tried again"
    );
    assert!(!jobs.retry("99").await.unwrap());
    assert!(matches!(jobs.retry("x").await, Err(Error::Invalid(_))), "a key of another type");
    assert_eq!(jobs.retry_all().await.unwrap(), 1);
    for job in jobs.claim(2).await.unwrap() {
        assert_eq!(job.attempt_number(), 1);
        let old = failed.iter().find(|old| old.key == job.key()).and_then(|old| old.fence);
        assert!(Some(job.fence()) > old, "the fence grows over a retry by an operator");
        job.complete().await.unwrap();
    }
    let counts = jobs.counts().await.unwrap();
    assert_eq!((counts.done, counts.failed, counts.due, counts.waiting, counts.taken), (2, 0, 0, 0, 0));
}

#[tokio::test]
async fn a_failed_job_waits_and_a_job_of_the_future_is_not_due() {
    let Some(db) = Database::start().await else { return };
    let jobs = db.jobs(2, LONG).await.rules(LONG, 3, LONG, LONG).unwrap();
    db.sql("UPDATE work SET lk_run_at = now() + interval '1 hour' WHERE id = 2").await;
    let job = one(&jobs).await;
    assert_eq!(job.key(), "1");
    let after = job.fail("not yet").await.unwrap();
    assert!(
        matches!(after, AfterFailure::RetryAfter(pause) if pause >= LONG / 2 && pause <= LONG),
        "{after:?}"
    );
    assert!(jobs.claim(2).await.unwrap().is_empty(), "it was claimed before its time");
    assert_eq!(jobs.counts().await.unwrap().waiting, 2);
    db.sql("UPDATE work SET lk_run_at = now()").await;
    assert_eq!(jobs.claim(5).await.unwrap().len(), 2);
    assert_eq!(jobs.counts().await.unwrap().taken, 2);
}

#[tokio::test]
async fn an_extended_job_stays_and_what_is_given_back_is_free_at_once() {
    let Some(db) = Database::start().await else { return };
    let (jobs, other) = (db.jobs(1, LONG).await, db.open("work", LONG).await);
    let job = one(&jobs).await;
    let end = "SELECT (extract(epoch FROM lk_run_at) * 1000000)::bigint FROM work";
    let (before, deadline) = (db.number(end).await, job.deadline());
    job.extend().await.unwrap();
    assert!(db.number(end).await > before && job.deadline() > deadline, "the lease does not count anew");
    assert!(matches!(job.run(async { 7 }).await, Ok(7)));
    assert!(other.claim(1).await.unwrap().is_empty());
    job.give_back().await.unwrap();
    let next = one(&other).await;
    assert_eq!(next.attempt_number(), 1, "an attempt that was given back counts");
    // An operator deletes the row.
    db.sql("DELETE FROM work").await;
    assert!(matches!(next.complete().await, Err(Error::Lost(_))), "the row is gone");
}

/// What the work writes and the end of the job are one transaction.
#[tokio::test]
async fn a_job_ends_in_the_transaction_of_its_work() {
    let Some(db) = Database::start().await else { return };
    let jobs = db.jobs(1, LONG).await;
    let mut client = db.client().await;
    for commits in [false, true] {
        let job = one(&jobs).await;
        let tx = client.transaction().await.unwrap();
        tx.execute("UPDATE work SET note = 'sent' WHERE id = 1", &[]).await.unwrap();
        job.complete_in(&tx).await.unwrap();
        if commits {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
            job.give_back().await.unwrap();
        }
        let done = "SELECT count(*) FROM work WHERE lk_state = 'done' AND note = 'sent'";
        assert_eq!(db.number(done).await, i64::from(commits));
    }
}

#[tokio::test]
async fn keys_of_every_usual_type_name_their_rows() {
    let Some(db) = Database::start().await else { return };
    db.sql("CREATE TYPE size AS ENUM ('small', 'it''s large'); CREATE DOMAIN code AS varchar(20); \
            CREATE TABLE a (\"Name\" text, n bigint, PRIMARY KEY (\"Name\", n)); CREATE TABLE b (id uuid PRIMARY KEY); \
            CREATE TABLE c (id size PRIMARY KEY); CREATE TABLE d (id code PRIMARY KEY); CREATE TABLE e (id timestamptz PRIMARY KEY); \
            CREATE TABLE f (id char(5) PRIMARY KEY); CREATE TABLE g (id numeric PRIMARY KEY)").await;
    for table in ["a", "b", "c", "d", "e", "f", "g"] {
        db.install(table).await;
    }
    let odd = "'\"; DROP TABLE a; -- \\ ключ {},'";
    db.sql(&format!(
        "INSERT INTO a VALUES ({odd}, 1), ({odd}, -2); INSERT INTO b VALUES (gen_random_uuid()); INSERT INTO c VALUES ('it''s large'); \
         INSERT INTO d VALUES ('x y'); INSERT INTO e VALUES (now()); INSERT INTO f VALUES ('ab'); INSERT INTO g VALUES (1.50)"
    ))
    .await;
    for (table, rows) in [("a", 2), ("b", 1), ("c", 1), ("d", 1), ("e", 1), ("f", 1), ("g", 1)] {
        let jobs = db.open(table, LONG).await;
        let batch = jobs.claim(10).await.unwrap();
        assert_eq!(batch.len(), rows, "{table}");
        for job in batch {
            job.extend().await.unwrap();
            let key = job.key().to_owned();
            assert_eq!(job.key_values().len(), jobs.table().key_columns().len());
            job.complete().await.unwrap_or_else(|error| panic!("{table} {key}: {error}"));
        }
        assert_eq!(jobs.counts().await.unwrap().done, rows as u64, "{table}");
    }
    let jobs = db.open("a", LONG).await;
    db.sql("UPDATE a SET lk_state = 'failed' WHERE n = 1").await;
    let key = jobs.failed(1).await.unwrap().remove(0).key;
    assert!(jobs.retry(&key).await.unwrap(), "{key}");
    for bad in ["x", "[]", "[1, 2]", "[\"a\"]"] {
        assert!(matches!(jobs.retry(bad).await, Err(Error::Invalid(_))), "{bad}");
    }
}

#[tokio::test]
async fn fences_follow_the_clock_and_stay_below_the_limit() {
    let Some(db) = Database::start().await else { return };
    let jobs = db.jobs(3, LONG).await;
    // A row from the future keeps growing; one at the largest fence is not claimed.
    db.sql("UPDATE work SET lk_fence = 9007199254740000 WHERE id = 1; UPDATE work SET lk_fence = 9007199254740991 WHERE id = 2").await;
    let before = db.number("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint").await;
    let mut batch = jobs.claim(10).await.unwrap();
    batch.sort_by(|a, b| a.key().cmp(b.key()));
    let fences: Vec<_> = batch.iter().map(|job| (job.key(), job.fence().get())).collect();
    assert_eq!(fences[0], ("1", 9_007_199_254_740_001));
    assert!(fences.len() == 2 && fences[1].0 == "3" && fences[1].1 >= before as u64, "{fences:?}");
}

#[tokio::test]
async fn bad_rules_are_refused() {
    let Some(db) = Database::start().await else { return };
    let (jobs, ms) = (db.jobs(1, LONG).await, Duration::from_millis);
    for (lease, attempts, first, most) in [
        (ms(99), 3, ms(0), ms(0)),
        (Duration::from_secs(24 * 60 * 60 + 1), 3, ms(0), ms(0)),
        (LONG, 0, ms(0), ms(0)),
        (LONG, 3, ms(2), ms(1)),
        (LONG, 3, ms(2), Duration::from_secs(24 * 60 * 60 + 1)),
    ] {
        let told = jobs.clone().rules(lease, attempts, first, most);
        assert!(matches!(told, Err(Error::Invalid(_))), "{told:?}");
    }
    for most in [0, 1001] {
        assert!(matches!(jobs.claim(most).await, Err(Error::Invalid(_))));
    }
    assert_eq!(jobs.counts().await.unwrap().due, 1, "something was written");
}
