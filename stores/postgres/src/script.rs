//! Exactly what we say to PostgreSQL. The functions themselves are in `sql/`; values are always bound, never spelled.
//!
//! A statement runs with the search_path of the role or of the database, in which other roles may have put functions and operators that
//! fit better than PostgreSQL's own (CVE-2018-1058). So the functions set [`PATH`], and statements call only what fits exactly.

use tokio_postgres::types::Type;

/// The version of the schema below. One that is newer is refused.
pub(crate) const VERSION: i32 = MIGRATIONS.len() as i32;

/// What makes the tables of each version out of those of the one before. Each may be said again, and makes what is missing.
pub(crate) const MIGRATIONS: [&str; 5] = [
    include_str!("sql/tables.sql"),
    include_str!("sql/handing_over.sql"),
    include_str!("sql/on_the_disk.sql"),
    include_str!("sql/wake_ups.sql"),
    include_str!("sql/revocation.sql"),
];

/// The search_path of our functions: PostgreSQL's own schema, and temporary tables last.
pub(crate) const PATH: &str = "SET search_path = pg_catalog, pg_temp";

/// The functions of this version.
pub(crate) const FUNCTIONS: &str = concat!(
    include_str!("sql/step.sql"),
    include_str!("sql/rules.sql"),
    include_str!("sql/ask.sql"),
    include_str!("sql/release.sql"),
    include_str!("sql/break.sql"),
    include_str!("sql/revoke.sql"),
    include_str!("sql/view.sql"),
    include_str!("sql/record.sql"),
    include_str!("sql/enter.sql"),
    include_str!("sql/tidy.sql"),
);

/// One statement, with the types of what is bound.
pub(crate) struct Sql {
    pub text: &'static str,
    pub types: &'static [Type],
}

const fn sql(text: &'static str, types: &'static [Type]) -> Sql {
    Sql { text, types }
}

/// What one ask or release of one name has to say.
const ONE: &[Type] = &[
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
/// One ask or release of one name.
pub(crate) static STEP: Sql = sql("SELECT @S.step($1, $2, $3, $4, $5, $6, $7, $8::text::jsonb, $9)", ONE);
/// The usual ask, and the usual release: the beginning of that step, at the price of one upsert or update. No answer: it is unusual.
pub(crate) static TAKE: Sql = sql(include_str!("sql/take.sql"), ONE);
/// A release that gives the lock to nobody does not wait for the disk: the next grant, or anything else that is written, takes it there.
/// Only one that travels alone: the setting is for all that is committed with it, and a grant does wait.
pub(crate) static GIVE: Sql = sql(
    concat!(
        include_str!("sql/give.sql"),
        "  RETURNING CASE flags WHEN 0 THEN left('+' || set_config('synchronous_commit', 'off', true), 1) \
         ELSE '+' || @S.pass_on(name, @S.us())::text END"
    ),
    ONE,
);
/// The same but for what it returns, for a step that others may stand beside.
pub(crate) const GIVING: &str = include_str!("sql/give.sql");
/// Several, in the order of their names: so nobody waits in a circle.
pub(crate) static STEPS: Sql = sql(
    "SELECT @S.step($1, $2, $3, u.kind, u.name, u.attempt, u.ttl, u.terms::jsonb, u.holder) \
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
/// One ask for several names.
pub(crate) static ASK_ALL: Sql = sql(
    "SELECT @S.ask($1, $2, $3, $4, $5, $6, $7, $8::text::jsonb, $9)",
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
pub(crate) static RELEASE_ALL: Sql = sql("SELECT @S.release($1, $2)", &[Type::TEXT_ARRAY, Type::BYTEA]);
pub(crate) static RENEW: Sql = sql(
    "SELECT @S.extend(u.name, u.attempt) FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2)) AS u(name, attempt)",
    &[Type::TEXT_ARRAY, Type::BYTEA_ARRAY],
);
pub(crate) static REVOKE: Sql = sql("SELECT @S.revoke($1, $2)", &[Type::TEXT, Type::TEXT]);
pub(crate) static BREAK: Sql = sql("SELECT @S.break_lock($1, $2)", &[Type::TEXT, Type::TEXT]);
pub(crate) static LOOK: Sql = sql(
    "SELECT @S.look($1, $2, $3, $4, $5)",
    &[Type::TEXT, Type::INT4, Type::INT8, Type::BOOL, Type::TEXT_ARRAY],
);
pub(crate) static HELLO: Sql = sql("SELECT @S.hello($1, $2)", &[Type::TEXT, Type::INT4]);
pub(crate) static FENCE: Sql = sql("SELECT @S.next_fence(@S.us())", &[]);
pub(crate) static FENCE_INSIDE: Sql = sql("SELECT @S.fence_inside($1)", &[Type::TEXT]);
pub(crate) static TIDY: Sql = sql("SELECT @S.tidy()", &[]);
/// What is cleared away, in portions: what lies behind a key, up to the key that is answered. No answer: that was all.
pub(crate) static SWEEPS: [Sql; 3] = [
    sql("SELECT @S.sweep_locks($1, @S.us() - 3600000000)", &[Type::TEXT]),
    sql("SELECT @S.sweep_records($1)", &[Type::TEXT]),
    sql("SELECT @S.sweep_clients($1, @S.us() - 3600000000)", &[Type::TEXT]),
];
pub(crate) static WATCHED: Sql =
    sql("UPDATE @S.state SET watched = greatest(watched, @S.us() + $1)", &[Type::INT8]);
pub(crate) static NOTIFY: Sql = sql("SELECT pg_notify($1, $2)", &[Type::TEXT, Type::TEXT]);

pub(crate) static INSPECT: Sql = sql("SELECT @S.view($1, @S.us(), 1000000, $2)", &[Type::TEXT, Type::INT4]);
/// The names of a page that may have something to show, and what.
pub(crate) static LIST: Sql = sql(
    "SELECT @S.view(t.name, t.now, 1000000, $4) FROM (SELECT l.name, n.now FROM @S.lock l, (SELECT @S.us() AS now OFFSET 0) n \
     WHERE l.name >= $1 AND l.name > $2 AND l.name < $1 || repeat(chr(1114111), 129) \
     AND (l.free > n.now OR l.expires > n.now OR l.flags <> 0) ORDER BY l.name LIMIT $3) t",
    &[Type::TEXT, Type::TEXT, Type::INT8, Type::INT4],
);

pub(crate) static READ: Sql = sql(
    "SELECT value, version FROM @S.record WHERE key = $1 AND (expires IS NULL OR expires > @S.us())",
    &[Type::TEXT],
);
pub(crate) static PUT: Sql =
    sql("SELECT * FROM @S.put($1, $2, $3, $4)", &[Type::TEXT, Type::BYTEA, Type::INT8, Type::INT8]);
pub(crate) static SCAN: Sql = sql(
    "SELECT key, value, version FROM @S.record WHERE key >= $1 AND key > $2 AND key < $1 || repeat(chr(1114111), 129) \
     AND (expires IS NULL OR expires > @S.us()) ORDER BY key LIMIT $3",
    &[Type::TEXT, Type::TEXT, Type::INT8],
);

/// What is said often, and so prepared where that is possible.
pub(crate) static OFTEN: [&Sql; 8] = [&STEP, &TAKE, &GIVE, &STEPS, &ASK_ALL, &RELEASE_ALL, &RENEW, &LOOK];
