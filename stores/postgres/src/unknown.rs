//! Requests and releases without a reply, until a release of them is confirmed. A queue entry lasts for as long as its process is alive: so the
//! process itself releases what its callers gave up, however long the server is unreachable.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::Future;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lockkeeper_core::{Attempt, Error, IgnorePoison, RequestKey, Result};
use tokio::sync::Notify;

/// How long until a failed release is sent again.
pub(crate) const RELEASE_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// How long a request whose outcome is unknown is kept for a caller that sends it again.
pub(crate) const KEPT_FOR_RETRY: Duration = Duration::from_secs(5);

/// The requests of which PostgreSQL may still be running a statement without a reply.
pub(crate) struct UnknownOutcomes {
    all: Mutex<HashMap<Attempt, UnknownRequest>>,
    /// The newest acquire in flight for each attempt.
    calls: Mutex<(u64, HashMap<Attempt, u64>)>,
    changed: Notify,
    /// When a release is sent once more after one that succeeded: by then PostgreSQL has finished the request without a reply, which an old
    /// connection may still have been running.
    second_release_after: Duration,
}

struct UnknownRequest {
    key: RequestKey,
    stage: Stage,
    due: Instant,
    /// One release of it has succeeded.
    released: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Stage {
    /// No caller uses it: it is released when it is due.
    Abandoned,
    /// A caller uses the outcome of a later call. It is forgotten when it is due: by then PostgreSQL has finished the statements before.
    InUse,
    /// A release of it is in flight.
    Releasing,
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
        self.calls.lock().ignore_poison()
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Attempt, UnknownRequest>> {
        self.all.lock().ignore_poison()
    }

    /// The server may have carried out this request. It is released `after` this time, unless a caller sends or releases it before.
    pub fn add(&self, key: &RequestKey, after: Duration) {
        let due = Instant::now() + after;
        match self.all().entry(key.attempt) {
            Entry::Occupied(mut found) if found.get().stage == Stage::InUse => {
                let request = found.get_mut();
                (request.stage, request.due) = (Stage::Abandoned, due);
            }
            Entry::Occupied(_) => {}
            Entry::Vacant(vacant) => {
                vacant.insert(UnknownRequest {
                    key: key.clone(),
                    stage: Stage::Abandoned,
                    due,
                    released: false,
                });
            }
        }
        self.changed.notify_one();
    }

    /// A caller releases the request. Returns whether this is the first of its two releases: not if its outcome is known, or if another
    /// release has succeeded or is in flight. The outcome of a request whose call is in flight is not known: that call must not use a grant
    /// whose reply it has not seen yet.
    pub fn begin_release(&self, key: &RequestKey) -> bool {
        let mut all = self.all();
        let in_flight = self.calls().1.contains_key(&key.attempt);
        match all.entry(key.attempt) {
            Entry::Occupied(mut found) => {
                let request = found.get_mut();
                let first = request.stage != Stage::Releasing && !request.released;
                if first {
                    request.stage = Stage::Releasing;
                }
                first
            }
            Entry::Vacant(vacant) if in_flight => {
                let (key, due) = (key.clone(), Instant::now());
                vacant.insert(UnknownRequest { key, stage: Stage::Releasing, due, released: false });
                true
            }
            Entry::Vacant(_) => false,
        }
    }

    /// Whether a caller has released or abandoned the request during another call with the same attempt. It is released once more, so that
    /// call must not use its grant.
    pub fn is_abandoned(&self, attempt: &Attempt) -> bool {
        self.all().get(attempt).is_some_and(|request| request.stage != Stage::InUse)
    }

    /// A release succeeded. The request may still be running in the database, so it is released once more later.
    pub fn released(&self, attempt: &Attempt) {
        let mut all = self.all();
        match all.get_mut(attempt) {
            Some(request) if request.released => _ = all.remove(attempt),
            Some(request) => {
                request.due = Instant::now() + self.second_release_after;
                (request.stage, request.released) = (Stage::Abandoned, true);
                self.changed.notify_one();
            }
            None => {}
        }
    }

    /// A caller sends the request, perhaps again, and uses its outcome.
    pub fn begin<'a>(&'a self, key: &'a RequestKey, ttl: Duration) -> Result<AcquireInProgress<'a>> {
        let mut all = self.all();
        let known = all.get_mut(&key.attempt);
        if known.as_ref().is_some_and(|request| request.stage == Stage::Releasing) {
            return Err(Error::Unavailable(
                "this request was given up, and its release is in flight: acquire with a new attempt".into(),
            ));
        }
        let (call, replaces) = {
            let mut calls = self.calls();
            calls.0 += 1;
            let call = calls.0;
            (call, calls.1.insert(key.attempt, call).is_some())
        };
        let was_unknown = known.is_some() || replaces;
        if was_unknown {
            // The statement of the earlier call may grant the lock after this caller has released it.
            let due = Instant::now() + self.second_release_after;
            all.insert(
                key.attempt,
                UnknownRequest { key: key.clone(), stage: Stage::InUse, due, released: false },
            );
            self.changed.notify_one();
        }
        let kept = ttl.min(KEPT_FOR_RETRY);
        Ok(AcquireInProgress { unknown: self, key, call, kept, was_unknown })
    }

    /// The requests whose release is due, and when the next one is.
    fn take_due(&self) -> (Vec<RequestKey>, Option<Instant>) {
        let (mut all, now) = (self.all(), Instant::now());
        all.retain(|_, request| request.stage != Stage::InUse || request.due > now);
        let mut due = Vec::new();
        for request in
            all.values_mut().filter(|request| request.stage == Stage::Abandoned && request.due <= now)
        {
            request.stage = Stage::Releasing;
            due.push(request.key.clone());
        }
        let waiting = all.values().filter(|request| request.stage != Stage::Releasing);
        (due, waiting.map(|request| request.due).min())
    }

    /// The release failed, or had no reply.
    pub fn put_off(&self, attempt: &Attempt) {
        if let Some(request) = self.all().get_mut(attempt) {
            (request.due, request.stage) = (Instant::now() + RELEASE_AGAIN_AFTER, Stage::Abandoned);
            self.changed.notify_one();
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
