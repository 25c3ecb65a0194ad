//! Requests without a reply, until their outcome is settled: attempts whose requests may still arrive, and releases to send again.
//!
//! A request without a reply may wait in a buffer and be carried out after the release of its attempt. Such a release therefore
//! leaves a tombstone on the server, which refuses the attempt while the tombstone lasts. A generation tells a request from before
//! the release from one that the caller sends afterwards with the same attempt.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use lockkeeper_core::{IgnorePoison, RequestKey};
use lockkeeper_store_kit::CancelSignal;
use tokio::sync::Notify;

use crate::codec;
use crate::keys::KeyGroup;
use crate::runner::sleep_until;

/// The attempts and releases of one store whose outcome is unknown.
pub struct UnknownOutcomes {
    state: Mutex<UnknownState>,
    wake: Notify,
    /// How long a tombstone lasts on the server, and an attempt in this registry.
    tombstone_ttl: Duration,
    /// The pause before a release is sent again for the first time.
    first_pause: Duration,
}

/// The longest pause before a release without a reply is sent once more.
const MAX_PAUSE: Duration = Duration::from_secs(5);

#[derive(Default)]
struct UnknownState {
    /// By attempt, in hexadecimal digits.
    attempts: HashMap<String, UnansweredAttempt>,
    /// When expired attempts were last removed.
    swept: Option<Instant>,
    /// With the time at which each is sent again.
    releases: Vec<(Instant, UnansweredRelease)>,
    /// The releases that the store is sending again now.
    retries: Vec<ReleaseRetry>,
}

/// A release to send again.
#[derive(Clone)]
pub struct UnansweredRelease {
    pub group: KeyGroup,
    pub key: RequestKey,
    /// The highest fence or ticket that the release applies to; `None`: the highest that the server has issued when it is
    /// reachable again.
    pub limit: Option<u64>,
    /// How often the store has sent it again.
    pub retries: u32,
}

impl UnansweredRelease {
    pub fn new(group: KeyGroup, key: RequestKey, limit: Option<u64>) -> Self {
        UnansweredRelease { group, key, limit, retries: 0 }
    }
}

/// A release that the store is sending again.
#[derive(Clone)]
pub struct ReleaseRetry {
    pub release: UnansweredRelease,
    /// Cancelled when the caller acquires again: from then on the release could end what the caller gets.
    pub superseded: Arc<CancelSignal>,
}

struct UnansweredAttempt {
    since: Instant,
    generation: u8,
    /// Whether no tombstone refuses its requests without a reply yet.
    may_arrive: bool,
}

impl UnknownOutcomes {
    pub fn new(tombstone_ttl: Duration, first_pause: Duration) -> Self {
        UnknownOutcomes { state: Mutex::default(), wake: Notify::new(), tombstone_ttl, first_pause }
    }

    fn state(&self) -> MutexGuard<'_, UnknownState> {
        self.state.lock().ignore_poison()
    }

    /// Records an attempt whose request the server may have carried out, or may still carry out.
    pub fn record_attempt(&self, attempt: &str) {
        let (mut state, now, ttl) = (self.state(), Instant::now(), self.tombstone_ttl);
        if state.swept.is_none_or(|swept| swept + ttl < now) {
            state.swept = Some(now);
            state.attempts.retain(|_, unanswered| unanswered.since + ttl > now);
        }
        let new = UnansweredAttempt { since: now, generation: 0, may_arrive: true };
        let unanswered = state.attempts.entry(attempt.into()).or_insert(new);
        (unanswered.since, unanswered.may_arrive) = (now, true);
    }

    /// Whether a request of this attempt without a reply may still take the lock.
    pub fn may_arrive(&self, attempt: &str) -> bool {
        let state = self.state();
        let arrives = |one: &UnansweredAttempt| one.may_arrive && one.since.elapsed() < self.tombstone_ttl;
        state.attempts.get(attempt).is_some_and(arrives)
    }

    /// Records that the tombstone of a release refuses all requests of this attempt that had no reply.
    pub fn record_tombstone(&self, attempt: &str) {
        if let Some(unanswered) = self.state().attempts.get_mut(attempt) {
            unanswered.may_arrive = false;
        }
    }

    /// The generation of a request that is sent for this attempt now.
    pub fn generation(&self, attempt: &str) -> u8 {
        let state = self.state();
        if state.attempts.is_empty() {
            0
        } else {
            state.attempts.get(attempt).map_or(0, |one| one.generation)
        }
    }

    /// Encodes the release of an attempt. If a request of the attempt may still arrive, the release leaves a tombstone for the
    /// current generation, and later requests of the attempt have a newer one.
    pub fn encode_release(&self, attempt: String, names: usize, flags: u8, limit: u64) -> Vec<u8> {
        let ended = self.end_generation(&attempt);
        codec::encode_release(attempt, names, flags, ended, limit)
    }

    fn end_generation(&self, attempt: &str) -> Option<u8> {
        let mut state = self.state();
        let unanswered =
            state.attempts.get_mut(attempt).filter(|one| one.since.elapsed() < self.tombstone_ttl)?;
        let ended = unanswered.generation;
        unanswered.generation = ended.saturating_add(1);
        Some(ended)
    }

    /// Schedules a release whose outcome is unknown, or the release of a request that may be in the queue while its caller got
    /// "unknown". A queue entry does not expire while its process polls, so the store sends the release again until the server
    /// replies.
    pub fn schedule_release(&self, release: UnansweredRelease) {
        let mut state = self.state();
        let same = |other: &UnansweredRelease| {
            other.key.attempt == release.key.attempt && other.key.names == release.key.names
        };
        if !state.releases.iter().any(|(_, other)| same(other)) {
            let pause = match release.retries {
                0 => self.first_pause,
                retries => (self.first_pause * 2_u32.pow(retries.min(10))).min(MAX_PAUSE),
            };
            state.releases.push((Instant::now() + pause, release));
            self.wake.notify_one();
        }
    }

    /// Suspends the scheduled releases of an attempt while its caller acquires again, also those that the store is sending now.
    pub fn suspend(&self, key: &RequestKey) -> SuspendedReleases<'_> {
        let mut state = self.state();
        let scheduled = state.releases.extract_if(.., |(_, release)| release.key.attempt == key.attempt);
        let mut releases: Vec<_> = scheduled.map(|(_, release)| release).collect();
        for retry in state.retries.extract_if(.., |retry| retry.release.key.attempt == key.attempt) {
            retry.superseded.cancel();
            releases.push(retry.release);
        }
        SuspendedReleases { unknown: self, releases }
    }

    /// Waits until releases are due, and takes them. Each is in flight until [`UnknownOutcomes::end_retry`].
    pub async fn due_releases(&self) -> Vec<ReleaseRetry> {
        loop {
            let next = self.state().releases.iter().map(|(due, _)| *due).min();
            tokio::select! {
                () = sleep_until(next) => {
                    let (mut state, now) = (self.state(), Instant::now());
                    let due = state.releases.extract_if(.., |(due, _)| *due <= now);
                    let due: Vec<_> = due
                        .map(|(_, release)| ReleaseRetry { release, superseded: Arc::default() })
                        .collect();
                    state.retries.extend_from_slice(&due);
                    return due;
                }
                () = self.wake.notified() => {}
            }
        }
    }

    /// Ends a retry, and schedules its release again if the server has not confirmed it. A superseded retry is suspended already.
    pub fn end_retry(&self, retry: ReleaseRetry, confirmed: bool) {
        let mut state = self.state();
        let ended = state.retries.extract_if(.., |other| Arc::ptr_eq(&other.superseded, &retry.superseded));
        let in_flight = ended.count() > 0;
        drop(state);
        if in_flight && !confirmed {
            let release = retry.release;
            self.schedule_release(UnansweredRelease { retries: release.retries + 1, ..release });
        }
    }
}

/// Releases that are not sent while the caller acquires again. Dropping it schedules them again: a retry that was not sent, or had
/// no reply either, says nothing about the outcome of the first request.
pub struct SuspendedReleases<'a> {
    unknown: &'a UnknownOutcomes,
    releases: Vec<UnansweredRelease>,
}

impl SuspendedReleases<'_> {
    /// Cancels them: the server replied, so the attempt holds the lock, or has left the queue and no request of it may still arrive.
    pub fn cancel(mut self) {
        self.releases.clear();
    }
}

impl Drop for SuspendedReleases<'_> {
    fn drop(&mut self) {
        for release in self.releases.drain(..) {
            self.unknown.schedule_release(release);
        }
    }
}
