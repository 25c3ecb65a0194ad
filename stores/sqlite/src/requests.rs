//! The requests that change the file: what a caller sends to the worker, and its result in a transaction.

use lockkeeper_core::{Error, LockRequest, ReleaseOutcome, RequestKey, Result};
use tokio::sync::oneshot;

use crate::acquire::AcquireReply;
use crate::transaction::{Tx, closed};
use crate::waiters::ReplySender;

pub(crate) enum WriteRequest {
    Acquire {
        request: LockRequest,
        reply: ReplySender,
    },
    Release {
        key: RequestKey,
        reply: oneshot::Sender<Result<ReleaseOutcome>>,
    },
    /// Removes a request from the queue, after a release that failed.
    Withdraw(RequestKey),
    /// Renew, break, revoke, and changes of records.
    Other(Box<dyn WriteTask>),
}

/// A change that needs nothing from the worker after the commit but its reply.
pub(crate) trait WriteTask: Send {
    /// Runs again if the transaction was rolled back.
    fn run(&mut self, tx: &mut Tx<'_>) -> Result<()>;
    fn reply(self: Box<Self>, end: Result<()>);
}

struct WriteClosure<T, W> {
    work: W,
    done: Option<T>,
    reply: oneshot::Sender<Result<T>>,
}

impl<T: Send, W: FnMut(&mut Tx<'_>) -> Result<T> + Send> WriteTask for WriteClosure<T, W> {
    fn run(&mut self, tx: &mut Tx<'_>) -> Result<()> {
        self.done = Some((self.work)(tx)?);
        Ok(())
    }

    fn reply(self: Box<Self>, end: Result<()>) {
        let WriteClosure { done, reply, .. } = *self;
        let _ = reply.send(end.and_then(|()| done.ok_or_else(closed)));
    }
}

/// The result of a request in a transaction that has not been committed yet.
pub(crate) enum WriteResult {
    Acquired(Result<AcquireReply>),
    Released(ReleaseOutcome),
    Done,
}

impl WriteRequest {
    /// Whether its commit has to be on the disk before any other process sees it: another process may report a record to its
    /// caller. A lock that another process sees too early costs nothing but a wait.
    pub fn syncs_in_commit(&self) -> bool {
        matches!(self, WriteRequest::Other(_))
    }

    pub fn other<T: Send + 'static>(
        work: impl FnMut(&mut Tx<'_>) -> Result<T> + Send + 'static,
        reply: oneshot::Sender<Result<T>>,
    ) -> Self {
        WriteRequest::Other(Box::new(WriteClosure { work, done: None, reply }))
    }

    pub fn run(&mut self, tx: &mut Tx<'_>) -> Result<WriteResult> {
        match self {
            WriteRequest::Acquire { request, .. } => match tx.acquire(request) {
                // These errors are answers: the request changed nothing, so the transaction goes on.
                Err(error @ (Error::Deadlock(_) | Error::Limited(_))) => {
                    Ok(WriteResult::Acquired(Err(error)))
                }
                other => Ok(WriteResult::Acquired(Ok(other?))),
            },
            WriteRequest::Release { key, .. } => tx.release(key).map(WriteResult::Released),
            WriteRequest::Withdraw(key) => tx.withdraw(key).map(|()| WriteResult::Done),
            WriteRequest::Other(task) => task.run(tx).map(|()| WriteResult::Done),
        }
    }
}
