//! The guard row of PostgreSQL as SQL text, for any client: sqlx, diesel, sea-orm, or a driver in another language.
//!
//! It needs no feature of this crate and brings no dependency. Run [`APPLY`] inside your own transaction, then give the number that it
//! returns to [`check`]:
//!
//! ```
//! use lockkeeper_fenced::{Fence, sql};
//!
//! assert!(sql::APPLY.contains("VALUES ($1, $2)"));        // $1 text: the resource; $2 bigint: the fence
//! let mark = 9;                                           // bigint: the one column of the one row that comes back
//! assert!(sql::check(Fence::new(9)?, mark).is_ok());      // go on, and commit
//! assert!(sql::check(Fence::new(7)?, mark).is_err());     // Error::Stale: roll back
//! # Ok::<(), lockkeeper_fenced::Error>(())
//! ```

use crate::{Error, Fence, Result, fence, verdict};

/// Makes the table `lockkeeper_fence` if it is missing. Half of each page is left free, so that raising a mark changes no index.
pub const CREATE: &str = "CREATE TABLE IF NOT EXISTS lockkeeper_fence \
    (resource text COLLATE \"C\" PRIMARY KEY, fence bigint NOT NULL, value bytea) WITH (fillfactor = 50)";

/// Raises the mark of a resource in the table `lockkeeper_fence`, and returns the mark: the higher one of the two fences.
///
/// `$1` is the resource (`text`), `$2` the fence (`bigint`, from [`parameter`]). One row with one `bigint` comes back: give it to
/// [`check`]. Run it in the transaction in which you write. Other writers to the resource wait until that transaction ends.
pub const APPLY: &str = "INSERT INTO lockkeeper_fence AS f (resource, fence) VALUES ($1, $2) \
    ON CONFLICT (resource) DO UPDATE SET fence = greatest(f.fence, excluded.fence) RETURNING f.fence";

/// The name in [`CREATE`] and [`APPLY`].
const TABLE: &str = "lockkeeper_fence";

/// The same two statements for a table with another name, or in a schema that is named.
///
/// [`FenceTable::default`] is `lockkeeper_fence`, in the first schema of the `search_path` that has it. It is the table that
/// `postgres::Fences` uses too: programs with different clients guard the same resources together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FenceTable {
    table: String,
    apply: String,
}

impl Default for FenceTable {
    fn default() -> Self {
        FenceTable::new(TABLE).expect("a good name")
    }
}

impl FenceTable {
    /// The guard rows in this table: `name`, or `schema.name`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it cannot be the name of a table.
    pub fn new(table: &str) -> Result<Self> {
        let parts: Vec<&str> = table.split('.').collect();
        if parts.len() > 2
            || parts.iter().any(|part| part.is_empty() || part.len() > 63 || part.contains('\0'))
        {
            return Err(Error::invalid(format!("{table:?} is no name of a table: NAME or SCHEMA.NAME")));
        }
        let quoted: Vec<String> =
            parts.iter().map(|part| format!("\"{}\"", part.replace('"', "\"\""))).collect();
        let table = quoted.join(".");
        Ok(FenceTable { apply: APPLY.replacen(TABLE, &table, 1), table })
    }

    /// The name of the table, quoted for SQL.
    pub fn name(&self) -> &str {
        &self.table
    }

    /// [`CREATE`] for this table.
    pub fn create_sql(&self) -> String {
        CREATE.replacen(TABLE, &self.table, 1)
    }

    /// [`APPLY`] for this table.
    pub fn apply_sql(&self) -> &str {
        &self.apply
    }
}

/// The fence as the `bigint` that [`APPLY`] takes.
pub fn parameter(fence: Fence) -> i64 {
    i64::try_from(fence.get()).expect("fences are below 2^53")
}

/// Compares the fence of a writer with the mark that [`APPLY`] returned.
///
/// # Errors
/// [`Error::Stale`] if a higher fence was seen: roll back. [`Error::Invalid`] if the mark is no fence: another program has written it.
pub fn check(presented: Fence, mark: i64) -> Result<()> {
    verdict("sql", presented, fence(mark)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_decides() {
        let seven = Fence::new(7).unwrap();
        assert!(check(seven, parameter(seven)).is_ok(), "the same fence again");
        assert!(check(seven, 6).is_ok());
        assert!(matches!(check(seven, 8), Err(Error::Stale { seen, .. }) if seen.get() == 8));
        for damaged in [0, -1, i64::MIN, i64::MAX] {
            assert!(matches!(check(seven, damaged), Err(Error::Invalid(_))), "{damaged}");
        }
    }
}
