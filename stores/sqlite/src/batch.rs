//! One batch: the requests of many callers in one transaction, so that one sync of the log serves all of them.

use lockkeeper_core::{AcquireOutcome, Error, Result};

use crate::acquire::AcquireReply;
use crate::requests::{WriteRequest, WriteResult};
use crate::transaction::PostCommit;
use crate::waiters::LocalWaiter;
use crate::worker::{BegunWrite, Worker};

impl Worker {
    /// Runs all requests in one transaction, and answers their callers. If a request fails, the worker answers it with the
    /// error and runs the others without it.
    pub fn run_batch(&mut self, mut requests: Vec<WriteRequest>) {
        while !requests.is_empty() {
            let sync_in_commit = requests.iter().any(WriteRequest::syncs_in_commit);
            match self.begin_write(sync_in_commit) {
                Ok(begun) => requests = self.run_requests(begun, requests),
                Err(error) => {
                    return requests.into_iter().for_each(|request| self.fail(request, error.clone()));
                }
            }
        }
    }

    /// Runs all requests in the transaction that has begun, and returns those that have to run again because another one has
    /// failed.
    pub fn run_requests(&mut self, begun: BegunWrite, mut requests: Vec<WriteRequest>) -> Vec<WriteRequest> {
        let mut failed = None;
        let done = self.finish_write(begun, |tx| {
            let each = requests
                .iter_mut()
                .enumerate()
                .map(|(i, request)| request.run(tx).inspect_err(|_| failed = Some(i)));
            each.collect::<Result<Vec<WriteResult>>>()
        });
        match (done, failed) {
            (Ok((results, after)), _) => self.reply_to_batch(requests, results, after),
            (Err(error), Some(i)) => {
                self.fail(requests.remove(i), error);
                return requests;
            }
            (Err(error), None) => {
                requests.into_iter().for_each(|request| self.fail(request, error.clone()));
            }
        }
        Vec::new()
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
                    self.own_grants.remove(&key.attempt);
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
