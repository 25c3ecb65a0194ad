//! The holds and requests of this process, with their expiry, for a store in which all locks of a process share one session or lease: the
//! store ends none of them that is not renewed. The process ends it; the session or lease ends all of them when the process dies.
//!
//! Clients disagree about an attempt for as long as a reply is missing. So nothing is forgotten here before the store has confirmed its
//! end: neither a hold that expired, nor a request whose call was dropped, nor a release that failed.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper_core::{BootInstant, Fence, IgnorePoison, Names};
use lockkeeper_host::Clock;
use tokio::sync::Notify;

use crate::{AttemptHash, CancelSignal};

mod calls;
pub use calls::{RegisteredCall, UnfinishedRelease};

/// The pause before the end of a hold is sent again.
const END_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// The facts that a store knows of a grant.
pub trait KnownGrant {
    /// Its fence.
    fn fence(&self) -> Fence;
}

/// A hold of this process, or a request that may become one.
#[derive(Clone, Debug)]
pub struct OwnHold<G> {
    /// Its names.
    pub names: Names,
    /// Its ttl.
    pub ttl: Duration,
    /// When the process ends the hold, unless it is renewed.
    pub expires: BootInstant,
    /// `None`: a request whose outcome is not known.
    pub grant: Option<G>,
    /// When the request was sent that was granted: the minimum hold counts from then. `None`: this process did not acquire the hold.
    pub since: Option<BootInstant>,
    /// The call that still waits for the outcome.
    pub caller: Option<Arc<CancelSignal>>,
    /// A request had no reply: the store may have applied it, or may still do so.
    pub outcome_unknown: bool,
    /// How often the process has looked for it after its end.
    pub rechecks: u32,
}

impl<G> OwnHold<G> {
    /// A request without a grant, as far as this process knows.
    pub fn new(names: &Names, ttl: Duration, expires: BootInstant) -> Self {
        let (names, grant, since, caller) = (names.clone(), None, None, None);
        OwnHold { names, ttl, expires, grant, since, caller, outcome_unknown: false, rechecks: 0 }
    }

    /// The entries that an attempt may have left, and for which no caller will come back.
    fn abandoned(names: &Names, ttl: Duration, now: BootInstant) -> Self {
        OwnHold { outcome_unknown: true, ..OwnHold::new(names, ttl, now) }
    }

    /// A grant of a request that was sent at `since`.
    pub fn granted(names: &Names, ttl: Duration, since: BootInstant, grant: G) -> Self {
        OwnHold { grant: Some(grant), since: Some(since), ..OwnHold::new(names, ttl, since + ttl) }
    }
}

/// The registry. Its tasks and calls share one table.
#[derive(Debug)]
pub struct HoldRegistry<G> {
    table: Mutex<HoldTable<G>>,
    changed: Notify,
}

/// The table of the registry.
#[derive(Debug)]
pub struct HoldTable<G> {
    /// The holds, by the hash of their attempt.
    pub holds: HashMap<AttemptHash, OwnHold<G>>,
    /// Holds that have expired, until the store has confirmed their end.
    pub ending: HashSet<AttemptHash>,
    next: Option<BootInstant>,
}

impl<G> Default for HoldRegistry<G> {
    fn default() -> Self {
        let table = HoldTable { holds: HashMap::new(), ending: HashSet::new(), next: None };
        HoldRegistry { table: Mutex::new(table), changed: Notify::new() }
    }
}

/// The result of one try to end a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndOutcome {
    /// The store has confirmed it.
    Confirmed,
    /// The registry has another entry for the attempt, which goes on with it.
    Superseded,
}

impl<G: KnownGrant> HoldRegistry<G> {
    /// Registers a grant. A call that found the grant of an earlier call does not restart its minimum hold, and proves nothing about
    /// other requests of that call.
    pub fn insert(&self, attempt: AttemptHash, mut hold: OwnHold<G>) {
        let mut table = self.table();
        if let Some(before) = table.holds.get(&attempt) {
            hold.outcome_unknown |= before.outcome_unknown;
            let fence = |hold: &OwnHold<G>| hold.grant.as_ref().map(KnownGrant::fence);
            hold.since = before.since.filter(|_| fence(before) == fence(&hold)).or(hold.since);
        }
        let sooner = table.next.is_none_or(|next| hold.expires < next);
        table.ending.remove(&attempt);
        table.holds.insert(attempt, hold);
        if sooner {
            self.wake();
        }
    }
}

impl<G> HoldRegistry<G> {
    /// The table, locked.
    pub fn table(&self) -> MutexGuard<'_, HoldTable<G>> {
        self.table.lock().ignore_poison()
    }

    /// Makes the task of [`end_expired`](Self::end_expired) look at the table again.
    pub fn wake(&self) {
        self.changed.notify_one();
    }

    /// Whether the attempt was granted the lock, and neither released nor ended.
    pub fn has_grant(&self, attempt: &AttemptHash) -> bool {
        self.table().holds.get(attempt).is_some_and(|hold| hold.grant.is_some())
    }

    /// Removes what is left of this attempt at `hold.expires`, unless the attempt has another hold or request by then.
    pub fn schedule_cleanup(&self, attempt: AttemptHash, hold: OwnHold<G>) {
        let mut table = self.table();
        match table.holds.get_mut(&attempt) {
            Some(again) => again.outcome_unknown = true,
            None => {
                table.holds.insert(attempt, OwnHold { grant: None, caller: None, ..hold });
                self.wake();
            }
        }
    }

    /// Removes the holds that have expired. They are *ending* from now on. Also returns when the next one expires.
    fn take_due(&self, now: BootInstant) -> (Vec<(AttemptHash, OwnHold<G>)>, Option<BootInstant>) {
        let mut table = self.table();
        let taken: Vec<_> = table.holds.extract_if(|_, hold| hold.expires <= now).collect();
        table.ending.extend(taken.iter().map(|(attempt, _)| *attempt));
        table.next = table.holds.values().map(|hold| hold.expires).min();
        (taken, table.next)
    }

    /// Ends the holds that have expired, for as long as the store is open. `end` ends one of them; it is called again until it succeeds.
    pub async fn end_expired<E, F>(
        self: Arc<Self>,
        clock: Arc<dyn Clock>,
        end: impl Fn(AttemptHash, Arc<OwnHold<G>>) -> F + Clone + Send + 'static,
    ) where
        G: Send + Sync + 'static,
        E: Debug + Send,
        F: Future<Output = Result<EndOutcome, E>> + Send,
    {
        loop {
            let now = clock.now();
            let (due, next) = self.take_due(now);
            for (attempt, hold) in due {
                let (registry, end, hold) = (self.clone(), end.clone(), Arc::new(hold));
                tokio::spawn(async move { registry.end_until_confirmed(attempt, &hold, end).await });
            }
            let pause = next.filter(|next| *next != BootInstant::NEVER).map(|next| next.since(now));
            tokio::select! {
                () = tokio::time::sleep(pause.unwrap_or(Duration::from_secs(3600))) => {}
                () = self.changed.notified() => {}
            }
        }
    }

    async fn end_until_confirmed<E: Debug, F>(
        &self,
        attempt: AttemptHash,
        hold: &Arc<OwnHold<G>>,
        end: impl Fn(AttemptHash, Arc<OwnHold<G>>) -> F,
    ) where
        F: Future<Output = Result<EndOutcome, E>>,
    {
        loop {
            match end(attempt, hold.clone()).await {
                Ok(EndOutcome::Superseded) => return,
                Ok(EndOutcome::Confirmed) => break,
                Err(failure) => {
                    tracing::debug!(
                        ?failure,
                        "could not end an expired hold; the lock stays held, retrying in 500 ms"
                    );
                }
            }
            tokio::time::sleep(END_AGAIN_AFTER).await;
        }
        self.table().ending.remove(&attempt);
    }
}

#[cfg(test)]
mod tests;
