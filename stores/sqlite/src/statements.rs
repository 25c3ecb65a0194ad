//! The schema and every statement that the store sends to SQLite. Values are always bound parameters.
//!
//! - Names are TEXT with the binary collation: compared byte by byte. The names of a request are one
//!   text with line feeds between them, which no name contains.
//! - Instants and durations are nanoseconds of the boot-time clock; `since` and `at` are microseconds of the wall clock.
//! - `hold.status` is 0 for held, 1 for lingering and 2 for revoked.
//! - `mode` is 0 for exclusive, -1 for shared, and the number of permits otherwise.

use std::path::Path;

use rusqlite::{Connection, OpenFlags, Params};

/// "LKpr" in the file's header: distinguishes the file from those of other applications.
pub(crate) const APPLICATION: i64 = 0x4c4b_7072;
/// The version of the schema below.
pub(crate) const VERSION: i64 = 3;

// Without rowids where statements look up the primary key: one page less to write for each grant.
const SCHEMA: &str = "
CREATE TABLE state(id INTEGER PRIMARY KEY, boot TEXT NOT NULL, fence INTEGER NOT NULL, reserved INTEGER NOT NULL,
 ticket INTEGER NOT NULL, written_at INTEGER NOT NULL DEFAULT 0);
CREATE TABLE hold(attempt BLOB PRIMARY KEY, names TEXT NOT NULL, owner BLOB, mode INTEGER NOT NULL,
 fence INTEGER NOT NULL, seq INTEGER NOT NULL, granted INTEGER NOT NULL, since INTEGER NOT NULL,
 expires INTEGER NOT NULL, ttl INTEGER NOT NULL, lock_delay INTEGER NOT NULL, min_hold INTEGER NOT NULL, status INTEGER NOT NULL,
 host TEXT NOT NULL, holder INTEGER NOT NULL, label TEXT,
 pid INTEGER NOT NULL, start INTEGER NOT NULL, namespace INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX hold_expires ON hold(expires);
CREATE INDEX hold_owner ON hold(owner) WHERE owner IS NOT NULL;
CREATE TABLE held_name(name TEXT NOT NULL, fence INTEGER NOT NULL, seq INTEGER NOT NULL, attempt BLOB NOT NULL,
 PRIMARY KEY(name, fence, seq)) WITHOUT ROWID;
CREATE TABLE waiter(ticket INTEGER PRIMARY KEY, attempt BLOB NOT NULL UNIQUE, peer BLOB NOT NULL,
 names TEXT NOT NULL, owner BLOB, mode INTEGER NOT NULL, until INTEGER NOT NULL, since INTEGER NOT NULL,
 ttl INTEGER NOT NULL, lock_delay INTEGER NOT NULL, min_hold INTEGER NOT NULL,
 host TEXT NOT NULL, holder INTEGER NOT NULL, label TEXT,
 pid INTEGER NOT NULL, start INTEGER NOT NULL, namespace INTEGER NOT NULL);
CREATE INDEX waiter_peer ON waiter(peer);
CREATE INDEX waiter_owner ON waiter(owner) WHERE owner IS NOT NULL;
CREATE TABLE queue_entry(name TEXT NOT NULL, ticket INTEGER NOT NULL, peer BLOB NOT NULL, until INTEGER NOT NULL,
 PRIMARY KEY(name, ticket)) WITHOUT ROWID;
CREATE TABLE delay(name TEXT PRIMARY KEY, until INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE record(id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, value BLOB NOT NULL,
 version INTEGER NOT NULL, ttl INTEGER, expires INTEGER);
CREATE INDEX record_expires ON record(expires) WHERE expires IS NOT NULL;
CREATE TABLE event(id INTEGER PRIMARY KEY, at INTEGER NOT NULL, name TEXT NOT NULL, kind TEXT NOT NULL,
 fence INTEGER, reason TEXT, host TEXT, holder INTEGER, label TEXT);
CREATE TABLE watcher(peer BLOB PRIMARY KEY) WITHOUT ROWID;
";

/// Creates a database in an empty file, ready to be renamed: in write-ahead mode, without a log, and on the disk.
pub(crate) fn create_file(path: &Path, boot: &str) -> rusqlite::Result<()> {
    let sql = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    create_tables(&sql, boot)?;
    journal_mode(&sql, true)?;
    sql.close().map_err(|(_, e)| e)
}

/// Creates the tables, unless another process was faster. In rollback mode, so that the version is in the file's own header
/// and not only in a log.
pub(crate) fn create_tables(sql: &Connection, boot: &str) -> rusqlite::Result<()> {
    // A grant changes a row in each of four tables, and the log takes a whole page for each.
    set_pragma(sql, "page_size", 2048)?;
    sql.execute_batch("BEGIN IMMEDIATE")?;
    let made = (|| {
        if pragma(sql, "application_id")? != 0 || !is_blank(sql)? {
            return Ok(());
        }
        sql.execute_batch(SCHEMA)?;
        sql.execute("INSERT INTO state VALUES(1, ?1, 0, 0, 0, 0)", [boot])?;
        set_pragma(sql, "application_id", APPLICATION)?;
        set_pragma(sql, "user_version", VERSION)
    })();
    let end = sql.execute_batch(if made.is_ok() { "COMMIT" } else { "ROLLBACK" });
    made.and(end)
}

/// Upgrades a file of an older format, unless another process was faster. Format 1 has no time of the last write; formats 1
/// and 2 have other names.
pub(crate) fn upgrade(sql: &Connection) -> rusqlite::Result<()> {
    sql.execute_batch("BEGIN IMMEDIATE")?;
    let done = (|| {
        let version = pragma(sql, "user_version")?;
        if version == 1 {
            sql.execute_batch("ALTER TABLE state ADD COLUMN moment INTEGER NOT NULL DEFAULT 0")?;
        }
        if version < 3 {
            sql.execute_batch(
                "ALTER TABLE state RENAME COLUMN moment TO written_at;
                 ALTER TABLE hold RENAME COLUMN turn TO seq;
                 ALTER TABLE hold RENAME COLUMN lingering TO status;
                 ALTER TABLE stake RENAME COLUMN turn TO seq;
                 ALTER TABLE stake RENAME TO held_name;
                 ALTER TABLE place RENAME TO queue_entry;",
            )?;
            set_pragma(sql, "user_version", VERSION)?;
        }
        Ok(())
    })();
    let end = sql.execute_batch(if done.is_ok() { "COMMIT" } else { "ROLLBACK" });
    done.and(end)
}

/// Whether the file has no table and no view: then it belongs to no application.
pub(crate) fn is_blank(sql: &Connection) -> rusqlite::Result<bool> {
    sql.query_row("SELECT NOT EXISTS(SELECT 1 FROM sqlite_schema)", [], |row| row.get(0))
}

pub(crate) fn pragma(sql: &Connection, name: &str) -> rusqlite::Result<i64> {
    sql.query_row(&format!("PRAGMA {name}"), [], |row| row.get(0))
}

pub(crate) fn set_pragma(sql: &Connection, name: &str, value: i64) -> rusqlite::Result<()> {
    sql.execute_batch(&format!("PRAGMA {name}={value}"))
}

pub(crate) fn journal_mode(sql: &Connection, set: bool) -> rusqlite::Result<String> {
    sql.query_row(if set { "PRAGMA journal_mode=WAL" } else { "PRAGMA journal_mode" }, [], |row| row.get(0))
}

/// Copies the log into the database: `PASSIVE` as far as other processes allow, `FULL`, or `RESTART`, after which the log begins anew. Returns whether no other process kept it from that.
pub(crate) fn checkpoint(sql: &Connection, how: &str) -> rusqlite::Result<bool> {
    sql.query_row(&format!("PRAGMA wal_checkpoint({how})"), [], |row| {
        row.get::<_, i64>(0).map(|busy| busy == 0)
    })
}

/// Reads the database in exclusive mode: [`rusqlite::ErrorCode::DatabaseBusy`] if any other connection has it open.
pub(crate) fn read_exclusively(sql: &Connection) -> rusqlite::Result<()> {
    sql.query_row("PRAGMA locking_mode=EXCLUSIVE", [], |_| Ok(()))?;
    is_blank(sql).map(drop)
}

/// Runs a statement that returns nothing.
pub(crate) fn run(sql: &Connection, text: &str) -> rusqlite::Result<()> {
    change(sql, text, []).map(drop)
}

/// Runs a statement and returns how many rows it changed.
pub(crate) fn change(sql: &Connection, text: &str, params: impl Params) -> rusqlite::Result<usize> {
    sql.prepare_cached(text)?.execute(params)
}

pub(crate) const STATE: &str =
    "SELECT boot, fence, reserved, ticket, written_at, EXISTS(SELECT 1 FROM watcher) FROM state WHERE id = 1";
pub(crate) const SAVE_STATE: &str =
    "UPDATE state SET boot = ?1, fence = ?2, reserved = ?3, ticket = ?4, written_at = ?5 WHERE id = 1";

/// Removes the locks of another boot, whose instants mean nothing now. Records start their ttl again.
pub(crate) const NEW_BOOT: [&str; 6] = [
    "DELETE FROM hold",
    "DELETE FROM held_name",
    "DELETE FROM waiter",
    "DELETE FROM queue_entry",
    "DELETE FROM delay",
    "DELETE FROM watcher",
];
pub(crate) const NEW_BOOT_RECORDS: &str = "UPDATE record SET expires = ?1 + ttl WHERE ttl IS NOT NULL";

/// The first take in a file creates this table: `full_at` is the instant at which the bucket is full, `at` that of the last write.
pub(crate) const LIMIT_TABLE: &str = "CREATE TABLE IF NOT EXISTS limit_bucket(key TEXT PRIMARY KEY, full_at INTEGER NOT NULL, at INTEGER NOT NULL) WITHOUT ROWID";
pub(crate) const LIMIT_INDEX: &str =
    "CREATE INDEX IF NOT EXISTS limit_bucket_full_at ON limit_bucket(full_at)";
pub(crate) const HAS_LIMIT_TABLE: &str =
    "SELECT EXISTS(SELECT 1 FROM sqlite_schema WHERE name = 'limit_bucket')";
pub(crate) const BUCKET: &str = "SELECT full_at FROM limit_bucket WHERE key = ?1";
pub(crate) const SET_BUCKET: &str =
    "INSERT INTO limit_bucket VALUES(?1, ?2, ?3) ON CONFLICT(key) DO UPDATE SET full_at = ?2, at = ?3";
pub(crate) const REMOVE_BUCKET: &str = "DELETE FROM limit_bucket WHERE key = ?1";
/// Buckets that are full leave nothing.
pub(crate) const REMOVE_FULL_BUCKETS: &str =
    "DELETE FROM limit_bucket WHERE key IN (SELECT key FROM limit_bucket WHERE full_at <= ?1 LIMIT 32)";
/// The instants of another boot mean nothing now. A bucket goes on as empty as its last write left it, so a reboot refills nothing.
pub(crate) const NEW_BOOT_BUCKETS: &str =
    "UPDATE limit_bucket SET full_at = ?1 + max(0, full_at - at), at = ?1";

/// The first revoke in a file creates this table.
pub(crate) const REVOKED_TABLE: &str =
    "CREATE TABLE IF NOT EXISTS revoked(attempt BLOB PRIMARY KEY, reason TEXT NOT NULL) WITHOUT ROWID";
/// Removes rows without a hold, which another boot left.
pub(crate) const SWEEP_REVOKED: &str = "DELETE FROM revoked WHERE attempt NOT IN (SELECT attempt FROM hold)";
pub(crate) const REVOKE: &str = "UPDATE hold SET status = 2 WHERE attempt = ?1";
pub(crate) const ADD_REVOKED: &str = "INSERT OR REPLACE INTO revoked VALUES(?1, ?2)";
pub(crate) const REVOKED: &str = "SELECT reason FROM revoked WHERE attempt = ?1";
pub(crate) const REMOVE_REVOKED: &str = "DELETE FROM revoked WHERE attempt = ?1";

macro_rules! hold_columns {
    () => {
        "h.attempt, h.names, h.owner, h.mode, h.fence, h.seq, h.granted, h.since, h.expires, h.ttl, h.lock_delay, \
         h.min_hold, h.status, h.host, h.holder, h.label, h.pid, h.start, h.namespace"
    };
}
/// Whether an attempt is known, or a name has a hold, a waiter or a lock-delay. If not, the store grants the lock at once.
pub(crate) const IN_USE: &str = "SELECT EXISTS(SELECT 1 FROM held_name WHERE name = ?2) \
     OR EXISTS(SELECT 1 FROM queue_entry WHERE name = ?2) OR EXISTS(SELECT 1 FROM delay WHERE name = ?2) \
     OR EXISTS(SELECT 1 FROM hold WHERE attempt = ?1) OR EXISTS(SELECT 1 FROM waiter WHERE attempt = ?1)";
/// Whether an attempt holds its locks, and its ticket if it waits.
pub(crate) const FIND_ATTEMPT: &str = "SELECT EXISTS(SELECT 1 FROM hold WHERE attempt = ?1), \
     (SELECT ticket FROM waiter WHERE attempt = ?1)";
pub(crate) const HOLD: &str = concat!("SELECT ", hold_columns!(), " FROM hold h WHERE attempt = ?1");
/// Oldest first, re-entrant holds beside each other: they share a fence, and fences only grow.
pub(crate) const HOLDS: &str = concat!(
    "SELECT ",
    hold_columns!(),
    " FROM held_name s JOIN hold h ON h.attempt = s.attempt WHERE s.name = ?1 ORDER BY s.fence, s.seq"
);
pub(crate) const HOLDS_DUE: &str =
    concat!("SELECT ", hold_columns!(), " FROM hold h WHERE expires <= ?1 ORDER BY expires LIMIT 32");
pub(crate) const NEXT_EXPIRY: &str = "SELECT min(expires) FROM hold";
pub(crate) const OWNER_HOLDS: &str = "SELECT EXISTS(SELECT 1 FROM hold WHERE owner = ?1)";
pub(crate) const ADD_HOLD: &str = "INSERT INTO hold VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, 0, \
     ?13, ?14, ?15, ?16, ?17, ?18)";
pub(crate) const ADD_HELD_NAME: &str = "INSERT INTO held_name VALUES(?1, ?2, ?3, ?4)";
pub(crate) const REMOVE_HOLD: &str = "DELETE FROM hold WHERE attempt = ?1";
pub(crate) const REMOVE_HELD_NAME: &str = "DELETE FROM held_name WHERE name = ?1 AND fence = ?2 AND seq = ?3";
pub(crate) const LINGER_HELD_NAME: &str =
    "UPDATE held_name SET attempt = ?4 WHERE name = ?1 AND fence = ?2 AND seq = ?3";
pub(crate) const RENEW: &str = "UPDATE hold SET expires = ?2 + ttl, pid = ?3, start = ?4, namespace = ?5 \
     WHERE attempt = ?1 AND expires > ?2 AND status = 0";
/// A lingering hold gets an attempt that no client knows: the old attempt must not renew or release it.
pub(crate) const LINGER: &str =
    "UPDATE hold SET attempt = ?2, owner = NULL, status = 1, expires = ?3 WHERE attempt = ?1";

macro_rules! waiter_columns {
    () => {
        "ticket, attempt, peer, names, owner, mode, until, since, ttl, lock_delay, min_hold, host, holder, label, \
         pid, start, namespace"
    };
}
pub(crate) const WAITER: &str = concat!("SELECT ", waiter_columns!(), " FROM waiter WHERE ticket = ?1");
pub(crate) const WAITERS_OF_PEER: &str =
    concat!("SELECT ", waiter_columns!(), " FROM waiter WHERE peer = ?1 ORDER BY ticket");
pub(crate) const WAITERS_OF_OWNER: &str =
    concat!("SELECT ", waiter_columns!(), " FROM waiter WHERE owner = ?1 ORDER BY ticket");
/// Waiters of this store whose owner holds a lock: re-entry may be possible at once.
pub(crate) const REENTRANT: &str = "SELECT DISTINCT w.ticket FROM hold h CROSS JOIN waiter w ON w.owner = h.owner \
     WHERE h.owner IS NOT NULL AND w.owner IS NOT NULL AND +w.peer = ?1 ORDER BY w.ticket";
pub(crate) const ADD_WAITER: &str = "INSERT INTO waiter VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, \
     ?13, ?14, ?15, ?16, ?17)";
pub(crate) const ADD_QUEUE_ENTRY: &str = "INSERT INTO queue_entry VALUES(?1, ?2, ?3, ?4)";
pub(crate) const REMOVE_WAITER: &str = "DELETE FROM waiter WHERE ticket = ?1";
pub(crate) const REMOVE_QUEUE_ENTRY: &str = "DELETE FROM queue_entry WHERE name = ?1 AND ticket = ?2";
pub(crate) const MOVE_WAITER: &str =
    "UPDATE waiter SET peer = ?2, pid = ?3, start = ?4, namespace = ?5 WHERE ticket = ?1";
pub(crate) const MOVE_QUEUE_ENTRY: &str = "UPDATE queue_entry SET peer = ?3 WHERE name = ?1 AND ticket = ?2";
/// A queue from its head.
pub(crate) const QUEUE: &str = "SELECT ticket, peer, until FROM queue_entry WHERE name = ?1 ORDER BY ticket";
pub(crate) const AHEAD: &str =
    "SELECT ticket FROM queue_entry WHERE name = ?1 AND ticket < ?2 ORDER BY ticket DESC";
pub(crate) const QUEUE_LENGTH: &str = "SELECT count(*) FROM queue_entry WHERE name = ?1";
pub(crate) const QUEUE_PEERS: &str = "SELECT DISTINCT peer FROM queue_entry WHERE name = ?1";
pub(crate) const QUEUE_SHOWN: &str = "SELECT w.host, w.holder, w.label, w.mode, w.since FROM queue_entry p JOIN waiter w ON w.ticket = p.ticket \
     WHERE p.name = ?1 ORDER BY p.ticket LIMIT ?2";

pub(crate) const DELAY: &str = "SELECT until FROM delay WHERE name = ?1";
pub(crate) const DELAYS_DUE: &str = "SELECT name FROM delay WHERE until <= ?1 LIMIT 32";
pub(crate) const SET_DELAY: &str = "INSERT INTO delay VALUES(?1, ?2) ON CONFLICT(name) \
     DO UPDATE SET until = max(until, excluded.until)";
pub(crate) const REMOVE_DELAY: &str = "DELETE FROM delay WHERE name = ?1";

/// The first name from a given one on that has a hold, a waiter or a lock-delay.
pub(crate) const NAME_FROM: &str = "SELECT min(n) FROM (SELECT min(name) AS n FROM held_name WHERE name >= ?1 \
     UNION ALL SELECT min(name) FROM queue_entry WHERE name >= ?1 UNION ALL SELECT min(name) FROM delay WHERE name >= ?1)";
pub(crate) const NAME_AFTER: &str = "SELECT min(n) FROM (SELECT min(name) AS n FROM held_name WHERE name > ?1 \
     UNION ALL SELECT min(name) FROM queue_entry WHERE name > ?1 UNION ALL SELECT min(name) FROM delay WHERE name > ?1)";

pub(crate) const RECORD: &str =
    "SELECT key, value, version FROM record WHERE key = ?1 AND (expires IS NULL OR expires > ?2)";
pub(crate) const RECORDS_FROM: &str = "SELECT key, value, version FROM record WHERE key >= ?1 AND (expires IS NULL OR expires > ?2) ORDER BY key";
pub(crate) const RECORDS_AFTER: &str = "SELECT key, value, version FROM record WHERE key > ?1 AND (expires IS NULL OR expires > ?2) ORDER BY key";
pub(crate) const PUT_RECORD: &str = "INSERT INTO record(key, value, version, ttl, expires) VALUES(?1, ?2, ?3, ?4, ?5) \
     ON CONFLICT(key) DO UPDATE SET value = ?2, version = ?3, ttl = ?4, expires = ?5";
pub(crate) const REMOVE_RECORD: &str = "DELETE FROM record WHERE key = ?1";
pub(crate) const REMOVE_OLD_RECORDS: &str =
    "DELETE FROM record WHERE id IN (SELECT id FROM record WHERE expires <= ?1 LIMIT 32)";

pub(crate) const ADD_EVENT: &str = "INSERT INTO event(at, name, kind, fence, reason, host, holder, label) \
     VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
pub(crate) const TRIM_EVENTS: &str = "DELETE FROM event WHERE id <= ?1";
pub(crate) const EVENT_RANGE: &str =
    "SELECT ifnull((SELECT min(id) FROM event), 1), ifnull((SELECT max(id) FROM event), 0)";
pub(crate) const EVENTS: &str = "SELECT id, at, name, kind, fence, reason, host, holder, label FROM event WHERE id > ?1 ORDER BY id LIMIT 1000";
pub(crate) const WATCHERS: &str = "SELECT peer FROM watcher";
pub(crate) const ADD_WATCHER: &str = "INSERT OR IGNORE INTO watcher VALUES(?1)";
pub(crate) const IS_WATCHER: &str = "SELECT 1 FROM watcher WHERE peer = ?1";
pub(crate) const REMOVE_WATCHER: &str = "DELETE FROM watcher WHERE peer = ?1";
