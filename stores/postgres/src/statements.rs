//! The statements that the store sends to PostgreSQL. The functions that they call are in `sql/`; values are always bound, never spelled out.
//!
//! A statement runs with the search_path of the role or of the database, in which other roles may have put functions and operators that
//! fit better than PostgreSQL's own (CVE-2018-1058). So the functions set [`PATH`], and statements call only what fits exactly.

use tokio_postgres::types::Type;

/// The version of the schema. The store refuses a newer one.
pub(crate) const VERSION: i32 = 9;

/// The tables of this version. The script creates what is missing, so it may run again.
pub(crate) const TABLES: &str = include_str!("sql/tables.sql");

/// The scripts that bring the tables of an older version to the named one, in this order.
pub(crate) const UPGRADES: [(i32, &str); 1] = [(7, include_str!("sql/upgrade_7.sql"))];

/// The search_path of the store's functions: PostgreSQL's own schema, and temporary tables last.
pub(crate) const PATH: &str = "SET search_path = pg_catalog, pg_temp";

/// The functions of this version. PostgreSQL checks a function in SQL when it is created, so it comes after those that it calls.
pub(crate) const FUNCTIONS: &str = concat!(
    include_str!("sql/common.sql"),
    include_str!("sql/events.sql"),
    include_str!("sql/client.sql"),
    include_str!("sql/admission.sql"),
    include_str!("sql/lock_rows.sql"),
    include_str!("sql/queue.sql"),
    include_str!("sql/break_lock.sql"),
    include_str!("sql/revoke.sql"),
    include_str!("sql/inspect.sql"),
    include_str!("sql/acquire.sql"),
    include_str!("sql/release.sql"),
    include_str!("sql/request.sql"),
    include_str!("sql/records.sql"),
    include_str!("sql/limits.sql"),
    include_str!("sql/transaction.sql"),
    include_str!("sql/sweep.sql"),
);

/// One statement, with the types of its parameters.
pub(crate) struct PgStatement {
    pub text: &'static str,
    pub types: &'static [Type],
}

const fn sql(text: &'static str, types: &'static [Type]) -> PgStatement {
    PgStatement { text, types }
}

/// The parameters of an acquire or release of one name.
const ONE_NAME: &[Type] = &[
    Type::TEXT,
    Type::INT4,
    Type::INT8,
    Type::INT4,
    Type::TEXT,
    Type::BYTEA,
    Type::INT8,
    Type::TEXT,
    Type::TEXT,
];
/// An acquire or release of one name.
pub(crate) static RUN_REQUEST: PgStatement =
    sql("SELECT @S.run_request($1, $2, $3, $4, $5, $6, $7, $8::text::jsonb, $9)", ONE_NAME);
/// The fast path of an acquire: one upsert, which `run_request` begins with. It returns no row if the request needs the full function.
pub(crate) static ACQUIRE_FAST: PgStatement = sql(include_str!("sql/acquire_fast.sql"), ONE_NAME);
/// The fast path of a release: one update. A release without a hand-off does not wait for the disk: the next grant, or any other commit, flushes
/// it. Only a release that is sent alone does so: the setting applies to all that is committed with it, and a grant does wait.
pub(crate) static RELEASE_FAST: PgStatement = sql(
    concat!(
        include_str!("sql/release_fast.sql"),
        "  RETURNING CASE flags WHEN 0 THEN left('+' || set_config('synchronous_commit', 'off', true), 1) \
         ELSE '+' || @S.hand_off(name, @S.now_us())::text END"
    ),
    ONE_NAME,
);
/// The same without the RETURNING clause, for `run_request`, which may be committed together with grants.
pub(crate) const RELEASE_FAST_UPDATE: &str = include_str!("sql/release_fast.sql");
/// Several of them, in the order of their names: so statements do not deadlock.
pub(crate) static RUN_REQUESTS: PgStatement = sql(
    "SELECT @S.run_request($1, $2, $3, u.kind, u.name, u.attempt, u.ttl, u.terms::jsonb, u.holder) \
     FROM ROWS FROM (pg_catalog.unnest($4), pg_catalog.unnest($5), pg_catalog.unnest($6), pg_catalog.unnest($7), \
     pg_catalog.unnest($8), pg_catalog.unnest($9)) AS u(kind, name, attempt, ttl, terms, holder)",
    &[
        Type::TEXT,
        Type::INT4,
        Type::INT8,
        Type::INT4_ARRAY,
        Type::TEXT_ARRAY,
        Type::BYTEA_ARRAY,
        Type::INT8_ARRAY,
        Type::TEXT_ARRAY,
        Type::TEXT_ARRAY,
    ],
);
/// An acquire of several names.
pub(crate) static ACQUIRE_NAMES: PgStatement = sql(
    "SELECT @S.acquire($1, $2, $3, $4, $5, $6, $7, $8::text::jsonb, $9)",
    &[
        Type::TEXT,
        Type::INT4,
        Type::INT8,
        Type::BOOL,
        Type::TEXT_ARRAY,
        Type::BYTEA,
        Type::INT8,
        Type::TEXT,
        Type::TEXT,
    ],
);
pub(crate) static RELEASE_NAMES: PgStatement =
    sql("SELECT @S.release($1, $2)", &[Type::TEXT_ARRAY, Type::BYTEA]);
pub(crate) static RENEW: PgStatement = sql(
    "SELECT @S.renew(u.name, u.attempt) FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2)) AS u(name, attempt)",
    &[Type::TEXT_ARRAY, Type::BYTEA_ARRAY],
);
pub(crate) static REVOKE: PgStatement = sql("SELECT @S.revoke($1, $2)", &[Type::TEXT, Type::TEXT]);
pub(crate) static BREAK: PgStatement = sql("SELECT @S.break_lock($1, $2)", &[Type::TEXT, Type::TEXT]);
pub(crate) static POLL: PgStatement = sql(
    "SELECT @S.poll($1, $2, $3, $4, $5)",
    &[Type::TEXT, Type::INT4, Type::INT8, Type::BOOL, Type::TEXT_ARRAY],
);
pub(crate) static BEGIN_EPOCH: PgStatement = sql("SELECT @S.begin_epoch($1, $2)", &[Type::TEXT, Type::INT4]);
pub(crate) static NEXT_FENCE: PgStatement = sql("SELECT @S.next_fence(@S.now_us())", &[]);
pub(crate) static FENCE_IN_TRANSACTION: PgStatement =
    sql("SELECT @S.fence_in_transaction($1)", &[Type::TEXT]);
/// The first fence, and whether no process has swept for ten minutes.
pub(crate) static FENCE_AND_SWEEP_OVERDUE: PgStatement = sql(
    "SELECT @S.next_fence(@S.now_us()), \
     (SELECT bool_or(swept_at NOT BETWEEN @S.now_us() - 600000000 AND @S.now_us()) FROM @S.state)",
    &[],
);
/// Whether a sweep is due and no other process has begun it. The claim lasts a minute: if the process ends before it has finished, the next
/// one does the rest.
pub(crate) static CLAIM_SWEEP: PgStatement = sql(
    "WITH claimed AS (UPDATE @S.state SET swept_at = @S.now_us() - 540000000 \
     WHERE swept_at NOT BETWEEN @S.now_us() - 600000000 AND @S.now_us() RETURNING true) SELECT EXISTS (SELECT FROM claimed)",
    &[],
);
/// The sweep is done: no process needs to sweep for ten minutes.
pub(crate) static END_SWEEP: PgStatement =
    sql("UPDATE @S.state SET swept_at = @S.now_us() RETURNING true", &[]);
/// The sweeps, in portions: each covers the rows after a key and returns the last key that it covered, or NULL at the end.
pub(crate) static SWEEPS: [PgStatement; 4] = [
    sql("SELECT @S.sweep_locks($1, @S.now_us() - 3600000000)", &[Type::TEXT]),
    sql("SELECT @S.sweep_records($1)", &[Type::TEXT]),
    sql("SELECT @S.sweep_buckets($1)", &[Type::TEXT]),
    sql("SELECT @S.sweep_clients($1, @S.now_us() - 3600000000)", &[Type::TEXT]),
];
/// Lets the functions emit events for so long, on the channel with these digits unless there is one. Returns the digits of the channel, and
/// whether the functions have emitted events without a gap: the subquery sees the row as it was before.
pub(crate) static KEEP_WATCHING: PgStatement = sql(
    "INSERT INTO @S.state AS s (watched_until, swept_at, channel) VALUES (@S.now_us() + $1, 0, $2) ON CONFLICT (singleton) DO UPDATE \
     SET watched_until = greatest(s.watched_until, excluded.watched_until), channel = coalesce(s.channel, excluded.channel) \
     RETURNING s.channel, coalesce((SELECT b.watched_until >= @S.now_us() FROM @S.state b), false)",
    &[Type::INT8, Type::TEXT],
);
pub(crate) static NOTIFY: PgStatement = sql("SELECT pg_notify($1, $2)", &[Type::TEXT, Type::TEXT]);

pub(crate) static INSPECT: PgStatement =
    sql("SELECT @S.inspect($1, @S.now_us(), 1000000, $2)", &[Type::TEXT, Type::INT4]);
/// The views of the names of a page that may be in use.
pub(crate) static LIST: PgStatement = sql(
    "SELECT @S.inspect(t.name, t.now, 1000000, $4) FROM (SELECT l.name, n.now FROM @S.lock l, (SELECT @S.now_us() AS now OFFSET 0) n \
     WHERE l.name >= $1 AND l.name > $2 AND l.name < $1 || repeat(chr(1114111), 129) \
     AND (l.free_at > n.now OR l.expires > n.now OR l.flags <> 0) ORDER BY l.name LIMIT $3) t",
    &[Type::TEXT, Type::TEXT, Type::INT8, Type::INT4],
);

pub(crate) static READ_RECORD: PgStatement = sql(
    "SELECT value, version FROM @S.record WHERE key = $1 AND (expires IS NULL OR expires > @S.now_us())",
    &[Type::TEXT],
);
pub(crate) static PUT_RECORD: PgStatement =
    sql("SELECT * FROM @S.put_record($1, $2, $3, $4)", &[Type::TEXT, Type::BYTEA, Type::INT8, Type::INT8]);
pub(crate) static SCAN_RECORDS: PgStatement = sql(
    "SELECT key, value, version FROM @S.record WHERE key >= $1 AND key > $2 AND key < $1 || repeat(chr(1114111), 129) \
     AND (expires IS NULL OR expires > @S.now_us()) ORDER BY key LIMIT $3",
    &[Type::TEXT, Type::TEXT, Type::INT8],
);

/// A request for the buckets of rate limits.
pub(crate) static LIMIT: PgStatement = sql(
    "SELECT * FROM @S.limit_buckets($1, $2, $3, $4, $5, $6)",
    &[Type::INT4, Type::INT8, Type::TEXT_ARRAY, Type::INT8_ARRAY, Type::INT8_ARRAY, Type::INT8_ARRAY],
);

/// The frequent statements, which are prepared where that is possible.
pub(crate) static PREPARED: [&PgStatement; 9] = [
    &RUN_REQUEST,
    &ACQUIRE_FAST,
    &RELEASE_FAST,
    &RUN_REQUESTS,
    &ACQUIRE_NAMES,
    &RELEASE_NAMES,
    &RENEW,
    &POLL,
    &LIMIT,
];
