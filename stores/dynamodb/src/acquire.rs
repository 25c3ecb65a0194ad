//! Acquiring a lock: one try, and then polling in no order until the lock is granted or the wait ends.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{AcquireOutcome, Busy, Error, Grant, LockRequest, Mode, Result, Wait};
use lockkeeper_host::sleep_until;
use lockkeeper_store_kit::{PendingRequest, PendingRequests};

use crate::admission::{AcquireTry, Evaluator, TryOutcome};
use crate::backoff::jitter;
use crate::cas::{CasDecision, LockTable, WorkingCopy};
use crate::codec::millis_up;
use crate::config::Options;
use crate::error::cancelled_error;
use crate::keys::attempt_hash;
use crate::own_leases::OwnLeases;
use crate::release::Releaser;

/// Acquires locks.
pub struct Acquirer {
    pub options: Options,
    pub locks: Arc<LockTable>,
    pub own_leases: Arc<OwnLeases>,
    pub pending: Arc<PendingRequests>,
    pub releaser: Arc<Releaser>,
}

impl Acquirer {
    pub async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        let clock = &*self.options.clock;
        let until = request.wait.deadline(clock.now());
        let pending = self.pending.begin(request.key.attempt);
        let attempt_hash = attempt_hash(&request.key.attempt);
        let mut call = AcquireTry { request, attempt_hash, until, waits: false };
        let busy = match self.try_acquire(&call).await? {
            Ok(grant) => return self.return_grant(&pending, grant).await,
            Err((busy, _)) if request.wait == Wait::No => busy,
            Err(first) => {
                call.waits = true;
                match self.wait(&call, &pending, first).await? {
                    Ok(grant) => return self.return_grant(&pending, grant).await,
                    Err(busy) => busy,
                }
            }
        };
        self.share_observation(request).await;
        Ok(AcquireOutcome::Busy(busy))
    }

    /// Returns a grant to the caller, or releases it if the request was cancelled meanwhile.
    async fn return_grant(&self, pending: &PendingRequest, grant: Grant) -> Result<AcquireOutcome> {
        if !pending.is_cancelled() {
            return Ok(AcquireOutcome::Granted(grant));
        }
        _ = self.releaser.release_holds(&grant.key).await;
        Err(cancelled_error())
    }

    async fn wait(
        &self,
        call: &AcquireTry<'_>,
        pending: &PendingRequest,
        (mut busy, mut lasts): (Busy, Duration),
    ) -> Result<Result<Grant, Busy>> {
        let clock = &*self.options.clock;
        let queue = self.locks.queues.get(call.request.key.names.first());
        let mut poller = None;
        let mut tried = false;
        loop {
            if poller.is_none() {
                tokio::select! {
                    permit = queue.become_poller() => poller = Some(permit),
                    () = pending.cancelled() => return Err(cancelled_error()),
                    () = sleep_until(clock, call.until) => {}
                }
                // The poller before this waiter has just been granted the lock or given up, so a new poller tries at once.
                lasts = if tried { lasts } else { Duration::ZERO };
            }
            if poller.is_some() && !lasts.is_zero() {
                let poll = self.options.poll / 2 + jitter(self.options.poll / 2);
                let at = clock.now() + poll.min(lasts + Duration::from_millis(1));
                tokio::select! {
                    () = queue.released() => {}
                    () = pending.cancelled() => return Err(cancelled_error()),
                    () = sleep_until(clock, at.min(call.until)) => {}
                }
            }
            tried = true;
            let last = clock.now() >= call.until;
            match self.try_acquire(call).await {
                Ok(Ok(grant)) => return Ok(Ok(grant)),
                Ok(Err(now)) => (busy, lasts) = now,
                // A waiter keeps waiting while DynamoDB is unreachable or throttles.
                Err(error @ (Error::Unavailable(_) | Error::Unknown(_) | Error::Limited(_)))
                    if !last && !pending.is_cancelled() =>
                {
                    tracing::debug!(%error, "a try failed; the waiter tries again after the poll interval");
                    lasts = self.options.poll;
                }
                Err(error) => return Err(error),
            }
            if pending.is_cancelled() {
                return Err(cancelled_error());
            }
            if last {
                self.clear_own_intent(call).await;
                return Ok(Err(busy));
            }
        }
    }

    async fn try_acquire(&self, call: &AcquireTry<'_>) -> Result<Result<Grant, (Busy, Duration)>> {
        let request = call.request;
        let evaluator =
            Evaluator { locks: &self.locks, own_leases: &self.own_leases, poll: self.options.poll };
        let decide = |copies: &mut [WorkingCopy]| evaluator.decide_acquire(call, copies);
        let (outcome, sent_at) = self.locks.update(&request.key.names, decide).await?;
        match outcome {
            TryOutcome::Busy(busy, lasts) => Ok(Err((busy, lasts))),
            TryOutcome::Granted { fence, mode, ttl } => {
                // The item stores whole milliseconds; the holder keeps the ttl of its request.
                let same = ttl == Duration::from_millis(millis_up(request.ttl));
                let ttl = if same { request.ttl } else { ttl };
                self.own_leases.record(&call.attempt_hash, sent_at, ttl);
                let key = request.key.clone();
                Ok(Ok(Grant { key, fence, mode, ttl, sent_at, lease: ttl }))
            }
        }
    }

    async fn clear_own_intent(&self, call: &AcquireTry<'_>) {
        if call.request.mode != Mode::Exclusive {
            return;
        }
        let clear = |copies: &mut [WorkingCopy]| {
            copies.iter_mut().for_each(|copy| copy.clear_intent(&call.attempt_hash));
            Ok(CasDecision::write_if_changed(copies, ()))
        };
        if let Err(error) = self.locks.update(&call.request.key.names, clear).await {
            tracing::debug!(%error, "an exclusive intent was not cleared; it expires by itself");
        }
    }

    /// Writes into the item what this process has observed, for the next process of this machine: a job that never waits
    /// would otherwise never observe a lock for long enough.
    async fn share_observation(&self, request: &LockRequest) {
        let share = |copies: &mut [WorkingCopy]| {
            let observer = self.locks.observer();
            copies.iter_mut().for_each(|copy| copy.dirty |= observer.share(&mut copy.item));
            Ok(CasDecision::write_if_changed(copies, ()))
        };
        if let Err(error) = self.locks.update(&request.key.names, share).await {
            tracing::debug!(%error, "an observation was not shared; the next process of this machine starts its own");
        }
    }
}
