//! [`Cached::claim`]: finds the value of a key, waits for the caller that computes it, or begins to.

use std::time::Duration;

use lockkeeper_core::{BootInstant, Busy, Error, Fence, Result};

use super::record::CachedRecord;
use super::view::{CachedRecords, CachedView};
use super::{Cached, CachedStart, CachedValue, RefreshPermit, ValueState};
use crate::guard::Guard;
use crate::recipes::backoff::pause_between_polls;
use crate::recipes::cas_record::Retry;
use crate::recipes::once::nested;

/// The least time for which the store keeps the record of a caller that computes a first value.
const FIRST_CLAIM_MIN: Duration = Duration::from_secs(1);

type FoundValue = Option<CachedValue<Vec<u8>>>;

impl Cached {
    /// Returns the value, or the permit to compute it, as bytes. [`Cached::get`] is built on it.
    ///
    /// [`Error::Busy`] if there is no value and the wait is over. [`Error::Deadlock`] if the work of a key
    /// requests its own key in the same task. Dropping the future leaves the queue.
    pub async fn claim(self) -> Result<CachedStart> {
        let records = self.check()?;
        nested::check(&self.keeper, &records.value.key)?;
        let give_up = self.wait.map(|wait| self.keeper.0.clock.now() + wait);
        loop {
            let view = records.look().await?;
            let found = self.usable(&records, &view).await?;
            let next = match found {
                Some(found) if view.is_fresh() && !view.is_early(&self) => {
                    return Ok(CachedStart::Value(found));
                }
                Some(found) if view.is_fresh() || self.wait.is_none() => {
                    self.refresh_or_use(&records, &view, found).await?
                }
                found => self.wait_for_value(&records, &view, found, give_up).await?,
            };
            if let Some(start) = next {
                return Ok(start);
            }
        }
    }

    /// The value, if it is fresh, or if this caller takes an old one.
    pub(super) async fn usable(&self, records: &CachedRecords, view: &CachedView) -> Result<FoundValue> {
        match (view.is_fresh(), self.stale.is_zero()) {
            (true, _) => records.load(self, view, ValueState::Fresh).await,
            (false, false) => records.load(self, view, ValueState::Stale).await,
            (false, true) => Ok(None),
        }
    }

    /// Returns the permit to refresh if it is free, else the value that is there.
    async fn refresh_or_use(
        &self,
        records: &CachedRecords,
        view: &CachedView,
        mut found: CachedValue<Vec<u8>>,
    ) -> Result<Option<CachedStart>> {
        if let Some(failure) = records.failure(view).await? {
            found.refresh_error = Some(failure.error);
            return Ok(Some(CachedStart::Value(found)));
        }
        let lock = self.keeper.lock(&records.value.key).ttl(self.lease);
        match lock.try_acquire().await {
            Ok(Some(guard)) => self.begin(records, guard, view.fence().filter(|_| view.is_fresh())).await,
            Ok(None) => Ok(Some(CachedStart::Value(found))),
            // The value is there: a store that has no lock for this caller just now is no reason to fail.
            Err(error) if passes(&error) => {
                tracing::debug!(%error, key = self.key, "no lock to refresh a cached value; it is used as it is");
                found.refresh_error = Some(error.to_string());
                Ok(Some(CachedStart::Value(found)))
            }
            Err(error) => Err(error),
        }
    }

    /// Waits until another caller has stored a value, or until this one has the lock. `None`: look again.
    async fn wait_for_value(
        &self,
        records: &CachedRecords,
        view: &CachedView,
        found: FoundValue,
        give_up: Option<BootInstant>,
    ) -> Result<Option<CachedStart>> {
        let clock = &*self.keeper.0.clock;
        if let Some(failure) = records.failure(view).await? {
            if let Some(mut found) = found {
                found.refresh_error = Some(failure.error);
                return Ok(Some(CachedStart::Value(found)));
            }
            if failure.negative || give_up.is_some_and(|give_up| clock.now() >= give_up) {
                return Ok(Some(CachedStart::Failed(failure.reported())));
            }
            let rest = give_up.map_or(self.poll, |give_up| self.poll.min(give_up.since(clock.now())));
            pause_between_polls(clock, rest).await;
            return Ok(None);
        }
        let acquired = tokio::select! {
            biased;
            // The place in the queue is the wait; the polls serve callers at the end of a long queue.
            () = self.watch(records) => return Ok(None),
            acquired = self.acquire_lock(records, give_up) => acquired,
        };
        match (acquired, found) {
            (Ok(guard), _) => self.begin(records, guard, None).await,
            (Err(Error::Busy(_)), Some(found)) => Ok(Some(CachedStart::Value(found))),
            (Err(error), Some(mut found)) if passes(&error) => {
                found.refresh_error = Some(error.to_string());
                Ok(Some(CachedStart::Value(found)))
            }
            (Err(error), _) => Err(error),
        }
    }

    /// Completes when there is a fresh value, or when a refresh has failed. Ignores a failed poll: the place
    /// in the queue remains.
    async fn watch(&self, records: &CachedRecords) {
        loop {
            pause_between_polls(&*self.keeper.0.clock, self.poll).await;
            let Ok(view) = records.look().await else { continue };
            if view.is_fresh() || matches!(records.failure(&view).await, Ok(Some(_))) {
                return;
            }
        }
    }

    async fn acquire_lock(&self, records: &CachedRecords, give_up: Option<BootInstant>) -> Result<Guard> {
        let name = &records.value.key;
        let request = self.keeper.lock(name).ttl(self.lease);
        let Some(give_up) = give_up else { return request.acquire().await };
        let rest = give_up.since(self.keeper.0.clock.now());
        if !rest.is_zero() {
            return request.wait(rest).acquire().await;
        }
        match request.try_acquire().await? {
            Some(guard) => Ok(guard),
            None => {
                let view = self.keeper.inspect(name).await?;
                let (held, waiting) = view.map_or_else(Default::default, |view| (view.held, view.waiting));
                Err(Error::Busy(Box::new(Busy { name: name.clone(), held, waiting })))
            }
        }
    }

    /// Looks again under the lock, because another caller may have stored a value or failed since, and
    /// prepares the record for the write at the end. `early`: the fence of the fresh value that this caller
    /// refreshes early. `None`: look again.
    async fn begin(
        &self,
        records: &CachedRecords,
        guard: Guard,
        early: Option<Fence>,
    ) -> Result<Option<CachedStart>> {
        loop {
            let view = guard.run(records.look()).await??;
            if view.is_fresh()
                && view.fence() != early
                && let Some(found) = records.load(self, &view, ValueState::Fresh).await?
            {
                let _ = guard.release().await;
                return Ok(Some(CachedStart::Value(found)));
            }
            if records.failure(&view).await?.is_some() {
                let _ = guard.release().await;
                return Ok(None);
            }
            if let Some(fence) = view.fence().filter(|fence| *fence > guard.fence()) {
                return Err(Error::Stale { presented: guard.fence(), seen: fence });
            }
            let base = match (&view.snapshot, view.stored().is_some()) {
                (Some(snapshot), true) => snapshot.clone(),
                // There is no value: say who computes it, so that the write at the end has a version to
                // compare with. A write over nothing could come late and find nothing again.
                (snapshot, _) => {
                    let (claim, ttl) = self.first_claim(&guard);
                    let swap = records.value.swap(snapshot.as_ref(), &claim, ttl, Retry::Briefly);
                    match guard.run(swap).await?? {
                        Ok(claimed) => claimed,
                        Err(_) => continue,
                    }
                }
            };
            let permit = RefreshPermit::new(self.clone(), records.clone(), guard, base);
            return Ok(Some(CachedStart::Refresh(Box::new(permit))));
        }
    }

    /// The record of a caller that computes a first value, and its ttl.
    pub(super) fn first_claim(&self, guard: &Guard) -> (Vec<u8>, Option<Duration>) {
        let record = CachedRecord { fence: guard.fence(), value: None };
        (record.bytes(&[]), Some((self.lease * 2).max(FIRST_CLAIM_MIN)))
    }
}

/// Whether the error may be gone with the next call.
fn passes(error: &Error) -> bool {
    matches!(error, Error::Unavailable(_) | Error::Unknown(_) | Error::Limited(_))
}
