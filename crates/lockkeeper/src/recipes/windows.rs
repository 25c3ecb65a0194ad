//! One run per window of time, by whoever comes first: the record remembers the newest window, so clocks that differ by
//! seconds do no harm.

use std::time::Duration;

use lockkeeper_core::{Error, Fence, Result};
use serde::{Deserialize, Serialize};

use super::cell::{Cell, Seen};
use super::{name_of, need_records};
use crate::guard::Guard;
use crate::keeper::Lockkeeper;

/// A window that begins so much later than now, by our clock, tells that a clock is wrong: ours, or that of whoever ran it.
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
///     Window::Ours(run) => run.finish().await?,               // do it first, with run.fence()
///     Window::Done { .. } => unreachable!("nobody else is here"),
/// }
/// assert!(matches!(keeper.windows("nightly").begin(&guard, today).await?, Window::Done { .. }));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Windows {
    keeper: Lockkeeper,
    name: String,
}

/// Whose a window is.
#[derive(Debug)]
pub enum Window {
    /// It is ours to run.
    Ours(Run),
    /// It has been run, or a later one has been begun.
    Done {
        /// When the newest window that was begun begins, in milliseconds since 1970.
        newest_ms: u64,
        /// The fence of that run.
        fence: Fence,
    },
}

/// The right to run a window. Dropped without [`Run::finish`], the window is taken over by whoever gets the lock next.
#[must_use = "a window counts as run only when it is finished"]
#[derive(Debug)]
pub struct Run {
    cell: Cell,
    begun: Seen,
    page: Page,
    /// When the newest window before this one began, in milliseconds since 1970; `None` if this is the first.
    pub previous_ms: Option<u64>,
    /// Somebody began this window before, and did not finish it.
    pub taken_over: bool,
}

/// What the record says: the newest window that was begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Page {
    at_ms: u64,
    fence: Fence,
    done: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    previous_ms: Option<u64>,
}

impl Lockkeeper {
    /// The windows of the job called `name`, which has 1 to [`KEY_BYTES`](crate::KEY_BYTES) bytes.
    pub fn windows(&self, name: impl Into<String>) -> Windows {
        Windows { keeper: self.clone(), name: name.into() }
    }
}

impl Windows {
    fn cell(&self) -> Result<Cell> {
        need_records(&self.keeper, "a window")?;
        Ok(Cell::new(&self.keeper, name_of("window/", &self.name)?))
    }

    /// What can be wrong with the name or the store, told before anything is locked.
    pub fn check(&self) -> Result<()> {
        self.cell().map(drop)
    }

    /// When the newest window that was begun begins, in milliseconds since 1970.
    pub async fn newest_ms(&self) -> Result<Option<u64>> {
        match self.cell()?.read().await? {
            Some(seen) => Ok(Some(self.parse(&seen)?.at_ms)),
            None => Ok(None),
        }
    }

    /// Begins the window that begins at `at_ms` (milliseconds since 1970), unless it has been run.
    ///
    /// [`Error::Unavailable`] if the newest window lies far in the future: a clock is wrong, and skipping everything until
    /// then would be silent.
    pub async fn begin(&self, guard: &Guard, at_ms: u64) -> Result<Window> {
        let cell = self.cell()?;
        loop {
            let old = cell.read().await?;
            let page = old.as_ref().map(|seen| self.parse(seen)).transpose()?;
            if let Some(page) = &page {
                self.check_clocks(page)?;
                if page.at_ms > at_ms || (page.at_ms == at_ms && page.done) {
                    return Ok(Window::Done { newest_ms: page.at_ms, fence: page.fence });
                }
                if page.fence > guard.fence() {
                    return Err(Error::Stale { presented: guard.fence(), seen: page.fence });
                }
            }
            let taken_over = page.as_ref().is_some_and(|page| page.at_ms == at_ms);
            let previous_ms = match page {
                Some(page) if taken_over => page.previous_ms,
                page => page.map(|page| page.at_ms),
            };
            let page = Page { at_ms, fence: guard.fence(), done: false, previous_ms };
            // Someone who was late may have been quicker: then look again.
            if let Ok(begun) = guard.run(cell.swap(old.as_ref(), &page.bytes(), None)).await?? {
                return Ok(Window::Ours(Run { cell, begun, page, previous_ms, taken_over }));
            }
        }
    }

    fn parse(&self, seen: &Seen) -> Result<Page> {
        serde_json::from_slice(&seen.value).map_err(|e| {
            Error::invalid(format!(
                "the record window/{} was not written by this program ({e}): use another name, or delete it",
                self.name
            ))
        })
    }

    fn check_clocks(&self, page: &Page) -> Result<()> {
        let now_ms = self.keeper.0.clock.wall().as_micros() / 1000;
        let ahead = Duration::from_millis(page.at_ms.saturating_sub(now_ms));
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

impl Page {
    fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a page is plain data")
    }
}

impl Run {
    /// The number to send along with every write.
    pub fn fence(&self) -> Fence {
        self.page.fence
    }

    /// Says that the window has been run. [`Error::Stale`] if somebody took over meanwhile, or began a later one.
    pub async fn finish(self) -> Result<()> {
        let page = Page { done: true, ..self.page };
        match self.cell.swap(Some(&self.begun), &page.bytes(), None).await? {
            Ok(_) => Ok(()),
            Err(Some(found)) => {
                let seen = serde_json::from_slice(&found.value).map_or(found.fence, |page: Page| page.fence);
                Err(Error::Stale { presented: page.fence, seen })
            }
            Err(None) => Err(Error::Lost("the record of the window was deleted while it ran".into())),
        }
    }
}
