//! The state row: the counter of fences, versions and tickets, which outlives every lock, and the boot of its last writer.

use std::time::Duration;

use lockkeeper_core::{BootInstant, Result};
use rusqlite::{Connection, params};

use crate::codec::{self, QueueTicket, instant_nanos, signed};
use crate::error::{damaged, sql_error};
use crate::statements;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StateRow {
    /// The boot id of the last writer; empty if its container masks the boot id.
    pub boot: String,
    pub fence: u64,
    pub reserved: u64,
    pub ticket: QueueTicket,
    /// The time of the last write, up to [`PRECISION`] too early.
    pub written_at: BootInstant,
}

/// The precision of [`StateRow::written_at`]: a row that is younger need not be written again for its time alone.
pub(crate) const PRECISION: Duration = Duration::from_secs(1);

impl StateRow {
    /// Reads the row, and whether the file has watchers.
    pub fn read(sql: &Connection) -> Result<(StateRow, bool)> {
        let read = |row: &rusqlite::Row<'_>| {
            let number = |at| row.get::<_, i64>(at).map(i64::unsigned_abs);
            let written_at = BootInstant::from_nanos(number(4)?);
            let (fence, reserved) = (number(1)?, number(2)?);
            let state = StateRow { boot: row.get(0)?, fence, reserved, ticket: row.get(3)?, written_at };
            Ok((state, row.get(5)?))
        };
        let found = codec::one(sql, statements::STATE, [], read).map_err(sql_error)?;
        found.ok_or_else(|| damaged("the missing state row"))
    }

    pub fn write(&self, sql: &Connection, now: BootInstant) -> Result<()> {
        let StateRow { boot, fence, reserved, ticket, written_at } = self;
        let params =
            params![boot, signed(*fence), signed(*reserved), ticket, instant_nanos(now.max(*written_at))];
        statements::change(sql, statements::SAVE_STATE, params).map_err(sql_error)?;
        Ok(())
    }

    /// Whether another boot of the machine wrote the row. If one of the two processes has no boot id, only a clock that is
    /// before the last write proves that: a wrong guess would create a second holder. Without the proof, locks of another
    /// boot end with their ttl, which then counts from the last write.
    pub fn is_of_another_boot(&self, boot: Option<&str>, now: BootInstant) -> bool {
        match boot {
            Some(boot) if !self.boot.is_empty() => boot != self.boot,
            _ => now + PRECISION < self.written_at,
        }
    }
}
