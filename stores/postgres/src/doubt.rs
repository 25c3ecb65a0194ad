//! Asks and releases that nobody heard of. A place in line lasts for as long as its process stands in any line: so the process takes back what it
//! does not want any more, however long the server is away.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lockkeeper_core::{Attempt, Claim, Error, Result};
use tokio::sync::Notify;

use crate::store::Shared;

/// How long until an end that could not be told is told again.
pub(crate) const AGAIN: Duration = Duration::from_millis(500);

/// How long a request whose outcome is unknown is kept for a caller that sends it again.
pub(crate) const RETRY: Duration = Duration::from_secs(5);
/// When a release is sent once more after one that succeeded: by then PostgreSQL has finished with the request that was not answered,
/// which an old connection may have been working on.
const LATE: Duration = Duration::from_secs(15);

/// What may be in the database, and is wanted by nobody.
#[derive(Default)]
pub(crate) struct Doubts {
    all: Mutex<HashMap<Attempt, Doubt>>,
    ring: Notify,
}

struct Doubt {
    claim: Claim,
    due: Instant,
    /// Its end is on its way.
    ending: bool,
    /// It has been released once already.
    released: bool,
}

impl Doubts {
    fn all(&self) -> MutexGuard<'_, HashMap<Attempt, Doubt>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This may have happened. It is taken back after a while, unless it is asked again or given back before.
    pub fn add(&self, claim: &Claim, after: Duration) {
        let due = Instant::now() + after;
        self.all().entry(claim.attempt).or_insert_with(|| Doubt {
            claim: claim.clone(),
            due,
            ending: false,
            released: false,
        });
        self.ring.notify_one();
    }

    /// A release of it succeeded. The request may still be under way in the database, so it is released once more later.
    pub fn released(&self, attempt: &Attempt) {
        let mut all = self.all();
        match all.get_mut(attempt) {
            Some(doubt) if doubt.released => _ = all.remove(attempt),
            Some(doubt) => {
                (doubt.due, doubt.ending, doubt.released) = (Instant::now() + LATE, false, true);
                self.ring.notify_one();
            }
            None => {}
        }
    }

    /// The same ask once more. Whether it was in doubt before.
    pub fn revive(&self, attempt: &Attempt) -> Result<bool> {
        let mut all = self.all();
        match all.get(attempt) {
            Some(doubt) if doubt.ending => Err(Error::Unavailable(
                "this very ask was given up, and its end is on its way: ask anew".into(),
            )),
            found => {
                let doubted = found.is_some();
                all.remove(attempt);
                Ok(doubted)
            }
        }
    }

    /// What is due, and when the next one is.
    fn due(&self) -> (Vec<Claim>, Option<Instant>) {
        let (mut all, now) = (self.all(), Instant::now());
        let mut due = Vec::new();
        for doubt in all.values_mut().filter(|doubt| doubt.due <= now) {
            doubt.ending = true;
            due.push(doubt.claim.clone());
        }
        (due, all.values().filter(|doubt| !doubt.ending).map(|doubt| doubt.due).min())
    }

    /// Its end was not heard of either.
    fn put_off(&self, attempt: &Attempt) {
        if let Some(doubt) = self.all().get_mut(attempt) {
            (doubt.due, doubt.ending) = (Instant::now() + AGAIN, false);
        }
    }
}

/// Ends what is in doubt, for as long as the store is open.
pub(crate) async fn attend(shared: Arc<Shared>) {
    let doubts = &shared.doubts;
    loop {
        let (due, next) = doubts.due();
        if due.is_empty() {
            let pause = next.map_or(Duration::from_secs(3600), |next| next - Instant::now());
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = doubts.ring.notified() => {}
            }
            continue;
        }
        join_all(due.iter().map(async |claim| match shared.give_back(claim).await {
            Ok(_) => doubts.released(&claim.attempt),
            Err(error) => {
                tracing::debug!(%error, "could not take back what nobody wants, will try again");
                doubts.put_off(&claim.attempt);
            }
        }))
        .await;
    }
}
