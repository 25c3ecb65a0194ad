//! [`Once::claim`]: finds the result of a key, waits for a run, or begins one.

use std::time::Duration;

use lockkeeper_core::{Busy, Error, LockName, Result};

use super::record::{OnceRecord, not_kept_error};
use super::{Done, Once, OnceStart, RunPermit, Stored, nested, permit, result};
use crate::builder::LockBuilder;
use crate::guard::Guard;
use crate::recipes::backoff::{JitteredBackoff, pause_between_polls};
use crate::recipes::cas_record::{CasRecord, Retry, Snapshot};
use crate::recipes::{name_of, need_records};

impl Once {
    /// Returns the result if there is one, else the permit to do the work. Waits while another caller runs.
    pub async fn claim(self) -> Result<OnceStart> {
        need_records(&self.keeper, "a thing done once")?;
        self.check()?;
        let cas_record = CasRecord::new(&self.keeper, name_of("once/", &self.key)?);
        let before = cas_record.read().await?;
        if let Some(snapshot) = &before
            && let Some(done) = self.result_in(&cas_record, snapshot).await?
        {
            return Ok(OnceStart::Done(done));
        }
        nested::check(&self.keeper, &cas_record.key)?;
        let guard = tokio::select! {
            biased;
            // The place in the queue is the wait; the polls serve callers at the end of a long queue.
            done = self.watch_for_result(&cas_record) => return done.map(OnceStart::Done),
            guard = self.acquire_lock(&cas_record.key) => guard?,
        };
        self.begin(cas_record, guard, before).await
    }

    /// Returns the result if there is one. Neither waits nor runs.
    pub async fn result(&self) -> Result<Option<Done<Stored>>> {
        need_records(&self.keeper, "a thing done once")?;
        self.look(&CasRecord::new(&self.keeper, name_of("once/", &self.key)?)).await
    }

    /// Whether the key's record has another fingerprint than this request.
    #[cfg(feature = "tower")]
    pub(crate) async fn has_other_fingerprint(&self) -> Result<bool> {
        let Some(snapshot) = CasRecord::new(&self.keeper, name_of("once/", &self.key)?).read().await? else {
            return Ok(false);
        };
        let (record, _) = OnceRecord::parse(&self.key, &snapshot.value)?;
        Ok(record.check_print(&self.key, self.print.as_deref()).is_err())
    }

    fn check(&self) -> Result<()> {
        if self.keep < lockkeeper_core::limits::TTL_MIN {
            return Err(Error::invalid(format!(
                "the result is kept for {:?}: at least 100ms are needed",
                self.keep
            )));
        }
        Ok(())
    }

    async fn acquire_lock(&self, name: &LockName) -> Result<Guard> {
        let mut request: LockBuilder = self.keeper.lock(name).ttl(self.ttl);
        if self.for_correctness {
            request = request.for_correctness();
        }
        match self.wait {
            Some(Duration::ZERO) => match request.try_acquire().await? {
                Some(guard) => Ok(guard),
                None => Err(self.busy(name).await?),
            },
            Some(wait) => request.wait(wait).acquire().await,
            None => request.acquire().await,
        }
    }

    /// The error for a caller that does not wait: the current holder of the key.
    async fn busy(&self, name: &LockName) -> Result<Error> {
        let view = self.keeper.inspect(name).await?;
        let (held, waiting) = view.map_or_else(Default::default, |view| (view.held, view.waiting));
        Ok(Error::Busy(Box::new(Busy { name: name.clone(), held, waiting })))
    }

    async fn watch_for_result(&self, cas_record: &CasRecord) -> Result<Done<Stored>> {
        loop {
            pause_between_polls(&*self.keeper.0.clock, self.poll).await;
            // Ignore a failed poll: the place in the queue remains.
            match self.look(cas_record).await {
                Ok(Some(done)) => return Ok(done),
                Err(error @ Error::Invalid(_)) => return Err(error),
                _ => {}
            }
        }
    }

    /// Reads the record, and the result if the record has one.
    async fn look(&self, cas_record: &CasRecord) -> Result<Option<Done<Stored>>> {
        match cas_record.read().await? {
            Some(snapshot) => self.result_in(cas_record, &snapshot).await,
            None => Ok(None),
        }
    }

    /// The result in a record; `None` if the run has not ended.
    async fn result_in(&self, cas_record: &CasRecord, snapshot: &Snapshot) -> Result<Option<Done<Stored>>> {
        let (record, body) = OnceRecord::parse(&self.key, &snapshot.value)?;
        record.check_print(&self.key, self.print.as_deref())?;
        let Some(done) = &record.done else { return Ok(None) };
        if let Some(why) = &done.unkept {
            return Err(not_kept_error(&self.key, record.fence, why));
        }
        let bytes = result::read_result(cas_record, &self.key, record.fence, done, body).await?;
        Ok(Some(Done { result: Stored { ok: done.ok, bytes }, fence: record.fence, replayed: true }))
    }

    /// Records that this caller runs, unless there is a result. It does not read the record first: if the
    /// record has changed since before the wait, the store refuses the write and returns the current
    /// record.
    async fn begin(
        &self,
        cas_record: CasRecord,
        guard: Guard,
        before: Option<Snapshot>,
    ) -> Result<OnceStart> {
        let mut old = before;
        let (mut backoff, mut refused) = (JitteredBackoff::new(&*self.keeper.0.clock), false);
        loop {
            if let Some(snapshot) = &old {
                if let Some(done) = self.result_in(&cas_record, snapshot).await? {
                    guard.release().await.ok();
                    return Ok(OnceStart::Done(done));
                }
                let (record, _) = OnceRecord::parse(&self.key, &snapshot.value)?;
                if record.fence > guard.fence() {
                    // Another caller was granted the lock after this one: this hold has ended without
                    // noticing.
                    return Err(Error::Stale { presented: guard.fence(), seen: record.fence });
                }
            }
            let record = OnceRecord::running(guard.fence(), self.print.clone()).bytes(&[]);
            let ttl = Some(permit::running_record_ttl(self.keep));
            match guard.run(cas_record.swap(old.as_ref(), &record, ttl, Retry::Briefly)).await?? {
                Ok(running) => {
                    let (key, print) = (self.key.clone(), self.print.clone());
                    let (keep, on_failure) = (self.keep, self.on_failure);
                    let permit = RunPermit { cas_record, guard, running, key, print, keep, on_failure };
                    return Ok(OnceStart::Run(Box::new(permit)));
                }
                // Another caller ran in the meantime, or the earlier record has expired.
                Err(found) => {
                    old = found;
                    // Pause before the second retry, so that a store that refuses every write is not called
                    // in a loop.
                    if std::mem::replace(&mut refused, true) {
                        backoff.wait().await;
                    }
                }
            }
        }
    }
}
