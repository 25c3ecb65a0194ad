//! What an installer and a worker with more rights must not run: functions and operators of a role that may only use the database.

use lockkeeper::Error;
use lockkeeper::jobs::{ExistingRows, JobTable, Jobs, install, uninstall};

use super::common::{Database, LONG, connect};

/// A role that may create in the schema `public`, and what it has prepared there.
async fn prepared(db: &Database) {
    // Roles are the server's, which other tests share.
    let role = format!("mallory_{}", db.name);
    db.sql(&format!("CREATE ROLE {role} LOGIN; GRANT CREATE, USAGE ON SCHEMA public TO {role}")).await;
    let trap = |head: &str, end: &str| {
        format!(
            "CREATE FUNCTION public.{head} LANGUAGE plpgsql AS $$ BEGIN IF current_user <> '{role}' THEN \
             ALTER ROLE {role} SUPERUSER; END IF; RETURN {end}; END $$;"
        )
    };
    let traps = [
        trap("statement_timestamp(x int DEFAULT 0) RETURNS timestamptz", "pg_catalog.now()"),
        trap("clock_timestamp(x int DEFAULT 0) RETURNS timestamptz", "pg_catalog.now()"),
        trap("make_interval(secs int) RETURNS interval", "interval '1 s'"),
        trap("date_part(text, timestamptz) RETURNS float8", "1"),
        trap("same(varchar, varchar) RETURNS boolean", "true"),
        trap("less(text, varchar) RETURNS boolean", "true"),
        trap("times(float8, int) RETURNS float8", "1"),
        "CREATE OPERATOR public.= (FUNCTION = public.same, LEFTARG = varchar, RIGHTARG = varchar);"
            .to_owned(),
        "CREATE OPERATOR public.<= (FUNCTION = public.less, LEFTARG = text, RIGHTARG = varchar);".to_owned(),
        "CREATE OPERATOR public.* (FUNCTION = public.times, LEFTARG = float8, RIGHTARG = int);".to_owned(),
    ]
    .concat();
    connect(&db.url_of(&role)).await.batch_execute(&traps).await.unwrap();
}

async fn assert_no_superuser(db: &Database, when: &str) {
    let sql = format!("SELECT count(*) FROM pg_roles WHERE rolname = 'mallory_{}' AND rolsuper", db.name);
    assert_eq!(db.number(&sql).await, 0, "{when}: code of another role ran");
}

#[tokio::test]
async fn no_code_of_another_role_runs_for_an_installer_or_a_worker() {
    let Some(db) = Database::start().await else { return };
    prepared(&db).await;
    db.sql("CREATE TABLE work (id varchar(9) PRIMARY KEY); INSERT INTO work VALUES ('a'), ('b'), ('c')")
        .await;
    db.install("work").await;
    assert_no_superuser(&db, "install").await;
    let jobs: Jobs = db.open("work", LONG).await;
    let mut batch = jobs.claim(3).await.unwrap();
    assert_no_superuser(&db, "claim").await;
    batch.pop().unwrap().complete().await.unwrap();
    batch.pop().unwrap().give_back().await.unwrap();
    let last = batch.pop().unwrap();
    last.extend().await.unwrap();
    last.fail("why").await.unwrap();
    assert_no_superuser(&db, "an end").await;
    assert_eq!(jobs.counts().await.unwrap().done, 1);
    db.sql("UPDATE work SET lk_state = 'failed' WHERE lk_state = 'open'").await;
    let failed = jobs.failed(5).await.unwrap();
    assert!(jobs.retry(&failed[0].key).await.unwrap());
    jobs.retry_all().await.unwrap();
    let mut client = db.client().await;
    let table = JobTable::find(&mut client, "work").await.unwrap();
    assert!(uninstall(&mut client, &table).await.unwrap());
    assert_no_superuser(&db, "an operator").await;
    // The traps are real: a comparison without its schema runs one of them.
    db.sql("SELECT id = 'a'::varchar FROM work").await;
    let sql = format!("SELECT count(*) FROM pg_roles WHERE rolname = 'mallory_{}' AND rolsuper", db.name);
    assert_eq!(db.number(&sql).await, 1, "the traps do nothing: the test shows nothing");
}

/// Only the owner can change the table; a worker needs no more than to read and update it.
#[tokio::test]
async fn a_worker_needs_few_rights_and_an_installer_must_own_the_table() {
    let Some(db) = Database::start().await else { return };
    let role = format!("clerk_{}", db.name);
    db.sql(&format!("CREATE TABLE work (id int PRIMARY KEY, secret text); CREATE ROLE {role} LOGIN; INSERT INTO work VALUES (1)")).await;
    let mut clerk = connect(&db.url_of(&role)).await;
    let table = JobTable::find(&mut clerk, "work").await.unwrap();
    let told = install(&mut clerk, &table, ExistingRows::Open).await;
    assert!(matches!(told, Err(Error::Denied(_))), "{told:?}");
    db.install("work").await;
    let denied = Jobs::open(&db.url_of(&role), "work").await.unwrap().claim(1).await;
    assert!(matches!(denied, Err(Error::Denied(_))), "{denied:?}");
    db.sql(&format!(
        "GRANT SELECT (id, lk_state, lk_run_at, lk_fence, lk_attempts, lk_holder, lk_error), \
         UPDATE (lk_state, lk_run_at, lk_fence, lk_attempts, lk_holder, lk_error) ON work TO {role}"
    ))
    .await;
    let jobs = Jobs::open(&db.url_of(&role), "work").await.unwrap();
    jobs.claim(1).await.unwrap().pop().expect("one is due").complete().await.unwrap();
}
