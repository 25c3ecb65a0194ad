//! Acquires a lock, and waits in its queue for as long as the request allows.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::lease::LossReason;
use lockkeeper_core::{
    AcquireOutcome, BootInstant, Busy, Error, Fence, Grant, LockName, LockRequest, LockView, Result, Wait,
};
use lockkeeper_host::sleep_until;
use lockkeeper_store_kit::PendingRequest;
use redis::Value;

use crate::batch::{BatchSender, HELD_BEFORE, KeepFlag};
use crate::codec::{self, AcquireStage, holders, stored_holds};
use crate::error::{Failure, unexpected_reply};
use crate::keys::KeyGroup;
use crate::runner::ScriptRunner;
use crate::statements::millis;
use crate::unknown::{UnansweredRelease, UnknownOutcomes};
use crate::waiters::{HandOffOutcome, QueuedAt, WaiterHandle, Waiters};

/// The reply of the acquire script.
pub(crate) enum AcquireReply {
    Granted(Fence),
    Busy(Busy),
    /// The request is in the queue: the highest fence at that time, and how long the holder in the way lasts without a renewal.
    Queued(u64, Option<Duration>),
    /// The script rejected the request. A queue entry that it has from before may be there still: a script that cannot read a hold changes
    /// nothing.
    Rejected(Error),
}

/// One acquire call, or its part in one group.
#[derive(Clone, Copy)]
pub(crate) struct AcquireCall<'a> {
    pub request: &'a LockRequest,
    /// The names of the same grant in other groups.
    pub others: &'a [LockName],
    /// Tells the call of a release: the release refuses every request that the call sent before, so the call sends no more.
    pub pending: &'a PendingRequest,
}

/// The error of a call whose attempt was released before the call had an answer.
pub(crate) fn released() -> Error {
    Error::Unknown("the request was released meanwhile".into())
}

/// Acquires locks of one group. Clones share the store's state.
#[derive(Clone)]
pub(crate) struct Acquirer {
    pub runner: Arc<ScriptRunner>,
    pub requests: BatchSender,
    pub waiters: Arc<Waiters>,
    pub unknown: Arc<UnknownOutcomes>,
}

impl Acquirer {
    /// Acquires names of one group and waits in the queue for as long as the request allows.
    pub(crate) async fn acquire_in_group(
        &self,
        group: KeyGroup,
        call: AcquireCall<'_>,
    ) -> Result<AcquireOutcome> {
        let request = call.request;
        let clock = &*self.runner.options.clock;
        let until = request.wait.deadline(clock.now());
        let mut waiter =
            (request.wait != Wait::No).then(|| self.waiters.join(request.key.attempt.to_hex(), request.ttl));
        let keys: Vec<String> =
            request.key.names.iter().map(|name| self.runner.keys.lock_key(name)).collect();
        // Whether the request is in the queue, and the highest fence when the server last said so.
        let (mut queued, mut queued_at) = (false, 0);
        let mut hand_off = None;
        loop {
            let waits = waiter.is_some() && clock.now() < until;
            let mut lease = request.ttl;
            let mut by_message = false;
            let (sent_at, answer) = match hand_off.take() {
                // If the task wakes so late that the lease of the hand-off may be nearly over, it sends the request again.
                Some(HandOffOutcome::Granted { sent_at, lease: first, fence })
                    if clock.now() < sent_at + first / 2 =>
                {
                    (lease, by_message) = (first, true);
                    self.runner.raise_fence_seen(fence.get());
                    (sent_at, Ok(AcquireReply::Granted(fence)))
                }
                Some(HandOffOutcome::Replied(sent_at, answer)) => {
                    (sent_at, self.decode_reply(group, request, answer))
                }
                _ => {
                    if let Some(waiter) = &waiter {
                        waiter.begin_request();
                    }
                    let stage = if waits { AcquireStage::Enqueue } else { AcquireStage::TryOnce };
                    (clock.now(), self.send_request(group, &keys, call, stage, None).await)
                }
            };
            if answer.is_err() && call.pending.is_cancelled() {
                return Err(released());
            }
            let ends = match answer {
                Ok(AcquireReply::Granted(fence)) => {
                    if let Some(waiter) = &waiter {
                        waiter.keep(by_message && !request.min_hold.is_zero());
                    }
                    let (key, mode, ttl) = (request.key.clone(), request.mode, request.ttl);
                    return Ok(AcquireOutcome::Granted(Grant { key, fence, mode, ttl, sent_at, lease }));
                }
                Ok(AcquireReply::Busy(busy)) => return Ok(AcquireOutcome::Busy(busy)),
                Ok(AcquireReply::Rejected(error)) => {
                    if queued {
                        self.schedule_release(group, request, Some(queued_at));
                    }
                    return Err(error);
                }
                Ok(AcquireReply::Queued(fence, ends)) => {
                    queued_at = fence;
                    Some((QueuedAt { sent_at, fence }, ends))
                }
                // The waiter goes on waiting while the server is unreachable, because its queue entry may be kept.
                Err(error @ (Error::Unavailable(_) | Error::Unknown(_))) if queued && waits => {
                    tracing::debug!(%error, "no reply for a waiter; it keeps its queue entry and sends the request again");
                    self.runner.router.pause(self.runner.options.poll).await;
                    None
                }
                // The queue entry may be there still: the store removes it, unless the caller acquires again.
                Err(error) if queued => {
                    self.schedule_release(group, request, Some(queued_at));
                    return Err(Error::Unknown(format!("the request was in the queue: {error}")));
                }
                Err(error @ Error::Unknown(_)) if waits => {
                    self.schedule_release(group, request, None);
                    return Err(error);
                }
                Err(error) => return Err(error),
            };
            queued = true;
            let Some(waiter) = &mut waiter else { return Err(unexpected_reply()) };
            if let Some((since, ends)) = ends {
                let confirm = self.request_args(&keys, call, AcquireStage::Confirm, None)?;
                waiter.enter_queue(group, &keys, confirm, since, ends);
                self.wait_for_wake(waiter, call, until).await;
                hand_off = waiter.take_outcome();
            }
        }
    }

    async fn wait_for_wake(&self, waiter: &WaiterHandle<'_>, call: AcquireCall<'_>, until: BootInstant) {
        let clock = &*self.runner.options.clock;
        // An owner may re-enter past the queue once it holds the lock by another request, and no message reports that.
        let retry = if call.request.owner.is_some() {
            clock.now() + self.runner.options.poll
        } else {
            BootInstant::NEVER
        };
        tokio::select! {
            () = waiter.woken() => {}
            () = call.pending.cancelled() => {}
            () = sleep_until(clock, until.min(retry)) => {}
        }
        // Wait for the confirmation in flight: a second request would start the lease again without a caller.
        while waiter.is_confirming() {
            waiter.woken().await;
        }
    }

    /// Sends the request once. `raise`: the fence to which the script raises a hold that the attempt has already.
    pub(crate) async fn send_request(
        &self,
        group: KeyGroup,
        keys: &[String],
        call: AcquireCall<'_>,
        stage: AcquireStage,
        raise: Option<Fence>,
    ) -> Result<AcquireReply> {
        let args = self.request_args(keys, call, stage, raise)?;
        let answer = self.requests.send(group, keys.to_vec(), args, KeepFlag::default()).await;
        self.decode_reply(group, call.request, answer)
    }

    /// The arguments of the acquire script for one request, or an error if the call was cancelled.
    fn request_args(
        &self,
        keys: &[String],
        AcquireCall { request, others, pending }: AcquireCall<'_>,
        stage: AcquireStage,
        raise: Option<Fence>,
    ) -> Result<Vec<Vec<u8>>> {
        let lives = millis(request.ttl + request.lock_delay).to_string();
        let attempt = request.key.attempt.to_hex();
        let generation = self.unknown.generation(&attempt);
        // In this order: a release cancels the call before it ends the generation, so it refuses this request.
        if pending.is_cancelled() {
            return Err(released());
        }
        let head = codec::encode_head(
            request,
            keys,
            stage,
            raise,
            (generation, self.waiters.entry_life(self.runner.options.claim)),
        );
        let terms = codec::encode_terms(request, keys, others);
        Ok(vec![attempt.into_bytes(), lives.into_bytes(), head, terms])
    }

    fn decode_reply(
        &self,
        group: KeyGroup,
        request: &LockRequest,
        answer: Result<Value, Failure>,
    ) -> Result<AcquireReply> {
        let parts = match answer? {
            Value::Int(fence) => return Ok(AcquireReply::Granted(self.runner.record_fence(fence)?)),
            Value::Array(parts) => parts,
            _ => return Err(unexpected_reply()),
        };
        let rejected = |error| Ok(AcquireReply::Rejected(error));
        let as_server = |code: &str| Failure::Rejected { code: code.into(), detail: String::new() }.into();
        match &parts[..] {
            [Value::Int(12)] => rejected(Error::Deadlock(request.key.names.iter().cloned().collect())),
            [Value::Int(14)] => rejected(Error::invalid(format!(
                "this owner holds some of {} already, but not all of them under one fence: request all names at once, \
                 or for the missing ones alone",
                request.key.names
            ))),
            [Value::Int(15)] => rejected(as_server("WRONGTYPE")),
            [Value::Int(16)] => rejected(as_server("OOM")),
            [Value::Int(17)] => rejected(Error::Unavailable(
                "this attempt was released while one of its requests had no reply: use a new attempt".into(),
            )),
            [Value::Int(HELD_BEFORE), Value::Int(fence)] => {
                Ok(AcquireReply::Granted(self.runner.record_fence(*fence)?))
            }
            [Value::Int(19)] => Err(as_server("TRYAGAIN")),
            [Value::Int(21)] => rejected(Failure::other_format().into()),
            [Value::Int(18), Value::BulkString(reason)] => {
                let reason = String::from_utf8_lossy(reason);
                rejected(Error::Lost(LossReason::Revoked(reason.into()).to_string()))
            }
            [Value::Int(code), state @ ..] => {
                let (busy, ends, highest) = self.decode_busy(state).ok_or_else(unexpected_reply)?;
                debug_assert_eq!(self.runner.keys.group(&busy.name), group);
                Ok(if *code == 2 { AcquireReply::Queued(highest, ends) } else { AcquireReply::Busy(busy) })
            }
            _ => Err(unexpected_reply()),
        }
    }

    /// Decodes a busy reply: the holders, when the first of them ends, and the highest fence.
    fn decode_busy(&self, state: &[Value]) -> Option<(Busy, Option<Duration>, u64)> {
        let [
            Value::BulkString(key),
            Value::Array(holds),
            Value::Int(pttl),
            Value::Int(waiting),
            Value::Int(now),
            Value::Int(highest),
        ] = state
        else {
            return None;
        };
        let name = self.runner.keys.lock_name(key)?;
        let mut held = holders(&stored_holds(holds), *pttl, u64::try_from(*now).ok()?);
        held.truncate(LockView::BUSY);
        let ends = u64::try_from(*pttl).ok().map(Duration::from_millis);
        Some((
            Busy { name, held, waiting: usize::try_from(*waiting).unwrap_or(0) },
            ends,
            u64::try_from(*highest).ok()?,
        ))
    }

    /// Removes the queue entry in the background, unless the caller acquires again.
    fn schedule_release(&self, group: KeyGroup, request: &LockRequest, limit: Option<u64>) {
        self.unknown.schedule_release(UnansweredRelease::new(group, request.key.clone(), limit));
    }
}
