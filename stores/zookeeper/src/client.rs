//! The access to ZooKeeper that all parts of the store share, and what follows every write.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::LockName;
use lockkeeper_host::Clock;

use crate::batch::{self, BatchQueue, BatchSender};
use crate::config::Options;
use crate::connection::Connection;
use crate::error::Failure;
use crate::keys::Keys;
use crate::session::{MultiReply, Session};
use crate::statements::{ANY, TxnOp};

/// How long event nodes are kept.
const KEEP_EVENTS: Duration = Duration::from_secs(30);

/// The keys, the clock, and the two ways to send a transaction: alone, or in a batch with those of other tasks.
pub struct ZooKeeperClient {
    pub keys: Keys,
    pub clock: Arc<dyn Clock>,
    pub connection: Connection,
    pub batch: BatchSender,
}

impl ZooKeeperClient {
    /// The client, and the queue of its batches.
    pub fn new(options: &Options) -> (Arc<Self>, BatchQueue) {
        let (batch, batch_queue) = batch::channel();
        let (keys, connection) = (Keys::new(&options.base), Connection::new(options));
        (Arc::new(ZooKeeperClient { keys, clock: options.clock.clone(), connection, batch }), batch_queue)
    }

    /// Sends a transaction, and does what follows every write.
    pub async fn write(self: &Arc<Self>, session: &Session, ops: &[TxnOp]) -> Result<MultiReply, Failure> {
        let done = session.multi(ops).await?;
        self.after_write(&done);
        Ok(done)
    }

    /// The same in a batch. `grants`: the names that the transaction grants.
    pub async fn write_batched(
        self: &Arc<Self>,
        session: &Arc<Session>,
        ops: Vec<TxnOp>,
        grants: &[LockName],
    ) -> Result<MultiReply, Failure> {
        let done = self.batch.send(session, ops, grants).await?;
        self.after_write(&done);
        Ok(done)
    }

    fn after_write(self: &Arc<Self>, done: &MultiReply) {
        if let Some(stat) = done.stat() {
            self.connection.observe_time(stat.mtime);
        }
        self.delete_events_later(done);
    }

    /// Makes the connected server catch up by a write, which a majority has to accept: it may not know the latest
    /// writes yet.
    pub async fn sync_by_write(&self, session: &Session) -> Result<(), Failure> {
        Failure::if_exists(session.set(&self.keys.bases(), b"", ANY).await).map(drop)
    }

    /// Deletes the event nodes of a transaction after a while.
    fn delete_events_later(self: &Arc<Self>, done: &MultiReply) {
        let events = self.keys.events();
        let paths: Vec<String> =
            done.created().filter(|path| path.starts_with(&events)).map(str::to_owned).collect();
        if paths.is_empty() {
            return;
        }
        let client = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(KEEP_EVENTS).await;
            let Ok(session) = client.connection.session().await else { return };
            for path in paths {
                _ = session.delete(&path).await;
            }
        });
    }

    /// Creates the root node.
    pub async fn create_root(&self, session: &Session) -> Result<(), Failure> {
        session.create_with_parents(self.keys.root(), self.connection.acls()).await
    }

    /// A lower bound of the ensemble's clock, in milliseconds.
    pub async fn ensemble_time(&self, session: &Session) -> Result<u64, Failure> {
        if self.connection.known_ensemble_time().is_none() {
            let stat = session.set(&self.keys.bases(), b"", ANY).await?;
            self.connection.observe_time(stat.mtime);
        }
        Ok(self.connection.known_ensemble_time().unwrap_or(0))
    }
}
