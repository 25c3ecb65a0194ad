//! The request barrier: a node of the session that rejects late requests.
//!
//! A request that was sent on a broken connection may still be applied, even after its client has looked for it and
//! found nothing. It would then stay in the queue without a client. So each transaction that enqueues a request checks
//! the barrier node; and a client that has missed a reply replaces the barrier before it looks. A request that was not
//! applied by then never will be.

use std::sync::{Mutex, PoisonError};

use zookeeper_client as zk;

use crate::connection::Session;
use crate::error::Failure;
use crate::statements::{ANY, TxnOp, check, create_ephemeral, delete};
use crate::store::StoreInner;

/// The barrier of a session: how often it was replaced, and its node.
#[derive(Default)]
pub struct RequestBarrier {
    current: Mutex<(u64, String)>,
    /// One task replaces the barrier at a time. Tasks that waited meanwhile use the new one.
    replacing: tokio::sync::Mutex<()>,
}

impl RequestBarrier {
    fn current(&self) -> (u64, String) {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl StoreInner {
    /// The check that a transaction which enqueues a request contains.
    pub async fn barrier_check(&self, session: &Session) -> Result<TxnOp, Failure> {
        if session.barrier.current().0 == 0 {
            self.replace_barrier(session).await?;
        }
        Ok(check(session.barrier.current().1, ANY))
    }

    /// Replaces a barrier that was found missing, unless another task has done so already.
    pub async fn renew_barrier_if_current(&self, session: &Session, found: &TxnOp) -> Result<(), Failure> {
        let is_current = check(session.barrier.current().1, ANY).is_same_check(found);
        if is_current { self.replace_barrier(session).await } else { Ok(()) }
    }

    /// Rejects all requests that were sent with the current barrier and have not been applied. This is a write that a
    /// majority has to accept, so requests that were applied are visible afterwards.
    pub async fn replace_barrier(&self, session: &Session) -> Result<(), Failure> {
        let (before, _) = session.barrier.current();
        let _replacing = session.barrier.replacing.lock().await;
        let (count, mut old) = session.barrier.current();
        if count != before {
            return Ok(());
        }
        loop {
            let mut ops = vec![create_ephemeral(self.keys.barrier(session.id), Vec::new())];
            ops.extend((!old.is_empty()).then(|| delete(&old, ANY)));
            match session.multi(&ops).await {
                Ok(done) => {
                    let node = done.created().next().unwrap_or_default().to_owned();
                    *session.barrier.current.lock().unwrap_or_else(PoisonError::into_inner) =
                        (count + 1, node);
                    return Ok(());
                }
                Err(Failure::Rejected(0, zk::Error::NoNode)) => {
                    session.create_with_parents(&self.keys.barriers(), self.connection.acls()).await?;
                }
                // An administrator deleted the barrier, or the reply to an earlier replacement was lost: nothing
                // passes the old one.
                Err(Failure::Rejected(_, zk::Error::NoNode)) => old.clear(),
                Err(failure) => return Err(failure),
            }
        }
    }
}
