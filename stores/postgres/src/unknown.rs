//! Requests and releases without a reply, until a release of them is confirmed. A queue entry lasts for as long as its process is alive: so the
//! process itself releases what its callers gave up, however long the server is unreachable.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lockkeeper_core::{Attempt, Error, RequestKey, Result};
use tokio::sync::Notify;

/// How long until a failed release is sent again.
pub(crate) const RELEASE_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// How long a request whose outcome is unknown is kept for a caller that sends it again.
pub(crate) const KEPT_FOR_RETRY: Duration = Duration::from_secs(5);

/// The requests that the database may have carried out, and that no caller uses.
pub(crate) struct UnknownOutcomes {
    all: Mutex<HashMap<Attempt, AbandonedRequest>>,
    /// The newest acquire in flight for each attempt.
    calls: Mutex<(u64, HashMap<Attempt, u64>)>,
    changed: Notify,
    /// When a release is sent once more after one that succeeded: by then PostgreSQL has finished the request without a reply, which an old
    /// connection may still have been running.
    second_release_after: Duration,
}

struct AbandonedRequest {
    key: RequestKey,
    due: Instant,
    /// A release of it is in flight.
    releasing: bool,
    /// One release of it has succeeded.
    released: bool,
}

impl UnknownOutcomes {
    /// `timeout` is that of the store. PostgreSQL runs a statement for twice as long at most (see `PgSession::prepare`).
    pub fn new(timeout: Duration) -> Self {
        UnknownOutcomes {
            all: Mutex::default(),
            calls: Mutex::default(),
            changed: Notify::new(),
            second_release_after: timeout * 2 + Duration::from_secs(10),
        }
    }

    fn calls(&self) -> MutexGuard<'_, (u64, HashMap<Attempt, u64>)> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Attempt, AbandonedRequest>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The server may have carried out this request. It is released `after` this time, unless a caller sends or releases it before.
    pub fn add(&self, key: &RequestKey, after: Duration) {
        let due = Instant::now() + after;
        self.all().entry(key.attempt).or_insert_with(|| AbandonedRequest {
            key: key.clone(),
            due,
            releasing: false,
            released: false,
        });
        self.changed.notify_one();
    }

    /// A release succeeded. The request may still be running in the database, so it is released once more later.
    pub fn released(&self, attempt: &Attempt) {
        let mut all = self.all();
        match all.get_mut(attempt) {
            Some(request) if request.released => _ = all.remove(attempt),
            Some(request) => {
                request.due = Instant::now() + self.second_release_after;
                (request.releasing, request.released) = (false, true);
                self.changed.notify_one();
            }
            None => {}
        }
    }

    /// A caller sends the request, perhaps again, and uses its outcome.
    pub fn begin<'a>(&'a self, key: &'a RequestKey, ttl: Duration) -> Result<AcquireInProgress<'a>> {
        let abandoned = self.reclaim(&key.attempt)?;
        let (call, replaces) = {
            let mut calls = self.calls();
            calls.0 += 1;
            let call = calls.0;
            (call, calls.1.insert(key.attempt, call).is_some())
        };
        let kept = ttl.min(KEPT_FOR_RETRY);
        Ok(AcquireInProgress { unknown: self, key, call, kept, was_unknown: abandoned || replaces })
    }

    /// A caller uses the outcome of this attempt. Returns whether it was unknown before.
    fn reclaim(&self, attempt: &Attempt) -> Result<bool> {
        let mut all = self.all();
        match all.get(attempt) {
            Some(request) if request.releasing => Err(Error::Unavailable(
                "this request was given up, and its release is in flight: acquire with a new attempt".into(),
            )),
            found => {
                let unknown = found.is_some();
                all.remove(attempt);
                Ok(unknown)
            }
        }
    }

    /// The requests whose release is due, and when the next one is.
    fn take_due(&self) -> (Vec<RequestKey>, Option<Instant>) {
        let (mut all, now) = (self.all(), Instant::now());
        let mut due = Vec::new();
        for request in all.values_mut().filter(|request| request.due <= now) {
            request.releasing = true;
            due.push(request.key.clone());
        }
        (due, all.values().filter(|request| !request.releasing).map(|request| request.due).min())
    }

    /// The release failed, or had no reply.
    fn put_off(&self, attempt: &Attempt) {
        if let Some(request) = self.all().get_mut(attempt) {
            (request.due, request.releasing) = (Instant::now() + RELEASE_AGAIN_AFTER, false);
        }
    }

    /// Sends the due releases for as long as the store is open.
    pub async fn run<F: Future<Output = Result<()>>>(&self, release: impl Fn(RequestKey) -> F) {
        loop {
            let (due, next) = self.take_due();
            if due.is_empty() {
                let pause = next.map_or(Duration::from_secs(3600), |next| next - Instant::now());
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = self.changed.notified() => {}
                }
                continue;
            }
            join_all(due.into_iter().map(async |key| {
                let attempt = key.attempt;
                match release(key).await {
                    Ok(()) => self.released(&attempt),
                    Err(error) => {
                        tracing::debug!(%error, "the release of an abandoned request failed; releasing again");
                        self.put_off(&attempt);
                    }
                }
            }))
            .await;
        }
    }
}

/// An acquire in flight. If its caller drops it before the outcome, an old connection may still be running its statement: then the store releases
/// the request as one without a reply.
pub(crate) struct AcquireInProgress<'a> {
    unknown: &'a UnknownOutcomes,
    key: &'a RequestKey,
    call: u64,
    kept: Duration,
    /// The outcome of an earlier call with this attempt was unknown when this one began.
    pub was_unknown: bool,
}

impl AcquireInProgress<'_> {
    /// The call has an outcome.
    pub fn finish(self) {
        self.end_call();
        std::mem::forget(self);
    }

    /// Whether this was the newest call of its attempt: a newer one uses the outcome of both.
    fn end_call(&self) -> bool {
        let mut calls = self.unknown.calls();
        let newest = calls.1.get(&self.key.attempt) == Some(&self.call);
        if newest {
            calls.1.remove(&self.key.attempt);
        }
        newest
    }
}

impl Drop for AcquireInProgress<'_> {
    fn drop(&mut self) {
        if self.end_call() {
            self.unknown.add(self.key, self.kept);
        }
    }
}
