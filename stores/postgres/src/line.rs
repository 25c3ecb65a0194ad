//! Those of this process who stand in line, and the one task that looks after all of them.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lockkeeper_core::Claim;
use lockkeeper_host::random_128;
use serde::Deserialize;
use tokio::sync::Notify;

use crate::entry::{hash, hex, micros};
use crate::script::LOOK;
use crate::store::Shared;

/// How often a process looks where no messages come.
pub(crate) const DEAF: Duration = Duration::from_millis(250);
/// The least time between two looks.
const LEAST: Duration = Duration::from_millis(10);

/// Everybody of this process who waits.
#[derive(Default)]
pub(crate) struct Line {
    desk: Mutex<Desk>,
    ring: Notify,
}

#[derive(Default)]
struct Desk {
    /// By the hash of the attempt, in hexadecimal digits.
    waiters: HashMap<String, Arc<Waiter>>,
    /// How many of us wait for which name.
    names: BTreeMap<String, usize>,
    listening: bool,
    due: Option<Instant>,
}

struct Waiter {
    key: String,
    called: Notify,
    left: AtomicBool,
}

/// A place in line. Dropping it gives up waiting, not the place: that is what a release is for.
pub(crate) struct Place<'a> {
    line: &'a Line,
    waiter: Arc<Waiter>,
    names: Vec<String>,
    stands: bool,
}

/// What `look` says.
#[derive(Deserialize)]
struct Seen {
    known: bool,
    names: Vec<Spot>,
}

/// A name for which one of us is the first in line.
#[derive(Deserialize)]
struct Spot {
    first: String,
    ready: bool,
    ends: Option<u64>,
}

impl Line {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to listen for an attempt, before anything is sent: it may be called at once.
    pub fn join(&self, claim: &Claim) -> Place<'_> {
        let key = hex(&hash(&claim.attempt));
        let waiter = Arc::new(Waiter { key, called: Notify::new(), left: AtomicBool::new(false) });
        self.desk().waiters.insert(waiter.key.clone(), waiter.clone());
        let names = claim.names.iter().map(|name| name.as_str().to_owned()).collect();
        Place { line: self, waiter, names, stands: false }
    }

    /// The ask is to end, wherever it is.
    pub fn leave(&self, claim: &Claim) {
        let desk = self.desk();
        if desk.waiters.is_empty() {
            return;
        }
        if let Some(waiter) = desk.waiters.get(&hex(&hash(&claim.attempt))) {
            waiter.left.store(true, Ordering::SeqCst);
            waiter.called.notify_one();
        }
    }

    /// One of us is the first in line, and nobody is in the way.
    pub fn call(&self, key: &str) {
        if let Some(waiter) = self.desk().waiters.get(key) {
            waiter.called.notify_one();
        }
    }

    /// No messages come any more, and perhaps one was lost.
    pub fn deaf(&self) {
        let mut desk = self.desk();
        desk.listening = false;
        desk.due = Some(Instant::now());
        self.ring.notify_one();
    }
}

impl Place<'_> {
    /// It stands in line now; something changes by itself after `ends`.
    pub fn stand(&mut self, ends: Option<Duration>) {
        let mut desk = self.line.desk();
        if !std::mem::replace(&mut self.stands, true) {
            for name in &self.names {
                *desk.names.entry(name.clone()).or_default() += 1;
            }
        }
        let at = Instant::now() + ends.map_or(Duration::from_secs(1), |ends| ends + Duration::from_millis(1));
        if desk.due.is_none_or(|due| at < due) || !desk.listening {
            desk.due = Some(desk.due.map_or(at, |due| due.min(at)));
            self.line.ring.notify_one();
        }
    }

    /// Ends when it is worth asking again.
    pub async fn called(&self) {
        self.waiter.called.notified().await;
    }

    /// Whether somebody took the ask back.
    pub fn left(&self) -> bool {
        self.waiter.left.load(Ordering::SeqCst)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut desk = self.line.desk();
        // The same attempt may have asked again meanwhile.
        if desk.waiters.get(&self.waiter.key).is_some_and(|other| Arc::ptr_eq(other, &self.waiter)) {
            desk.waiters.remove(&self.waiter.key);
        }
        for name in self.names.iter().filter(|_| self.stands) {
            if let Some(count) = desk.names.get_mut(name) {
                *count -= 1;
                if *count == 0 {
                    desk.names.remove(name);
                }
            }
        }
    }
}

/// Looks after the line for as long as the store is open: listens, polls, and says that we are still there.
pub(crate) async fn attend(shared: Arc<Shared>) {
    let line = &shared.line;
    let mut last = Instant::now();
    loop {
        let (busy, due, listening) = {
            let mut desk = line.desk();
            if desk.names.is_empty() {
                // Nothing is due, so that the next one who comes rings.
                desk.due = None;
            }
            (!desk.names.is_empty(), desk.due, desk.listening)
        };
        if !busy {
            line.ring.notified().await;
            continue;
        }
        if !listening && shared.hears() && shared.listen(&shared.wake_channel()).await {
            line.desk().listening = true;
            // What was said before we listened was not heard.
            last = look(&shared).await;
            continue;
        }
        let pace = if listening { shared.options.poll } else { jitter(DEAF.min(shared.options.poll)) };
        let due = due.unwrap_or(last + pace).min(last + pace).max(last + LEAST);
        tokio::select! {
            () = tokio::time::sleep_until(due.into()) => last = look(&shared).await,
            () = line.ring.notified() => {}
        }
    }
}

/// A quarter more or less: many processes that look do not do so in step.
pub(crate) fn jitter(span: Duration) -> Duration {
    span * 3 / 4 + span / 2 * u32::from(random_128()[0]) / 255
}

/// Looks at everything that is waited for, once, whatever the number of those who wait.
async fn look(shared: &Shared) -> Instant {
    let names: Vec<String> = {
        let mut desk = shared.line.desk();
        desk.due = None;
        desk.names.keys().cloned().collect()
    };
    let seen = see(shared, &names).await;
    let now = Instant::now();
    let mut desk = shared.line.desk();
    let mut soonest = shared.options.poll;
    match seen {
        // We were silent for too long, or the server has forgotten us: everybody asks again.
        Some(seen) if !seen.known => desk.waiters.values().for_each(|waiter| waiter.called.notify_one()),
        Some(seen) => {
            for Spot { first, ready, ends } in seen.names {
                if let Some(waiter) = desk.waiters.get(&first).filter(|_| ready) {
                    waiter.called.notify_one();
                }
                if let Some(ends) = ends {
                    soonest = soonest.min(Duration::from_micros(ends) + Duration::from_millis(1));
                }
            }
        }
        None => soonest = soonest.min(DEAF),
    }
    let at = now + soonest;
    desk.due = Some(desk.due.map_or(at, |due| due.min(at)));
    now
}

async fn see(shared: &Shared, names: &[String]) -> Option<Seen> {
    let told = async {
        let live = shared.link.live().await?;
        let claim = micros(shared.options.claim);
        live.rows(&LOOK, &[&shared.client, &live.epoch(), &claim, &names]).await
    };
    match told.await {
        Ok(rows) => serde_json::from_str(rows.first()?.get(0)).ok(),
        Err(failure) => {
            if failure.is_missing() {
                shared.link.hang_up();
            }
            tracing::debug!(?failure, "could not look at the line, will look again");
            None
        }
    }
}
