//! A lock for a transaction: for work in the same database.

use lockkeeper_core::{Error, Fence, LockName, Result};
use tokio_postgres::Transaction;
use tokio_postgres::types::Type;

use crate::entry::{self, Shown};
use crate::fault::Failure;
use crate::link::first;
use crate::script::FENCE_INSIDE;
use crate::store::PostgresStore;

impl PostgresStore {
    /// Takes a lock for the rest of a transaction of yours, in the same database, and returns the fence that goes with
    /// it. The lock, what you write and the fence you write with it are committed together, or not at all; there is no
    /// lease to lose, and nothing to give back.
    ///
    /// It excludes other transactions that do the same, which it waits for (as long as your `lock_timeout` says), and
    /// whoever holds the lock by a lease.
    ///
    /// # Errors
    /// [`Error::Busy`] if somebody holds the lock by a lease, waits for it, or is kept from it; then nothing was taken, and the
    /// transaction can go on. [`Error::Invalid`] if the transaction is not READ COMMITTED. Any other error: the transaction
    /// cannot go on.
    pub async fn in_transaction(&self, tx: &Transaction<'_>, name: impl AsRef<str>) -> Result<Fence> {
        let name = LockName::new(name)?;
        let to = self.shared.options.door.to_string();
        let text = format!("SELECT {}.enter($1)", self.shared.options.schema);
        let rows = tx.query_typed(&text, &[(&name.as_str(), Type::TEXT)]).await;
        let rows = rows.map_err(|error| Error::from(Failure::of_request(&error, &to)))?;
        if let Some(way) = first::<Option<String>>(&rows, 0)? {
            return Err(Error::Busy(Box::new(Shown::read(&way)?.busy()?)));
        }
        // From our own connection: the counter must not be held up until your transaction ends. It is ours alone since we
        // are in, so it is higher than every one before.
        let rows = self.shared.link.rows(&FENCE_INSIDE, &[&name.as_str()]).await?;
        entry::fence(first(&rows, 0)?)
    }
}
