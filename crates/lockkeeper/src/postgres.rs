//! Operations that only the PostgreSQL store has: a lock for a transaction of the caller, and conditional
//! writes without a lock.

use std::sync::Arc;

use lockkeeper_core::{Error, Fence, Result};
use lockkeeper_host::Clock;
pub use lockkeeper_postgres::{
    Options, PostgresStore, Tls, connect_to, plain, tokio_postgres, wait_for_cancellations,
};

use crate::Lockkeeper;
use crate::keeper::KeeperState;

pub(crate) fn is(url: &str) -> bool {
    matches!(url.split_once(':'), Some(("postgres" | "postgresql", _)))
}

pub(crate) async fn open(url: &str, clock: Arc<dyn Clock>) -> Result<PostgresStore> {
    let mut options = Options::from_url(url)?;
    options.clock = clock;
    PostgresStore::open(options).await
}

impl Lockkeeper {
    /// A keeper of a PostgreSQL store that is open already; all deadlines are measured on `clock`.
    pub fn with_postgres(store: PostgresStore, clock: Arc<dyn Clock>) -> Self {
        let mut inner = KeeperState::new(Arc::new(store.clone()), clock);
        inner.postgres = Some(store);
        Lockkeeper(Arc::new(inner))
    }

    /// Takes a lock for the rest of a transaction of the caller in the same database: see
    /// [`PostgresStore::in_transaction`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the store is another one; the others as there.
    pub async fn in_transaction(
        &self,
        tx: &tokio_postgres::Transaction<'_>,
        name: impl AsRef<str>,
    ) -> Result<Fence> {
        match &self.0.postgres {
            Some(store) => store.in_transaction(tx, name).await,
            None => Err(Error::Unsupported(format!(
                "the {} store has no transactions: postgres://HOST/DATABASE has",
                self.profile().store
            ))),
        }
    }
}
