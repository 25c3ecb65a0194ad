//! Makes the connected server catch up before a read whose result must be current.
//!
//! `sync` is not enough: a leader answers it without applying the commits that it has already sent to its followers, so
//! a client of the leader read the state before a write that a follower had confirmed to another client. A write passes
//! all of them. All reads of a process that wait at the same time share one write.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use lockkeeper_core::IgnorePoison;

use crate::error::Failure;
use crate::session::Session;
use crate::statements::ANY;

/// The newest write that reads wait for.
pub struct CatchUp {
    /// The node that is written.
    node: String,
    newest: Mutex<Option<SharedWrite>>,
}

struct SharedWrite {
    session: i64,
    /// The write was sent: a read that comes later needs another one.
    sent: Arc<AtomicBool>,
    write: Shared<BoxFuture<'static, Result<(), Failure>>>,
}

impl CatchUp {
    pub fn new(node: String) -> Self {
        CatchUp { node, newest: Mutex::default() }
    }

    /// After this, reads of the session return every write that the servers had confirmed before the call.
    pub async fn catch_up(&self, session: &Arc<Session>) -> Result<(), Failure> {
        let write = {
            let mut newest = self.newest.lock().ignore_poison();
            match &*newest {
                Some(open) if open.session == session.id && !open.sent.load(Ordering::Acquire) => {
                    open.write.clone()
                }
                earlier => {
                    // One write at a time, so that the reads that come meanwhile share the next one.
                    let earlier = earlier.as_ref().map(|earlier| earlier.write.clone());
                    let next = SharedWrite::new(session.clone(), self.node.clone(), earlier);
                    newest.insert(next).write.clone()
                }
            }
        };
        write.await
    }
}

impl SharedWrite {
    fn new(
        session: Arc<Session>,
        node: String,
        earlier: Option<Shared<BoxFuture<'static, Result<(), Failure>>>>,
    ) -> SharedWrite {
        let (id, sent) = (session.id, Arc::new(AtomicBool::new(false)));
        let sending = sent.clone();
        let write = async move {
            if let Some(earlier) = earlier {
                // Its outcome is that of the reads that share it.
                _ = earlier.await;
            }
            sending.store(true, Ordering::Release);
            match Failure::if_exists(session.set(&node, b"", ANY).await) {
                // The servers agree on a rejection as on a write, so the account of a reader is enough.
                Err(failure) if failure.is(&zookeeper_client::Error::NoAuth) => Ok(()),
                written => written.map(drop),
            }
        };
        SharedWrite { session: id, sent, write: write.boxed().shared() }
    }
}
