//! The trial: each operation that a lock needs, on a lock of the doctor's own. It shows missing rights and a hand-off that takes too long.
//! Everything is released and deleted at the end, also after a failure.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lockkeeper::{
    Error, EventKind, Finding, Holder, LockName, Lockkeeper, Page, Profile, Promise, Result, Store,
};
use lockkeeper_core::{
    AcquireOutcome, DeleteOutcome, Expect, Grant, LockRequest, ReleaseOutcome, RenewOutcome, RequestKey,
    Wait, WriteOutcome,
};

use crate::duration;

/// The prefix of the doctor's names. They are the same each time, so that a store that keeps an item for each name keeps two for the doctor.
pub const PREFIX: &str = "lockkeeper-doctor/";
/// A hand-off may take this much longer than declared: this host may have paused, which is no fault of the store.
const OWN_PAUSES: Duration = Duration::from_secs(5);
/// How long an event may take.
const EVENT: Duration = Duration::from_secs(2);

/// The result of one operation.
#[derive(Clone, Debug)]
pub struct TrialStep {
    pub operation: &'static str,
    pub took: Duration,
    /// `Err`: what is wrong, and which promise that breaks.
    pub outcome: std::result::Result<String, Finding>,
}

/// The results of all operations.
#[derive(Clone, Debug, Default)]
pub struct Trial {
    pub steps: Vec<TrialStep>,
}

/// The store and the limits of a trial.
pub struct TrialContext<'a> {
    pub store: &'a Arc<dyn Store>,
    pub profile: &'a Profile,
    pub ttl: Duration,
    /// The most that one operation may take.
    pub timeout: Duration,
}

fn name(part: &str) -> LockName {
    LockName::new(format!("{PREFIX}{part}")).expect("it is short and printable")
}

fn request(wait: Duration, ttl: Duration) -> LockRequest {
    let holder = Holder::new(lockkeeper_host::host_name(), std::process::id(), Some("doctor".into()));
    let holder =
        holder.unwrap_or_else(|_| Holder::new("doctor", std::process::id(), None).expect("it is short"));
    let wait = Wait::For(wait);
    LockRequest { wait, ..LockRequest::new(Lockkeeper::new_attempt(), name("lock"), ttl, Arc::new(holder)) }
}

/// The finding for an operation that failed.
fn failed(operation: &str, error: &Error) -> Finding {
    match error {
        Error::Denied(why) => {
            let text = format!("this user may not {operation}: {why}");
            Finding::harm(Promise::Availability, text)
                .set(format!("the right to {operation}"), "granted to this user")
        }
        error => Finding::harm(Promise::Availability, format!("it is not possible to {operation}: {error}")),
    }
}

impl TrialContext<'_> {
    /// Runs all operations, one after the other, and cleans up.
    pub async fn run(&self) -> Trial {
        let mut trial = Trial::default();
        let (first, second) =
            (request(self.timeout, self.ttl), request(self.timeout + self.profile.wake, self.ttl));
        if let Some(grant) = self.acquire(&mut trial, &first).await {
            self.renew(&mut trial, &grant).await;
            self.hand_off(&mut trial, &first.key, &second).await;
        }
        if self.profile.records {
            self.records(&mut trial).await;
        }
        // Whatever failed above: nothing may stay.
        for key in [&first.key, &second.key] {
            _ = tokio::time::timeout(self.timeout, self.store.release(key)).await;
        }
        trial
    }

    /// Runs one operation within the timeout, and records the result.
    async fn step<T>(
        &self,
        trial: &mut Trial,
        operation: &'static str,
        work: impl Future<Output = Result<T>>,
        judge: impl FnOnce(&T) -> std::result::Result<String, Finding>,
    ) -> Option<T> {
        let begun = Instant::now();
        let silent = || Error::Unknown(format!("no reply within {}", duration::exact(self.timeout)));
        let reply = tokio::time::timeout(self.timeout * 2, work).await.unwrap_or_else(|_| Err(silent()));
        let outcome = match &reply {
            Ok(value) => judge(value),
            Err(error) => Err(failed(operation, error)),
        };
        trial.steps.push(TrialStep { operation, took: begun.elapsed(), outcome });
        reply.ok()
    }

    async fn acquire(&self, trial: &mut Trial, request: &LockRequest) -> Option<Grant> {
        let judge = |outcome: &AcquireOutcome| match outcome {
            AcquireOutcome::Granted(grant) => Ok(format!("granted with fence {}", grant.fence)),
            AcquireOutcome::Busy(busy) => Err(Finding::hint(
                Promise::Availability,
                format!("another doctor examines the store: {busy}"),
            )),
        };
        match self.step(trial, "acquire a lock", self.store.acquire(request), judge).await? {
            AcquireOutcome::Granted(grant) => Some(grant),
            AcquireOutcome::Busy(_) => None,
        }
    }

    async fn renew(&self, trial: &mut Trial, grant: &Grant) {
        let judge = |outcomes: &Vec<RenewOutcome>| match outcomes.first() {
            Some(RenewOutcome::Renewed) => Ok("renewed".to_owned()),
            other => Err(Finding::harm(
                Promise::Exclusion,
                format!("a lock that was just granted is not renewed: {other:?}"),
            )),
        };
        self.step(trial, "renew a lock", self.store.renew(std::slice::from_ref(grant)), judge).await;
    }

    /// A second request waits, the first is released, and the second must be granted: not before, and not much later.
    async fn hand_off(&self, trial: &mut Trial, held: &RequestKey, second: &LockRequest) {
        let mut events = None;
        if self.profile.watch {
            let watching =
                self.step(trial, "watch locks", self.store.watch(PREFIX), |_| Ok("watching".into())).await;
            events = watching;
        }
        let waiter = self.store.acquire(second);
        tokio::pin!(waiter);
        // A waiter that is granted the lock now breaks exclusion. Half a second is enough for every store to answer a free lock.
        let early = tokio::time::timeout(Duration::from_millis(500), &mut waiter).await;
        let wrong = match early {
            Err(_) => None,
            Ok(Ok(AcquireOutcome::Granted(_))) => Some(Finding::harm(
                Promise::Exclusion,
                "a second process was granted a lock that the first one holds",
            )),
            Ok(Ok(AcquireOutcome::Busy(_))) => {
                Some(Finding::harm(Promise::Waiting, "a request that has time to wait was refused at once"))
            }
            Ok(Err(error)) => Some(failed("wait for a lock", &error)),
        };
        if let Some(finding) = wrong {
            let step =
                TrialStep { operation: "wait for a lock", took: Duration::ZERO, outcome: Err(finding) };
            return trial.steps.push(step);
        }
        let released = |outcome: &ReleaseOutcome| match outcome {
            ReleaseOutcome::Released => Ok("released".to_owned()),
            ReleaseOutcome::AlreadyGone => {
                Err(Finding::harm(Promise::Exclusion, "a lock that was just renewed was gone at its release"))
            }
        };
        if self.step(trial, "release a lock", self.store.release(held), released).await.is_none() {
            return;
        }
        let (begun, wake) = (Instant::now(), self.profile.wake);
        let granted = |outcome: &AcquireOutcome| {
            let took = begun.elapsed();
            match outcome {
                AcquireOutcome::Granted(_) if took <= wake + OWN_PAUSES => {
                    Ok(format!("granted {} after the release", duration::measured(took)))
                }
                _ => {
                    let text = format!(
                        "a waiter was not granted a free lock for {}, and the store declares at most {}",
                        duration::measured(took),
                        duration::measured(wake)
                    );
                    Err(Finding::harm(Promise::Waiting, text))
                }
            }
        };
        self.step(trial, "wait for a lock", waiter, granted).await;
        if let Some(events) = events {
            self.event(trial, events).await;
        }
        self.step(trial, "release a lock", self.store.release(&second.key), released).await;
    }

    async fn event(&self, trial: &mut Trial, mut events: lockkeeper::EventStream) {
        let work = async {
            let found = tokio::time::timeout(EVENT, async {
                while let Some(event) = events.next().await {
                    if matches!(event?.kind, EventKind::Released { .. } | EventKind::Granted { .. }) {
                        return Ok(true);
                    }
                }
                Ok(false)
            });
            found.await.unwrap_or(Ok(false))
        };
        let judge = |found: &bool| match found {
            true => Ok("an event arrived".to_owned()),
            false => {
                Err(Finding::risk(Promise::Waiting, "no event arrived: `watch` shows nothing of this store"))
            }
        };
        self.step(trial, "receive an event", work, judge).await;
    }

    async fn records(&self, trial: &mut Trial) {
        let (store, key) = (self.store, name("record"));
        let ttl = Some(self.ttl);
        let written = |outcome: &WriteOutcome| match outcome {
            WriteOutcome::Written(_) => Ok("written".to_owned()),
            WriteOutcome::Conflict(_) => {
                Err(Finding::harm(Promise::Durability, "a write without a condition was refused"))
            }
        };
        if self
            .step(trial, "write a record", store.write(&key, b"doctor", Expect::Any, ttl), written)
            .await
            .is_none()
        {
            // The write may have happened all the same.
            _ = tokio::time::timeout(self.timeout, store.delete(&key, Expect::Any)).await;
            return;
        }
        let read = |record: &Option<lockkeeper_core::Record>| match record {
            Some(_) => Ok("read".to_owned()),
            None => Err(Finding::harm(Promise::Durability, "a record that was just written is gone")),
        };
        self.step(trial, "read a record", store.read(&key), read).await;
        let page = Page::FIRST;
        self.step(trial, "list records", store.scan(PREFIX, &page), |_| Ok("listed".to_owned())).await;
        let deleted = |outcome: &DeleteOutcome| match outcome {
            DeleteOutcome::Deleted | DeleteOutcome::Absent => Ok("deleted".to_owned()),
            DeleteOutcome::Conflict(_) => {
                Err(Finding::harm(Promise::Durability, "a delete without a condition was refused"))
            }
        };
        self.step(trial, "delete a record", store.delete(&key, Expect::Any), deleted).await;
    }
}
