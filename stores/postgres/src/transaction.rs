//! A lock for the rest of a transaction of the user, for work in the same database.

use lockkeeper_core::{Error, Fence, LockName, Result};
use tokio_postgres::Transaction;
use tokio_postgres::types::Type;

use crate::codec::{self, ViewJson};
use crate::error::Failure;
use crate::session::first;
use crate::statements::FENCE_IN_TRANSACTION;
use crate::store::PostgresStore;

impl PostgresStore {
    /// Takes a lock for the rest of a transaction of yours, in the same database, and returns the fence that goes with
    /// it. The lock, what you write and the fence you write with it are committed together, or not at all; there is no
    /// lease to lose, and nothing to release.
    ///
    /// It excludes other transactions that do the same, for which it waits (as long as your `lock_timeout` allows), and
    /// holders by a lease.
    ///
    /// # Errors
    /// [`Error::Busy`] if the lock is held by a lease, has waiters or a lock-delay; then nothing was taken, and the
    /// transaction can go on. [`Error::Invalid`] if the transaction is not READ COMMITTED. Any other error: the transaction
    /// cannot go on.
    pub async fn in_transaction(&self, tx: &Transaction<'_>, name: impl AsRef<str>) -> Result<Fence> {
        let name = LockName::new(name)?;
        let server = self.parts.options.server.to_string();
        let text = format!("SELECT {}.lock_in_transaction($1)", self.parts.options.schema);
        let rows = tx.query_typed(&text, &[(&name.as_str(), Type::TEXT)]).await;
        let rows = rows.map_err(|error| Error::from(Failure::of_request(&error, &server)))?;
        if let Some(busy) = first::<Option<String>>(&rows, 0)? {
            return Err(Error::Busy(Box::new(ViewJson::parse(&busy)?.into_busy()?)));
        }
        // On the store's own connection: the counter must not be locked until the transaction ends. The transaction excludes
        // every other grant by now, so the fence is higher than all before.
        let rows = self.parts.connection.rows(&FENCE_IN_TRANSACTION, &[&name.as_str()]).await?;
        codec::fence(first(&rows, 0)?)
    }
}
