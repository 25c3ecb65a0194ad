//! One run per window of time, by the first host that begins it. The record holds the newest window, so
//! hosts whose clocks differ by seconds do not run a window twice.

mod record;

use std::time::Duration;

use lockkeeper_core::{Error, Fence, Result};
use lockkeeper_host::host_name;

use super::backoff::JitteredBackoff;
use super::cas_record::{CasRecord, Retry, Snapshot};
use super::{name_of, need_records};
use crate::guard::Guard;
use crate::keeper::Lockkeeper;
pub use record::{EndedRun, WindowRecord};

/// If the newest window begins this much later than now, a clock is wrong: this host's, or the runner's.
const CLOCK_ERROR: Duration = Duration::from_secs(60 * 60);

/// The windows of a job. A run begins under a lock of the caller's choice, which must be the same on all
/// hosts.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// # use lockkeeper::windows::Window;
/// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
/// let guard = keeper.lock("nightly").acquire().await?;
/// let today = 20_500 * 86_400_000;                            // when the window begins, in ms since 1970
/// match keeper.windows("nightly").begin(&guard, today).await? {
///     Window::Ours(run) => run.finish(&guard, 0).await?,      // run it first, with run.fence()
///     Window::Done(_) => unreachable!("no other host runs here"),
/// }
/// assert!(matches!(keeper.windows("nightly").begin(&guard, today).await?, Window::Done(_)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Windows {
    keeper: Lockkeeper,
    name: String,
    zone: Option<String>,
    retries: u32,
}

/// The answer of [`Windows::begin`].
#[derive(Debug)]
pub enum Window {
    /// The caller has to run the window.
    Ours(Box<WindowRun>),
    /// The window has been run, or a later one has begun: this is the newest.
    Done(Box<WindowRecord>),
}

/// The right to run a window. If it is dropped without [`WindowRun::finish`], the next holder of the lock
/// takes the window over.
#[must_use = "a window counts as run only when it is finished"]
#[derive(Debug)]
pub struct WindowRun {
    cas_record: CasRecord,
    begun: Snapshot,
    record: WindowRecord,
    /// Whether an earlier run of this window began and did not end.
    pub taken_over: bool,
    /// The newest window before this one, if its last run did not end: its host died, or lost the lock.
    pub unfinished: Option<Box<WindowRecord>>,
}

impl Lockkeeper {
    /// The windows of the job called `name`, which has 1 to [`KEY_BYTES`](crate::KEY_BYTES) bytes.
    pub fn windows(&self, name: impl Into<String>) -> Windows {
        Windows { keeper: self.clone(), name: name.into(), zone: None, retries: 0 }
    }
}

impl Windows {
    /// The time zone of the windows. The record holds it, and a caller with another zone is refused: two
    /// hosts with two zones would run every night twice. By default nothing is compared.
    #[must_use]
    pub fn zone(mut self, zone: impl Into<String>) -> Self {
        self.zone = Some(zone.into());
        self
    }

    /// Runs a failed window up to `times` times more, each time by the next holder of the lock. By default
    /// a failed run counts as run.
    #[must_use]
    pub fn retry_failed(mut self, times: u32) -> Self {
        self.retries = times;
        self
    }

    fn cas_record(&self) -> Result<CasRecord> {
        need_records(&self.keeper, "a window")?;
        Ok(CasRecord::new(&self.keeper, name_of("window/", &self.name)?))
    }

    /// Checks the name and the store, before the caller takes a lock.
    pub fn check(&self) -> Result<()> {
        self.cas_record().map(drop)
    }

    /// The newest window and its last runs; `None` if no window has begun.
    pub async fn record(&self) -> Result<Option<WindowRecord>> {
        match self.cas_record()?.read().await? {
            Some(snapshot) => WindowRecord::parse(&self.name, &snapshot.value).map(Some),
            None => Ok(None),
        }
    }

    /// Begins the window of `at_ms` (milliseconds since 1970), unless it has been run.
    ///
    /// [`Error::Unavailable`] if the newest window lies far in the future: a clock is wrong, and all
    /// windows until then would be skipped silently. [`Error::Invalid`] if the record has another
    /// [zone](Windows::zone).
    pub async fn begin(&self, guard: &Guard, at_ms: u64) -> Result<Window> {
        let cas_record = self.cas_record()?;
        let mut backoff = JitteredBackoff::new(&*self.keeper.0.clock);
        let mut refused = false;
        loop {
            let old = cas_record.read().await?;
            let before =
                old.as_ref().map(|snapshot| WindowRecord::parse(&self.name, &snapshot.value)).transpose()?;
            if let Some(newest) = &before {
                self.check_clocks(newest)?;
                self.check_zone(newest)?;
                if newest.at_ms > at_ms || (newest.at_ms == at_ms && newest.is_settled(self.retries)) {
                    return Ok(Window::Done(Box::new(newest.clone())));
                }
                if newest.fence > guard.fence() {
                    return Err(Error::Stale { presented: guard.fence(), seen: newest.fence });
                }
            }
            let record = self.next(before.as_ref(), guard.fence(), at_ms);
            let (same, unfinished) = match before {
                Some(newest) => (newest.at_ms == at_ms, Some(newest).filter(|newest| !newest.done)),
                None => (false, None),
            };
            // A late runner may have written first: then read again.
            let bytes = record.bytes();
            if let Ok(begun) =
                guard.run(cas_record.swap(old.as_ref(), &bytes, None, Retry::Briefly)).await??
            {
                let taken_over = same && unfinished.is_some();
                let unfinished = unfinished.filter(|_| !same).map(Box::new);
                return Ok(Window::Ours(Box::new(WindowRun {
                    cas_record,
                    begun,
                    record,
                    taken_over,
                    unfinished,
                })));
            }
            // Pause before the second retry, so that a store that refuses every write is not called in a loop.
            if std::mem::replace(&mut refused, true) {
                backoff.wait().await;
            }
        }
    }

    /// The record of a run that begins now.
    fn next(&self, before: Option<&WindowRecord>, fence: Fence, at_ms: u64) -> WindowRecord {
        let same = before.filter(|newest| newest.at_ms == at_ms);
        WindowRecord {
            at_ms,
            fence,
            done: false,
            previous_ms: match same {
                Some(newest) => newest.previous_ms,
                None => before.map(|newest| newest.at_ms),
            },
            zone: self.zone.clone().or_else(|| before.and_then(|newest| newest.zone.clone())),
            host: Some(host_name()),
            started_ms: Some(now_ms(&self.keeper)),
            failures: same.map_or(0, |newest| newest.failures),
            ended: before.and_then(|newest| newest.ended.clone()),
            succeeded: before.and_then(|newest| newest.succeeded.clone()),
        }
    }

    fn check_zone(&self, newest: &WindowRecord) -> Result<()> {
        match (&newest.zone, &self.zone) {
            (Some(theirs), Some(ours)) if theirs != ours => Err(Error::invalid(format!(
                "the windows of {:?} are counted in {theirs}, and this call counts in {ours}: some windows would be run \
                 twice. Give the same zone on all hosts; to change it, stop all of them and delete the record window/{} \
                 (lockkeeper record rm)",
                self.name, self.name
            ))),
            _ => Ok(()),
        }
    }

    /// Whether the newest window lies too far in the future for [`Windows::begin`]: [`Error::Unavailable`], although the store is reachable.
    pub fn check_clocks(&self, newest: &WindowRecord) -> Result<()> {
        let ahead = Duration::from_millis(newest.at_ms.saturating_sub(now_ms(&self.keeper)));
        if ahead <= CLOCK_ERROR {
            return Ok(());
        }
        Err(Error::Unavailable(format!(
            "the newest run of {:?} was for a window that begins {} minutes from now: a clock is wrong. Correct it; if it was \
             another host's, delete the record window/{} (lockkeeper record rm)",
            self.name,
            ahead.as_secs() / 60,
            self.name
        )))
    }
}

fn now_ms(keeper: &Lockkeeper) -> u64 {
    keeper.0.clock.wall().as_micros() / 1000
}

impl WindowRun {
    /// The fence (the fencing token): the number to send with every write.
    pub fn fence(&self) -> Fence {
        self.record.fence
    }

    /// When the newest window before this one began, in milliseconds since 1970; `None` if this is the first.
    pub fn previous_ms(&self) -> Option<u64> {
        self.record.previous_ms
    }

    /// How many runs of this window have failed before this one.
    pub fn failures(&self) -> u32 {
        self.record.failures
    }

    /// Records that the run has ended, with its exit code: 0 means success. `guard` is the guard with which
    /// the window began.
    ///
    /// While the store is unreachable the write is retried for as long as the guard is held: giving up
    /// would make the next holder run the window again. [`Error::Stale`] if another holder took the window
    /// over, or began a later one; [`Error::Unknown`] if the store did not record the end: the window was run,
    /// and the next holder may run it again.
    pub async fn finish(self, guard: &Guard, exit_code: i32) -> Result<()> {
        let mut record = self.record;
        let ended = EndedRun {
            at_ms: record.at_ms,
            fence: record.fence,
            exit_code,
            host: record.host.clone().unwrap_or_default(),
            started_ms: record.started_ms.unwrap_or_default(),
            ended_ms: now_ms(&self.cas_record.keeper),
        };
        record.done = true;
        match exit_code {
            0 => record.succeeded = Some(ended.clone()),
            _ => record.failures += 1,
        }
        record.ended = Some(ended);
        let retry = Retry::WhileHeld(guard);
        match self.cas_record.swap(Some(&self.begun), &record.bytes(), None, retry).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(Some(found))) => {
                let seen = WindowRecord::parse("", &found.value).map_or(found.fence, |newest| newest.fence);
                Err(Error::Stale { presented: record.fence, seen })
            }
            Ok(Err(None)) => Err(Error::Lost("the record of the window was deleted while it ran".into())),
            // The store's own error may say that nothing was done, which is true for the write only.
            Err(error) => {
                let fence = record.fence;
                Err(Error::Unknown(format!(
                    "the window was run with fence {fence}, and its end is not recorded: {error}"
                )))
            }
        }
    }
}
