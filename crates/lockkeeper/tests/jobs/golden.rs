//! A job table of format 1: `golden/jobs-v1.sql` has the columns and rows of each state that a program with format 1 wrote.
//! This program must write the same, and every later one must read them. If the first test fails, restore the format, or
//! raise it in `jobs/table.rs` and add a file. `LOCKKEEPER_BLESS=1` writes it.

use lockkeeper::jobs::{ExistingRows, JobTable, install_sql};

use super::common::{Database, LONG};

const GOLDEN: &str = include_str!("../golden/jobs-v1.sql");
const TABLE: &str = "CREATE TABLE public.work (id int PRIMARY KEY, note text);\n";

/// The rows, without their times, and the fences that are made from them.
const ROWS: &str = "SELECT format('INSERT INTO public.work VALUES (%s, %L, %L, %L, %s, %s, %L, %L);', id, note, lk_state, 'TIME', \
    CASE WHEN lk_fence > 0 THEN 'FENCE' ELSE '0' END, lk_attempts, regexp_replace(lk_holder, '.+', 'HOLDER'), lk_error) \
    FROM work ORDER BY id";
const FENCE: u64 = 1_700_000_000_000_000;

#[tokio::test]
async fn this_program_writes_format_1() {
    let Some(db) = Database::start().await else { return };
    db.sql(TABLE).await;
    let mut client = db.client().await;
    let table = JobTable::find(&mut client, "work").await.unwrap();
    let install = install_sql(&table, ExistingRows::Open);
    db.install("work").await;
    for (id, state) in ["taken", "done", "failed", "given back", "open"].iter().enumerate() {
        db.sql(&format!("INSERT INTO work VALUES ({id}, '{state}')")).await;
        if *state == "open" {
            break;
        }
        // One attempt is the last: a failure is final.
        let pause = std::time::Duration::ZERO;
        let jobs = db.open("work", LONG).await.rules(LONG, 1, pause, pause).unwrap();
        let job = jobs.claim(1).await.unwrap().pop().expect("the new row is due");
        match *state {
            "done" => job.complete().await.unwrap(),
            "failed" => _ = job.fail("declined").await.unwrap(),
            "given back" => {
                job.give_back().await.unwrap();
                // It is not the one that the next round claims.
                db.sql(&format!("UPDATE work SET lk_run_at = 'infinity' WHERE id = {id}")).await;
            }
            _ => std::mem::forget(job),
        }
    }
    let rows = client.query(ROWS, &[]).await.unwrap();
    let rows: String = rows.iter().map(|row| row.get::<_, String>(0) + "\n").collect();
    let written = format!("{TABLE}{install}\n{rows}");
    if std::env::var_os("LOCKKEEPER_BLESS").is_some() {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/jobs-v1.sql"), &written).unwrap();
    }
    assert_eq!(written, GOLDEN, "the stored format has changed: see the head of this file");
}

#[tokio::test]
async fn this_program_reads_format_1() {
    let Some(db) = Database::start().await else { return };
    let golden = GOLDEN.replace("TIME", "2026-01-01 00:00:00Z").replace("FENCE", &FENCE.to_string());
    db.sql(&format!("BEGIN; {golden} COMMIT")).await;
    let mut client = db.client().await;
    assert!(JobTable::find(&mut client, "work").await.unwrap().installed);
    let jobs = db.open("work", LONG).await;
    let counts = jobs.counts().await.unwrap();
    assert_eq!((counts.due, counts.done, counts.failed), (3, 1, 1), "{counts:?}");
    let failed = jobs.failed(10).await.unwrap();
    assert_eq!((failed.len(), &*failed[0].key, &*failed[0].error), (1, "2", "declined"));
    assert!(jobs.retry("2").await.unwrap());
    let mut claimed = jobs.claim(10).await.unwrap();
    claimed.sort_by_key(|job| job.key().to_owned());
    let found: Vec<_> = claimed.iter().map(|job| (job.key(), job.attempt_number())).collect();
    // The lease of the taken row is over: this is its second attempt.
    assert_eq!(found, [("0", 2), ("2", 1), ("3", 1), ("4", 1)]);
    assert!(claimed[0].fence().get() > FENCE);
    for job in claimed {
        job.complete().await.unwrap();
    }
    assert_eq!(jobs.counts().await.unwrap().done, 5);
}
