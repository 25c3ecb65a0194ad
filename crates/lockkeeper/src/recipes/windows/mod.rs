//! One run per window of time, by the host that comes first: the record remembers the newest window, so clocks that differ
//! by seconds do no harm.

mod record;

use std::time::Duration;

use lockkeeper_core::{Error, Fence, Result};
use lockkeeper_host::host_name;

use super::cell::{Cell, Retry, Seen};
use super::{name_of, need_records};
use crate::guard::Guard;
use crate::keeper::Lockkeeper;
pub use record::{EndedRun, WindowRecord};

/// A window that begins so much later than now, by our clock, tells that a clock is wrong: ours, or that of its runner.
const ABSURD: Duration = Duration::from_secs(60 * 60);

/// The windows of a job. They are begun under a lock of the caller's choice, which must be the same for all.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// # use lockkeeper::Window;
/// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
/// let guard = keeper.lock("nightly").acquire().await?;
/// let today = 20_500 * 86_400_000;                            // when the window begins, in ms since 1970
/// match keeper.windows("nightly").begin(&guard, today).await? {
///     Window::Ours(run) => run.finish(&guard, 0).await?,      // run it first, with run.fence()
///     Window::Done(_) => unreachable!("nobody else is here"),
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

/// Whose a window is.
#[derive(Debug)]
pub enum Window {
    /// It is ours to run.
    Ours(Box<Run>),
    /// It has been run, or a later one has been begun: this is the newest.
    Done(Box<WindowRecord>),
}

/// The right to run a window. Dropped without [`Run::finish`], the window is taken over by the next holder of the lock.
#[must_use = "a window counts as run only when it is finished"]
#[derive(Debug)]
pub struct Run {
    cell: Cell,
    begun: Seen,
    record: WindowRecord,
    /// A run of this window was begun before, and did not end.
    pub taken_over: bool,
    /// The newest window before this one, if its newest run did not end: its host died, or lost the lock.
    pub unfinished: Option<Box<WindowRecord>>,
}

impl Lockkeeper {
    /// The windows of the job called `name`, which has 1 to [`KEY_BYTES`](crate::KEY_BYTES) bytes.
    pub fn windows(&self, name: impl Into<String>) -> Windows {
        Windows { keeper: self.clone(), name: name.into(), zone: None, retries: 0 }
    }
}

impl Windows {
    /// The time zone that the caller counts the windows in. It is kept in the record, and a caller with another one is
    /// refused: two hosts that count in two zones would run every night twice. By default nothing is compared.
    #[must_use]
    pub fn zone(mut self, zone: impl Into<String>) -> Self {
        self.zone = Some(zone.into());
        self
    }

    /// A window whose run fails is run up to `times` times more, each time by the next holder of the lock. By default a run
    /// that fails is a run.
    #[must_use]
    pub fn retry_failed(mut self, times: u32) -> Self {
        self.retries = times;
        self
    }

    fn cell(&self) -> Result<Cell> {
        need_records(&self.keeper, "a window")?;
        Ok(Cell::new(&self.keeper, name_of("window/", &self.name)?))
    }

    /// What can be wrong with the name or the store, before anything is locked.
    pub fn check(&self) -> Result<()> {
        self.cell().map(drop)
    }

    /// The newest window and its last runs; `None` if no window was begun.
    pub async fn record(&self) -> Result<Option<WindowRecord>> {
        match self.cell()?.read().await? {
            Some(seen) => WindowRecord::parse(&self.name, &seen.value).map(Some),
            None => Ok(None),
        }
    }

    /// Begins the window that begins at `at_ms` (milliseconds since 1970), unless it has been run.
    ///
    /// [`Error::Unavailable`] if the newest window lies far in the future: a clock is wrong, and skipping everything until
    /// then would be silent. [`Error::Invalid`] if the windows are counted in another [zone](Windows::zone).
    pub async fn begin(&self, guard: &Guard, at_ms: u64) -> Result<Window> {
        let cell = self.cell()?;
        loop {
            let old = cell.read().await?;
            let before = old.as_ref().map(|seen| WindowRecord::parse(&self.name, &seen.value)).transpose()?;
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
            // A late runner may have been quicker: then look again.
            let bytes = record.bytes();
            if let Ok(begun) = guard.run(cell.swap(old.as_ref(), &bytes, None, Retry::Briefly)).await?? {
                let taken_over = same && unfinished.is_some();
                let unfinished = unfinished.filter(|_| !same).map(Box::new);
                return Ok(Window::Ours(Box::new(Run { cell, begun, record, taken_over, unfinished })));
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
                 twice. Give the same zone on all hosts; to change it, stop all of them and delete the record window/{}",
                self.name, self.name
            ))),
            _ => Ok(()),
        }
    }

    fn check_clocks(&self, newest: &WindowRecord) -> Result<()> {
        let ahead = Duration::from_millis(newest.at_ms.saturating_sub(now_ms(&self.keeper)));
        if ahead <= ABSURD {
            return Ok(());
        }
        Err(Error::Unavailable(format!(
            "the newest run of {:?} was for a window that begins {} minutes from now: a clock is wrong. Correct it; if it was \
             another host's, delete the record window/{}",
            self.name,
            ahead.as_secs() / 60,
            self.name
        )))
    }
}

fn now_ms(keeper: &Lockkeeper) -> u64 {
    keeper.0.clock.wall().as_micros() / 1000
}

impl Run {
    /// The number to send along with every write.
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

    /// Writes down that the run has ended, and its exit code: 0 means that it went well. `guard` is the one that the window
    /// was begun with.
    ///
    /// While the store is unreachable the write is tried again for as long as the guard is held: giving up would have the
    /// next holder run the window again. [`Error::Stale`] if another holder took the window over, or began a later one;
    /// [`Error::Unknown`] if the lease ended before the store answered.
    pub async fn finish(self, guard: &Guard, exit_code: i32) -> Result<()> {
        let mut record = self.record;
        let ended = EndedRun {
            at_ms: record.at_ms,
            fence: record.fence,
            exit_code,
            host: record.host.clone().unwrap_or_default(),
            started_ms: record.started_ms.unwrap_or_default(),
            ended_ms: now_ms(&self.cell.keeper),
        };
        record.done = true;
        match exit_code {
            0 => record.succeeded = Some(ended.clone()),
            _ => record.failures += 1,
        }
        record.ended = Some(ended);
        let retry = Retry::WhileHeld(guard);
        match self.cell.swap(Some(&self.begun), &record.bytes(), None, retry).await? {
            Ok(_) => Ok(()),
            Err(Some(found)) => {
                let seen = WindowRecord::parse("", &found.value).map_or(found.fence, |newest| newest.fence);
                Err(Error::Stale { presented: record.fence, seen })
            }
            Err(None) => Err(Error::Lost("the record of the window was deleted while it ran".into())),
        }
    }
}
