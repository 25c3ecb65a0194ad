//! The request barrier: a node of the session that rejects late requests.
//!
//! A request that was sent on a broken connection may still be applied, even after its client has looked for it and
//! found nothing. It would then stay in the queue without a client. So each transaction that enqueues a request checks
//! the barrier node; and a client that has missed a reply replaces the barrier before it looks. A request that was not
//! applied by then never will be.

use std::sync::Arc;

use zookeeper_client as zk;

use crate::client::ZooKeeperClient;
use crate::error::Failure;
use crate::session::Session;
use crate::statements::{ANY, TxnOp, check, create_ephemeral, delete};

/// Checks and replaces the barriers of sessions.
pub struct RequestBarriers {
    pub client: Arc<ZooKeeperClient>,
}

impl RequestBarriers {
    /// The check that a transaction which enqueues a request contains.
    pub async fn check(&self, session: &Session) -> Result<TxnOp, Failure> {
        if session.barrier.current().0 == 0 {
            self.replace(session).await?;
        }
        Ok(check(session.barrier.current().1, ANY))
    }

    /// Replaces a barrier that was found missing, unless another task has done so already.
    pub async fn replace_if_current(&self, session: &Session, found: &TxnOp) -> Result<(), Failure> {
        let is_current = check(session.barrier.current().1, ANY).is_same_check(found);
        if is_current { self.replace(session).await } else { Ok(()) }
    }

    /// Rejects all requests that were sent with the current barrier and have not been applied. This is a write that a
    /// majority has to accept, so requests that were applied are visible afterwards.
    pub async fn replace(&self, session: &Session) -> Result<(), Failure> {
        let (before, _) = session.barrier.current();
        let _replacing = session.barrier.replacing.lock().await;
        let (count, mut old) = session.barrier.current();
        if count != before {
            return Ok(());
        }
        loop {
            let mut ops = vec![create_ephemeral(self.client.keys.barrier(session.id), Vec::new())];
            ops.extend((!old.is_empty()).then(|| delete(&old, ANY)));
            match session.multi(&ops).await {
                Ok(done) => {
                    let node = done.created().next().unwrap_or_default().to_owned();
                    session.barrier.set(count + 1, node);
                    return Ok(());
                }
                Err(Failure::Rejected(0, zk::Error::NoNode)) => {
                    session
                        .create_with_parents(&self.client.keys.barriers(), self.client.connection.acls())
                        .await?;
                }
                // An administrator deleted the barrier, or the reply to an earlier replacement was lost: nothing
                // passes the old one.
                Err(Failure::Rejected(_, zk::Error::NoNode)) => old.clear(),
                Err(failure) => return Err(failure),
            }
        }
    }
}
