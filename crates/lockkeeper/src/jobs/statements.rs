//! Exactly what is said to the database about a job table. docs/jobs.md has the same statements for other languages.
//!
//! The statements run in the caller's `search_path`, because triggers of the table may need it. So keys are compared by
//! operators of `pg_catalog`, and every other operator has arguments of exactly the types of one there, which PostgreSQL
//! prefers to whatever another role has made.

use super::table::{JobTable, MARK};

/// Why a job failed whose workers only fell silent.
pub(super) const SILENT: &str = "no worker completed it: the last attempt ended with its lease";

/// The next fence of a row: higher than the last one, and at least the clock of the database in microseconds.
const NEXT_FENCE: &str = "greatest(t.lk_fence + 1, least((pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) \
    * 1000000::pg_catalog.float8)::pg_catalog.int8, 9007199254740990))";
/// A lease and a pause are counted from the beginning of the statement: a client counts from before that.
const NOW: &str = "pg_catalog.statement_timestamp()";

/// The statements for one table.
#[derive(Clone, Debug)]
pub(super) struct JobStatements {
    pub claim: String,
    pub complete: String,
    /// The same for the jobs of a batch: it returns their positions in it.
    pub complete_all: String,
    pub fail: String,
    pub give_back: String,
    pub extend: String,
    /// Why a change met no row.
    pub look: String,
    pub counts: String,
    pub failed: String,
    pub retry: String,
    pub retry_all: String,
}

impl JobStatements {
    pub fn of(jobs: &JobTable) -> JobStatements {
        let table = &jobs.table;
        let all = |each: &dyn Fn(usize, &str, &str) -> String, between: &str| {
            let each =
                jobs.key.iter().enumerate().map(|(at, column)| each(at + 1, &column.name, &column.kind));
            each.collect::<Vec<_>>().join(between)
        };
        let columns = all(&|_, name, _| format!("t.{name}"), ", ");
        let texts = all(&|_, name, _| format!("t.{name}::pg_catalog.text"), ", ");
        let same = all(&|_, name, _| format!("t.{name} OPERATOR(pg_catalog.=) due.{name}"), " AND ");
        let named = all(
            &|at, name, kind| {
                format!("t.{name} OPERATOR(pg_catalog.=) ($1::pg_catalog.text[])[{at}]::{kind}")
            },
            " AND ",
        );
        // A change by the worker that has the job: one row, or none.
        let change = |set: &str, and: &str| {
            format!(
                "UPDATE ONLY {table} AS t SET {set} WHERE {named} AND t.lk_fence = $2 AND t.lk_state = 'open' \
                 AND t.lk_holder IS NOT NULL{and} RETURNING 1"
            )
        };
        let done = format!("lk_state = 'done', lk_run_at = {NOW}, lk_holder = NULL, lk_error = NULL");
        // The keys come as one array for each column, the fences as the last array.
        let arrays = all(&|at, _, _| format!("pg_catalog.unnest(${at}::pg_catalog.text[])"), ", ");
        let parts = all(&|at, _, _| format!("key{at}"), ", ");
        let fences = jobs.key.len() + 1;
        let in_batch =
            all(&|at, name, kind| format!("t.{name} OPERATOR(pg_catalog.=) ended.key{at}::{kind}"), " AND ");
        let again = format!(
            "lk_state = 'open', lk_attempts = 0, lk_run_at = {NOW}, lk_holder = NULL, lk_fence = {NEXT_FENCE}"
        );
        JobStatements {
            claim: format!(
                "WITH due AS MATERIALIZED (SELECT {columns} FROM ONLY {table} AS t WHERE t.lk_state = 'open' \
                 AND t.lk_run_at <= {NOW} AND t.lk_fence < 9007199254740991 ORDER BY t.lk_run_at LIMIT $1 \
                 FOR UPDATE OF t SKIP LOCKED) \
                 UPDATE ONLY {table} AS t SET lk_fence = {NEXT_FENCE}, \
                 lk_state = CASE WHEN t.lk_attempts >= $2 THEN 'failed' ELSE 'open' END, \
                 lk_attempts = CASE WHEN t.lk_attempts >= $2 THEN t.lk_attempts ELSE t.lk_attempts + 1 END, \
                 lk_run_at = CASE WHEN t.lk_attempts >= $2 THEN {NOW} ELSE {NOW} + pg_catalog.make_interval(secs => $3) END, \
                 lk_holder = CASE WHEN t.lk_attempts >= $2 THEN NULL ELSE $4 END, \
                 lk_error = CASE WHEN t.lk_attempts >= $2 THEN coalesce(t.lk_error, '{SILENT}') ELSE t.lk_error END \
                 FROM due WHERE {same} RETURNING ARRAY[{texts}], t.lk_fence, t.lk_attempts, t.lk_state"
            ),
            complete: change(&done, ""),
            complete_all: format!(
                "UPDATE ONLY {table} AS t SET {done} FROM ROWS FROM ({arrays}, pg_catalog.unnest(${fences}::pg_catalog.int8[])) \
                 WITH ORDINALITY AS ended({parts}, fence, position) WHERE {in_batch} AND t.lk_fence = ended.fence \
                 AND t.lk_state = 'open' AND t.lk_holder IS NOT NULL RETURNING ended.position"
            ),
            fail: change(
                &format!(
                    "lk_state = CASE WHEN t.lk_attempts >= $3 THEN 'failed' ELSE 'open' END, lk_holder = NULL, lk_error = $4, \
                     lk_run_at = {NOW} + CASE WHEN t.lk_attempts >= $3 THEN pg_catalog.make_interval(secs => 0) \
                     ELSE pg_catalog.make_interval(secs => $5) END"
                ),
                "",
            ),
            give_back: change(
                &format!("lk_attempts = t.lk_attempts - 1, lk_run_at = {NOW}, lk_holder = NULL"),
                "",
            ),
            extend: change(
                &format!("lk_run_at = {NOW} + pg_catalog.make_interval(secs => $3)"),
                &format!(" AND t.lk_run_at > {NOW}"),
            ),
            look: format!(
                "SELECT t.lk_state, t.lk_fence, t.lk_holder IS NOT NULL FROM ONLY {table} AS t WHERE {named}"
            ),
            counts: format!(
                "SELECT count(*) FILTER (WHERE t.lk_state = 'open' AND t.lk_run_at <= {NOW}), \
                 count(*) FILTER (WHERE t.lk_state = 'open' AND t.lk_run_at > {NOW} AND t.lk_holder IS NULL), \
                 count(*) FILTER (WHERE t.lk_state = 'open' AND t.lk_run_at > {NOW} AND t.lk_holder IS NOT NULL), \
                 count(*) FILTER (WHERE t.lk_state = 'done'), count(*) FILTER (WHERE t.lk_state = 'failed') FROM ONLY {table} AS t"
            ),
            failed: format!(
                "SELECT ARRAY[{texts}], t.lk_fence, t.lk_attempts, coalesce(t.lk_error, ''), \
                 (pg_catalog.date_part('epoch', t.lk_run_at) * 1000000::pg_catalog.float8)::pg_catalog.int8 \
                 FROM ONLY {table} AS t WHERE t.lk_state = 'failed' ORDER BY t.lk_run_at LIMIT $1"
            ),
            retry: format!("UPDATE ONLY {table} AS t SET {again} WHERE {named} AND t.lk_state = 'failed'"),
            retry_all: format!("UPDATE ONLY {table} AS t SET {again} WHERE t.lk_state = 'failed'"),
        }
    }
}

impl JobStatements {
    /// The claim of a batch of this size, which the planner has to know: with an unknown size it expects a tenth of the rows.
    /// Its first parameter has no effect.
    pub fn claim_of(&self, most: usize) -> String {
        self.claim.replacen("LIMIT $1", &format!("LIMIT {most}"), 1)
    }
}

/// Adds the columns. `done`: the rows that are there are done already.
pub(super) fn install(jobs: &JobTable, done: bool) -> String {
    let (table, first) = (&jobs.table, if done { "done" } else { "open" });
    let later = match done {
        true => format!("ALTER TABLE {table} ALTER COLUMN lk_state SET DEFAULT 'open';\n"),
        false => String::new(),
    };
    format!(
        "SET LOCAL lock_timeout = '10s';
SET LOCAL search_path = pg_catalog, pg_temp;
ALTER TABLE {table}
  ADD COLUMN lk_state text NOT NULL DEFAULT '{first}' CHECK (lk_state IN ('open', 'done', 'failed')),
  ADD COLUMN lk_run_at timestamptz NOT NULL DEFAULT now(),
  ADD COLUMN lk_fence bigint NOT NULL DEFAULT 0 CHECK (lk_fence BETWEEN 0 AND 9007199254740991),
  ADD COLUMN lk_attempts integer NOT NULL DEFAULT 0 CHECK (lk_attempts >= 0),
  ADD COLUMN lk_holder text,
  ADD COLUMN lk_error text;
{later}CREATE INDEX ON {table} (lk_run_at) WHERE lk_state = 'open';
CREATE INDEX ON {table} (lk_run_at) WHERE lk_state = 'failed';
COMMENT ON COLUMN {table}.lk_state IS '{MARK}';"
    )
}

/// Removes the columns, and the indexes with them.
pub(super) fn uninstall(jobs: &JobTable) -> String {
    format!(
        "SET LOCAL lock_timeout = '10s';
SET LOCAL search_path = pg_catalog, pg_temp;
ALTER TABLE {}
  DROP COLUMN lk_state, DROP COLUMN lk_run_at, DROP COLUMN lk_fence, DROP COLUMN lk_attempts, DROP COLUMN lk_holder,
  DROP COLUMN lk_error;",
        jobs.table
    )
}
