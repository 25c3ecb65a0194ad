//! The codec: rows as types of `core`, and back.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::admission::ActiveHold;
use lockkeeper_core::{
    Attempt, BootInstant, Event, EventKind, Fence, Grant, Holder, HolderView, LockName, LockRequest, Mode,
    Names, Owner, Record, RequestKey, Version, Wait, WaiterView, WallTime,
};
use lockkeeper_host::Process;
use rusqlite::types::Type;
use rusqlite::{Connection, Params, Row};

use crate::wake_pipe::Peer;

/// The position of a request in the queues of all its names: a smaller ticket came earlier.
pub(crate) type QueueTicket = i64;

type SqlResult<T> = rusqlite::Result<T>;

/// A row of `hold`: one grant.
#[derive(Clone, Debug)]
pub(crate) struct StoredHold {
    pub attempt: Attempt,
    pub names: Names,
    pub owner: Option<Owner>,
    pub mode: Mode,
    pub fence: Fence,
    /// Orders re-entrant holds, which share a fence: a smaller number came earlier.
    pub seq: QueueTicket,
    pub granted: BootInstant,
    pub since: WallTime,
    pub expires: BootInstant,
    pub ttl: Duration,
    pub lock_delay: Duration,
    pub min_hold: Duration,
    /// Released, and kept for the rest of its minimum hold.
    pub lingering: bool,
    /// An operator has revoked it; the reason is in the table `revoked`.
    pub revoked: bool,
    pub holder: Holder,
    pub process: Process,
}

impl StoredHold {
    pub fn read(row: &Row<'_>) -> SqlResult<Self> {
        Ok(StoredHold {
            attempt: Attempt::from_bytes(row.get(0)?),
            names: names_from(&row.get::<_, String>(1)?)?,
            owner: row.get::<_, Option<[u8; 16]>>(2)?.map(Owner::from_bytes),
            mode: mode_from(row.get(3)?),
            fence: checked(Fence::new(number(row.get(4)?)))?,
            seq: row.get(5)?,
            granted: BootInstant::from_nanos(number(row.get(6)?)),
            since: WallTime::from_micros(number(row.get(7)?)),
            expires: BootInstant::from_nanos(number(row.get(8)?)),
            ttl: Duration::from_nanos(number(row.get(9)?)),
            lock_delay: Duration::from_nanos(number(row.get(10)?)),
            min_hold: Duration::from_nanos(number(row.get(11)?)),
            lingering: row.get::<_, i64>(12)? == 1,
            revoked: row.get::<_, i64>(12)? == 2,
            holder: Holder { host: row.get(13)?, pid: row.get(14)?, label: row.get(15)? },
            process: process(row, 16)?,
        })
    }

    pub fn active_hold(&self) -> ActiveHold {
        ActiveHold { owner: self.owner, mode: self.mode, fence: self.fence }
    }

    pub fn grant(&self, sent_at: BootInstant) -> Grant {
        let key = RequestKey { attempt: self.attempt, names: self.names.clone() };
        Grant { key, fence: self.fence, mode: self.mode, ttl: self.ttl, sent_at, lease: self.ttl }
    }

    pub fn view(&self, now: BootInstant) -> HolderView {
        HolderView {
            holder: self.holder.clone(),
            fence: self.fence,
            mode: self.mode,
            since: self.since,
            expires_in_ms: millis(self.expires.since(now)),
            lingering: self.lingering,
            revoked: None,
        }
    }
}

/// A row of `waiter`: one request in the queue.
#[derive(Clone, Debug)]
pub(crate) struct StoredWaiter {
    pub ticket: QueueTicket,
    pub peer: Peer,
    pub request: LockRequest,
    /// The end of the wait.
    pub until: BootInstant,
    pub process: Process,
}

impl StoredWaiter {
    pub fn read(row: &Row<'_>) -> SqlResult<Self> {
        let attempt = Attempt::from_bytes(row.get(1)?);
        let holder = Holder { host: row.get(11)?, pid: row.get(12)?, label: row.get(13)? };
        let request = LockRequest {
            key: RequestKey { attempt, names: names_from(&row.get::<_, String>(3)?)? },
            owner: row.get::<_, Option<[u8; 16]>>(4)?.map(Owner::from_bytes),
            mode: mode_from(row.get(5)?),
            // The waiter's own process handles the end of the wait.
            wait: Wait::Forever,
            ttl: Duration::from_nanos(number(row.get(8)?)),
            lock_delay: Duration::from_nanos(number(row.get(9)?)),
            min_hold: Duration::from_nanos(number(row.get(10)?)),
            holder: Arc::new(holder),
        };
        let until = BootInstant::from_nanos(number(row.get(6)?));
        Ok(StoredWaiter {
            ticket: row.get(0)?,
            peer: row.get(2)?,
            request,
            until,
            process: process(row, 14)?,
        })
    }
}

pub(crate) fn waiter_view(row: &Row<'_>) -> SqlResult<WaiterView> {
    Ok(WaiterView {
        holder: Holder { host: row.get(0)?, pid: row.get(1)?, label: row.get(2)? },
        mode: mode_from(row.get(3)?),
        since: WallTime::from_micros(number(row.get(4)?)),
    })
}

pub(crate) fn record(row: &Row<'_>) -> SqlResult<Record> {
    let version = Version(number(row.get(2)?));
    Ok(Record { key: name(row, 0)?, value: row.get(1)?, version })
}

/// An event and its number.
pub(crate) fn event(row: &Row<'_>) -> SqlResult<(i64, Event)> {
    let fence = || checked(Fence::new(number(row.get(4)?)));
    let kind = match row.get::<_, String>(3)?.as_str() {
        "granted" => EventKind::Granted { fence: fence()? },
        "released" => EventKind::Released { fence: fence()? },
        "expired" => EventKind::Expired { fence: fence()? },
        "revoked" => EventKind::Revoked { fence: fence()?, reason: row.get(5)? },
        "broken" => EventKind::Broken { fence: fence()?, reason: row.get(5)? },
        "waiting" => EventKind::Waiting,
        "left" => EventKind::Left,
        _ => EventKind::Missed,
    };
    let holder = match row.get::<_, Option<String>>(6)? {
        Some(host) => Some(Holder { host, pid: row.get(7)?, label: row.get(8)? }),
        None => None,
    };
    let at = WallTime::from_micros(number(row.get(1)?));
    Ok((row.get(0)?, Event { at, name: name(row, 2)?, kind, holder }))
}

pub(crate) fn name(row: &Row<'_>, column: usize) -> SqlResult<LockName> {
    checked(LockName::new(row.get_ref(column)?.as_str()?))
}

/// No name contains a control character, so a line feed separates names.
pub(crate) fn names_text(names: &Names) -> String {
    names.iter().map(LockName::as_str).collect::<Vec<_>>().join("\n")
}

fn names_from(text: &str) -> SqlResult<Names> {
    let names: Result<Vec<_>, _> = text.split('\n').map(LockName::new).collect();
    checked(names.and_then(Names::new))
}

fn process(row: &Row<'_>, at: usize) -> SqlResult<Process> {
    Ok(Process { pid: row.get(at)?, start: number(row.get(at + 1)?), namespace: number(row.get(at + 2)?) })
}

fn mode_from(number: i64) -> Mode {
    match number {
        0 => Mode::Exclusive,
        n if n < 0 => Mode::Shared,
        n => Mode::Permit(u32::try_from(n).unwrap_or(u32::MAX)),
    }
}

pub(crate) fn mode_number(mode: Mode) -> i64 {
    match mode {
        Mode::Exclusive => 0,
        Mode::Shared => -1,
        Mode::Permit(n) => n.into(),
    }
}

fn number(n: i64) -> u64 {
    if n == i64::MAX { u64::MAX } else { u64::try_from(n).unwrap_or(0) }
}

/// SQLite's integers are signed; the largest one means never.
pub(crate) fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

pub(crate) fn instant_nanos(at: BootInstant) -> i64 {
    signed(at.as_nanos())
}

/// At most 70 years, so that the sum with an instant does not overflow.
pub(crate) fn duration_nanos(d: Duration) -> i64 {
    i64::try_from(d.as_nanos()).unwrap_or(i64::MAX).min(i64::MAX >> 2)
}

pub(crate) fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

fn checked<T>(found: lockkeeper_core::Result<T>) -> SqlResult<T> {
    found.map_err(|e| rusqlite::Error::FromSqlConversionFailure(0, Type::Text, Box::new(e)))
}

/// Reads all rows of a query.
pub(crate) fn all<T>(
    sql: &Connection,
    text: &str,
    params: impl Params,
    read: impl FnMut(&Row<'_>) -> SqlResult<T>,
) -> SqlResult<Vec<T>> {
    sql.prepare_cached(text)?.query_map(params, read)?.collect()
}

/// Reads the first row of a query, if it has one.
pub(crate) fn one<T>(
    sql: &Connection,
    text: &str,
    params: impl Params,
    read: impl FnOnce(&Row<'_>) -> SqlResult<T>,
) -> SqlResult<Option<T>> {
    let mut statement = sql.prepare_cached(text)?;
    let mut rows = statement.query(params)?;
    rows.next()?.map(read).transpose()
}
