//! Acquiring a lock: the fast path, the queue, and the replies.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::lease::LossReason;
use lockkeeper_core::{
    AcquireOutcome, Attempt, BootInstant, Busy, Error, Fence, Grant, LockName, LockRequest, Result, Wait,
};
use lockkeeper_host::sleep_until;
use lockkeeper_store_kit::RecentSet;
use serde::Deserialize;

use crate::batch::{BatchSender, RequestKind, RequestParams, RequestReply};
use crate::codec::{self, ViewJson, hash, holder_text, micros, terms, unexpected_reply};
use crate::config::Options;
use crate::error::Failure;
use crate::unknown::{KEPT_FOR_RETRY, RELEASE_AGAIN_AFTER, UnknownOutcomes};
use crate::waiters::{QueuePosition, WaiterHandle, Waiters};

/// Acquires and releases locks for the callers of this process.
pub(crate) struct LockClient {
    pub options: Arc<Options>,
    pub batch: Arc<BatchSender>,
    pub waiters: Arc<Waiters>,
    pub unknown: UnknownOutcomes,
    /// The names at which the fast path failed lately: it is not tried there.
    pub recently_contended: RecentSet<LockName>,
    /// The grants that the fast path may release.
    pub fast_path_grants: RecentSet<Attempt>,
}

/// The reply to an acquire.
enum AcquireReply {
    Granted(Fence),
    Busy(Busy),
    Queued(QueuePosition),
}

/// A reply that is neither a fence nor a view of the holders.
#[derive(Deserialize)]
struct AcquireReplyJson {
    queued: Option<bool>,
    changes_in: Option<u64>,
    alive_since: Option<i64>,
    refused: Option<String>,
    reason: Option<String>,
    names: Option<Vec<String>>,
}

impl LockClient {
    pub async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        let call = self.unknown.begin(&request.key, request.ttl)?;
        let mut enqueued = false;
        let outcome = self.acquire_or_wait(request, &mut enqueued).await;
        let was_unknown = call.was_unknown;
        call.finish();
        match &outcome {
            // An unreachable server reveals nothing about the earlier request.
            Err(error) if was_unknown || matches!(error, Error::Unknown(_)) => {
                self.unknown.add(&request.key, request.ttl.min(KEPT_FOR_RETRY));
            }
            // PostgreSQL may still be running the earlier request, and grant it once the lock is free.
            Ok(AcquireOutcome::Busy(_)) if was_unknown => {
                self.unknown.add(&request.key, request.ttl.min(KEPT_FOR_RETRY));
            }
            // The queue entry still exists, and no caller waits any more.
            Err(_) if enqueued => self.unknown.add(&request.key, RELEASE_AGAIN_AFTER),
            _ => {}
        }
        match outcome {
            Err(Error::Unavailable(why)) if enqueued => Err(Error::Unknown(why)),
            Ok(AcquireOutcome::Granted(_)) if self.unknown.is_abandoned(&request.key.attempt) => {
                Err(released())
            }
            outcome => outcome,
        }
    }

    /// Sends the request, and waits in the queue for as long as the request allows. `enqueued`: the server has replied that it is queued.
    async fn acquire_or_wait(&self, request: &LockRequest, enqueued: &mut bool) -> Result<AcquireOutcome> {
        let clock = &*self.options.clock;
        let until = request.wait.deadline(clock.now());
        let mut waiter = (request.wait != Wait::No).then(|| self.waiters.register(&request.key, request.ttl));
        let mut woken_reply = None;
        let (plain, contended) = (is_plain(request), self.recently_contended.has(&request.key.names));
        let mut fast_path = plain && !contended;
        loop {
            let waits = waiter.is_some() && clock.now() < until;
            let kind = match waits {
                true if *enqueued => RequestKind::Woken,
                true => RequestKind::Enqueue,
                false => RequestKind::TryOnce,
            };
            let reply = match woken_reply.take() {
                Some(reply) => reply,
                None => {
                    let fast_path = std::mem::take(&mut fast_path);
                    let params = RequestParams { fast_path, ..params(request, kind) };
                    match &waiter {
                        Some(waiter) => waiter.send(params).await.ok_or_else(released)?,
                        None => self.batch.send(params).await,
                    }
                }
            };
            if reply.as_ref().is_ok_and(|reply| reply.text.is_empty()) {
                self.recently_contended.add(&request.key.names);
                // A release may have ended the request meanwhile: the full request begins from the top.
                continue;
            }
            let position = match reply.map_err(Error::from).and_then(|reply| read(reply, request)) {
                Ok((sent_at, lease, AcquireReply::Granted(fence))) => {
                    let (key, mode, ttl) = (request.key.clone(), request.mode, request.ttl);
                    let lease = lease.unwrap_or(ttl);
                    if plain {
                        self.fast_path_grants.add([&key.attempt]);
                    }
                    if contended && !*enqueued {
                        _ = self.recently_contended.remove(&key.names);
                    }
                    return Ok(AcquireOutcome::Granted(Grant { key, fence, mode, ttl, sent_at, lease }));
                }
                Ok((_, _, AcquireReply::Busy(busy))) => return Ok(AcquireOutcome::Busy(busy)),
                Ok((_, _, AcquireReply::Queued(position))) => position,
                // A waiter goes on waiting while the server is unreachable: its queue entry may still exist.
                Err(error @ (Error::Unavailable(_) | Error::Unknown(_))) if *enqueued && waits => {
                    tracing::debug!(%error, "a request of a waiter failed; it stays in the queue and retries");
                    let pause = self.options.poll.min(Duration::from_millis(250));
                    sleep_until(clock, clock.now() + pause).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            *enqueued = true;
            let Some(waiter) = &mut waiter else { return Err(unexpected_reply()) };
            waiter.set_enqueued(params(request, RequestKind::Woken), position);
            woken_reply = self.wait(waiter, request, until).await;
            if waiter.is_released() {
                return Err(released());
            }
        }
    }

    /// Waits until the request should be sent again, or a wake-up has sent it and this is the reply.
    async fn wait(
        &self,
        waiter: &WaiterHandle<'_>,
        request: &LockRequest,
        until: BootInstant,
    ) -> Option<Result<RequestReply, Failure>> {
        let clock = &*self.options.clock;
        // An owner may be granted past the queue once it holds the lock elsewhere, and no notification reports that.
        let retry =
            if request.owner.is_some() { clock.now() + self.options.poll } else { BootInstant::NEVER };
        tokio::select! {
            () = waiter.woken() => {}
            () = sleep_until(clock, until.min(retry)) => {}
        }
        loop {
            let reply = waiter.take_reply();
            if reply.is_some() || waiter.is_released() || waiter.take_over() {
                return reply;
            }
            waiter.woken().await;
        }
    }
}

fn released() -> Error {
    Error::Unknown("the request was released meanwhile".into())
}

/// Whether the fast path may grant the request.
fn is_plain(request: &LockRequest) -> bool {
    request.key.names.count() == 1 && terms(request).is_none()
}

fn params(request: &LockRequest, kind: RequestKind) -> RequestParams {
    RequestParams {
        kind,
        fast_path: false,
        names: request.key.names.iter().map(|name| name.as_str().to_owned()).collect(),
        attempt: hash(&request.key.attempt),
        ttl: Some(micros(request.ttl)),
        terms: terms(request),
        holder: Some(holder_text(&request.holder)),
    }
}

fn read(
    RequestReply { sent_at, text, lease }: RequestReply,
    request: &LockRequest,
) -> Result<(BootInstant, Option<Duration>, AcquireReply)> {
    Ok((sent_at, lease, parse_reply(&text, request)?))
}

fn parse_reply(text: &str, request: &LockRequest) -> Result<AcquireReply> {
    if let Ok(fence) = text.parse::<i64>() {
        return Ok(AcquireReply::Granted(codec::fence(fence)?));
    }
    let other: AcquireReplyJson = serde_json::from_str(text).map_err(|_| unexpected_reply())?;
    match other.refused.as_deref() {
        Some("upgrade") => return Err(Error::Deadlock(request.key.names.iter().cloned().collect())),
        Some("self") => {
            let names = other.names.unwrap_or_default();
            return Err(Error::Deadlock(names.iter().map(LockName::new).collect::<Result<_>>()?));
        }
        Some("mixed") => {
            return Err(Error::invalid(format!(
                "this owner holds some of {} already, but not all of them under one fence: request all names at once, \
                 or the missing ones alone",
                request.key.names
            )));
        }
        Some("revoked") => {
            let reason = other.reason.unwrap_or_default();
            return Err(Error::Lost(LossReason::Revoked(reason.into()).to_string()));
        }
        Some("stale") => return Err(Failure::NoReply("a newer connection took over".into()).into()),
        Some(_) => return Err(unexpected_reply()),
        None => {}
    }
    if other.queued == Some(true) {
        let changes_in = other.changes_in.map(Duration::from_micros);
        return Ok(AcquireReply::Queued(QueuePosition { alive_since: other.alive_since, changes_in }));
    }
    ViewJson::parse(text)?.into_busy().map(AcquireReply::Busy)
}
