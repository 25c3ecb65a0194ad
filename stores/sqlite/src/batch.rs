//! One batch: the requests of many callers in one transaction, so that one sync of the log serves all of them.

use lockkeeper_core::{AcquireOutcome, Error, RequestKey, Result};

use crate::acquire::AcquireReply;
use crate::requests::{WriteRequest, WriteResult};
use crate::transaction::PostCommit;
use crate::waiters::LocalWaiter;
use crate::worker::Worker;

impl Worker {
    /// Runs all requests in one transaction, and answers their callers. If a request fails, the worker answers it with the
    /// error and runs the others without it.
    pub fn run_batch(&mut self, mut requests: Vec<WriteRequest>) {
        while !requests.is_empty() {
            let durable = requests.iter().any(|request| self.waits_for_disk(request));
            let mut failed = None;
            let done = self.commit(durable, |tx| {
                let each = requests
                    .iter_mut()
                    .enumerate()
                    .map(|(i, request)| request.run(tx).inspect_err(|_| failed = Some(i)));
                each.collect::<Result<Vec<WriteResult>>>()
            });
            match (done, failed) {
                (Ok((results, after)), _) => return self.reply_to_batch(requests, results, after),
                (Err(error), Some(i)) => self.fail(requests.remove(i), error),
                (Err(error), None) => {
                    return requests.into_iter().for_each(|request| self.fail(request, error.clone()));
                }
            }
        }
    }

    /// Whether the commit of a request most likely has to wait for the disk. A release without a waiter need not: the next
    /// grant syncs the log, and the release is in the log before that grant. A power cut can only undo a release that no
    /// grant has followed.
    fn waits_for_disk(&self, request: &WriteRequest) -> bool {
        let has_waiters = |key: &RequestKey| key.names.iter().any(|name| self.waiters.first(name).is_some());
        match request {
            WriteRequest::Acquire { request, .. } => !has_waiters(&request.key),
            WriteRequest::Release { key, .. } => has_waiters(key),
            WriteRequest::Withdraw(_) => false,
            WriteRequest::Other(_) => true,
        }
    }

    fn reply_to_batch(&mut self, requests: Vec<WriteRequest>, results: Vec<WriteResult>, after: PostCommit) {
        let mut enqueued = Vec::new();
        let count = requests.len();
        for (request, result) in requests.into_iter().zip(results) {
            match (request, result) {
                (
                    WriteRequest::Acquire { request, reply },
                    WriteResult::Acquired(Ok(AcquireReply::Waiting(ticket, until))),
                ) => {
                    // Before any other transaction: a queue entry without a waiter here counts as abandoned.
                    self.waiters.add(ticket, LocalWaiter { request, until, reply });
                    enqueued.push(ticket);
                }
                (
                    WriteRequest::Acquire { reply, .. },
                    WriteResult::Acquired(Ok(AcquireReply::Granted(grant))),
                ) => {
                    self.reply_to_acquire(reply, Ok(AcquireOutcome::Granted(grant)));
                }
                (
                    WriteRequest::Acquire { reply, .. },
                    WriteResult::Acquired(Ok(AcquireReply::Busy(busy))),
                ) => {
                    let _ = reply.send(Ok(AcquireOutcome::Busy(busy)));
                }
                (WriteRequest::Acquire { reply, .. }, WriteResult::Acquired(Err(error))) => {
                    drop(reply.send(Err(error)))
                }
                (WriteRequest::Release { key, reply }, WriteResult::Released(release)) => {
                    self.forget_request(&key);
                    let _ = reply.send(Ok(release));
                }
                (WriteRequest::Other(task), _) => task.reply(Ok(())),
                _ => {}
            }
        }
        self.answered = count - enqueued.len();
        self.finish_commit(after);
        self.watch_for(&enqueued);
    }

    fn fail(&mut self, request: WriteRequest, error: Error) {
        match request {
            WriteRequest::Acquire { reply, .. } => drop(reply.send(Err(error))),
            WriteRequest::Release { key, reply } => {
                self.forget_request(&key);
                self.withdraw_later(key);
                let _ = reply.send(Err(error));
            }
            WriteRequest::Withdraw(key) => self.withdraw_later(key),
            WriteRequest::Other(task) => task.reply(Err(error)),
        }
    }
}
