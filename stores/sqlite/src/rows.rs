//! Rows as the words of `core`, and back.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::rules::Stake;
use lockkeeper_core::{
    Ask, Attempt, Claim, Event, EventKind, Fence, Grant, Held, Holder, LockName, Mode, Moment, Names, Owner,
    Queued, Record, Version, Wait, Wall,
};
use lockkeeper_host::Process;
use rusqlite::types::Type;
use rusqlite::{Connection, Params, Row};

use crate::post::Peer;

/// The place of an ask in all its lines: smaller came earlier.
pub(crate) type Ticket = i64;

type Sql<T> = rusqlite::Result<T>;

/// One grant.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    pub attempt: Attempt,
    pub names: Names,
    pub owner: Option<Owner>,
    pub mode: Mode,
    pub fence: Fence,
    /// Tells re-entrant holds apart, which share a fence: smaller came earlier.
    pub turn: Ticket,
    pub granted: Moment,
    pub since: Wall,
    pub expires: Moment,
    pub ttl: Duration,
    pub lock_delay: Duration,
    pub min_hold: Duration,
    /// Released, and kept only for the rest of its minimum hold.
    pub lingering: bool,
    /// Its holder is to give it back; why is in the table of that name.
    pub revoked: bool,
    pub holder: Holder,
    pub process: Process,
}

impl Hold {
    pub fn read(row: &Row<'_>) -> Sql<Self> {
        Ok(Hold {
            attempt: Attempt::from_bytes(row.get(0)?),
            names: names_from(&row.get::<_, String>(1)?)?,
            owner: row.get::<_, Option<[u8; 16]>>(2)?.map(Owner::from_bytes),
            mode: mode_from(row.get(3)?),
            fence: sane(Fence::new(number(row.get(4)?)))?,
            turn: row.get(5)?,
            granted: Moment::from_nanos(number(row.get(6)?)),
            since: Wall::from_micros(number(row.get(7)?)),
            expires: Moment::from_nanos(number(row.get(8)?)),
            ttl: Duration::from_nanos(number(row.get(9)?)),
            lock_delay: Duration::from_nanos(number(row.get(10)?)),
            min_hold: Duration::from_nanos(number(row.get(11)?)),
            lingering: row.get::<_, i64>(12)? == 1,
            revoked: row.get::<_, i64>(12)? == 2,
            holder: Holder { host: row.get(13)?, pid: row.get(14)?, label: row.get(15)? },
            process: process(row, 16)?,
        })
    }

    pub fn stake(&self) -> Stake {
        Stake { owner: self.owner, mode: self.mode, fence: self.fence }
    }

    pub fn grant(&self, sent_at: Moment) -> Grant {
        let claim = Claim { attempt: self.attempt, names: self.names.clone() };
        Grant { claim, fence: self.fence, mode: self.mode, ttl: self.ttl, sent_at, lease: self.ttl }
    }

    pub fn view(&self, now: Moment) -> Held {
        Held {
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

/// One ask in line.
#[derive(Clone, Debug)]
pub(crate) struct Waiter {
    pub ticket: Ticket,
    pub peer: Peer,
    pub ask: Ask,
    /// When its patience ends.
    pub until: Moment,
    pub process: Process,
}

impl Waiter {
    pub fn read(row: &Row<'_>) -> Sql<Self> {
        let attempt = Attempt::from_bytes(row.get(1)?);
        let holder = Holder { host: row.get(11)?, pid: row.get(12)?, label: row.get(13)? };
        let ask = Ask {
            claim: Claim { attempt, names: names_from(&row.get::<_, String>(3)?)? },
            owner: row.get::<_, Option<[u8; 16]>>(4)?.map(Owner::from_bytes),
            mode: mode_from(row.get(5)?),
            // How long it waits is its own process's business.
            wait: Wait::Forever,
            ttl: Duration::from_nanos(number(row.get(8)?)),
            lock_delay: Duration::from_nanos(number(row.get(9)?)),
            min_hold: Duration::from_nanos(number(row.get(10)?)),
            holder: Arc::new(holder),
        };
        let until = Moment::from_nanos(number(row.get(6)?));
        Ok(Waiter { ticket: row.get(0)?, peer: row.get(2)?, ask, until, process: process(row, 14)? })
    }
}

pub(crate) fn queued(row: &Row<'_>) -> Sql<Queued> {
    Ok(Queued {
        holder: Holder { host: row.get(0)?, pid: row.get(1)?, label: row.get(2)? },
        mode: mode_from(row.get(3)?),
        since: Wall::from_micros(number(row.get(4)?)),
    })
}

pub(crate) fn record(row: &Row<'_>) -> Sql<Record> {
    let version = Version(number(row.get(2)?));
    Ok(Record { key: name(row, 0)?, value: row.get(1)?, version })
}

/// An event and its number.
pub(crate) fn event(row: &Row<'_>) -> Sql<(i64, Event)> {
    let fence = || sane(Fence::new(number(row.get(4)?)));
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
    let at = Wall::from_micros(number(row.get(1)?));
    Ok((row.get(0)?, Event { at, name: name(row, 2)?, kind, holder }))
}

pub(crate) fn name(row: &Row<'_>, column: usize) -> Sql<LockName> {
    sane(LockName::new(row.get_ref(column)?.as_str()?))
}

/// No name has a control character in it, so that none can look like two.
pub(crate) fn names_text(names: &Names) -> String {
    names.iter().map(LockName::as_str).collect::<Vec<_>>().join("\n")
}

fn names_from(text: &str) -> Sql<Names> {
    let names: Result<Vec<_>, _> = text.split('\n').map(LockName::new).collect();
    sane(names.and_then(Names::new))
}

fn process(row: &Row<'_>, at: usize) -> Sql<Process> {
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

/// SQLite's numbers have a sign; the largest one stands for never.
pub(crate) fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

pub(crate) fn moment(at: Moment) -> i64 {
    signed(at.as_nanos())
}

/// At most 70 years: a moment that far ahead can still be added to.
pub(crate) fn span(d: Duration) -> i64 {
    i64::try_from(d.as_nanos()).unwrap_or(i64::MAX).min(i64::MAX >> 2)
}

pub(crate) fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

fn sane<T>(found: lockkeeper_core::Result<T>) -> Sql<T> {
    found.map_err(|e| rusqlite::Error::FromSqlConversionFailure(0, Type::Text, Box::new(e)))
}

/// All rows of a query.
pub(crate) fn all<T>(
    sql: &Connection,
    text: &str,
    params: impl Params,
    read: impl FnMut(&Row<'_>) -> Sql<T>,
) -> Sql<Vec<T>> {
    sql.prepare_cached(text)?.query_map(params, read)?.collect()
}

/// The one row of a query, if it has one.
pub(crate) fn one<T>(
    sql: &Connection,
    text: &str,
    params: impl Params,
    read: impl FnOnce(&Row<'_>) -> Sql<T>,
) -> Sql<Option<T>> {
    let mut statement = sql.prepare_cached(text)?;
    let mut rows = statement.query(params)?;
    rows.next()?.map(read).transpose()
}
