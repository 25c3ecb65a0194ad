//! The lock of a space of marks: shared by processes that ask the store for every mark, exclusive for one that is alone with
//! the marks, and need not ask for what it has written itself. So the two kinds are never at work together.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper::{Guard, Lockkeeper};
use lockkeeper_core::{Error, Fence, LockName, Mode, Result};
use tokio::sync::watch;

use super::lanes::Lanes;

/// So many marks are remembered, and then all are forgotten: they are in the store.
const REMEMBERED: usize = 100_000;
/// The pause after an ask that failed.
const PAUSE: Duration = Duration::from_millis(500);

/// How the lock of a space is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hold {
    /// With other processes. Each asks the store for every mark.
    Shared,
    /// By one process, which remembers the marks.
    Alone {
        ttl: Duration,
        /// How long no process gets the lock after an unclean end.
        lock_delay: Duration,
    },
}

/// The ttl of a lock that is shared.
const SHARED_TTL: Duration = Duration::from_secs(10);

/// Holds the lock of a space for as long as it can, and asks for it again when it was lost.
#[derive(Clone)]
pub(super) struct Owner(Arc<Inner>);

struct Inner {
    keeper: Lockkeeper,
    tenure: Arc<Mutex<Option<Tenure>>>,
    owns: watch::Receiver<bool>,
    lanes: Lanes,
    hold: Hold,
    task: tokio::task::AbortHandle,
}

/// One grant of the lock, and the marks that were seen under it.
struct Tenure {
    guard: Arc<Guard>,
    marks: HashMap<LockName, Fence>,
}

/// Which grant something was seen under: what was seen under one says nothing under the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Under(Fence);

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({})", self.owns())
    }
}

fn lock(tenure: &Mutex<Option<Tenure>>) -> MutexGuard<'_, Option<Tenure>> {
    tenure.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Owner {
    /// Whenever the lock is lost, all that is under way in `lanes` is told.
    pub fn start(keeper: &Lockkeeper, name: LockName, hold: Hold, lanes: Lanes) -> Owner {
        let tenure = Arc::<Mutex<Option<Tenure>>>::default();
        let (tell, owns) = watch::channel(false);
        let (its_keeper, its_tenure, its_lanes) = (keeper.clone(), tenure.clone(), lanes.clone());
        let task = tokio::spawn(async move {
            loop {
                match acquire(&its_keeper, &name, hold).await {
                    Ok(None) => tokio::time::sleep(PAUSE).await,
                    Ok(Some(guard)) => {
                        let guard = Arc::new(guard);
                        *lock(&its_tenure) = Some(Tenure { guard: guard.clone(), marks: HashMap::new() });
                        tell.send_replace(true);
                        let why = guard.lost().await;
                        tracing::warn!(%why, "the marks are not ours any more: fences are refused until they are");
                        *lock(&its_tenure) = None;
                        its_lanes.lost();
                        tell.send_replace(false);
                    }
                    Err(error) => {
                        tracing::warn!(%error, "the lock of the marks cannot be had");
                        tokio::time::sleep(PAUSE).await;
                    }
                }
            }
        });
        Owner(Arc::new(Inner {
            keeper: keeper.clone(),
            tenure,
            owns,
            lanes,
            hold,
            task: task.abort_handle(),
        }))
    }

    /// Whether the marks are ours now: a comparison with the deadline of the lock.
    pub fn owns(&self) -> bool {
        lock(&self.0.tenure).as_ref().is_some_and(|tenure| tenure.guard.is_held())
    }

    /// Whether other processes may hold the lock at the same time.
    pub fn is_shared(&self) -> bool {
        self.0.hold == Hold::Shared
    }

    /// Ends when the marks are ours.
    pub async fn owned(&self) {
        // The task lives as long as we do.
        let _ = self.0.owns.clone().wait_for(|owns| *owns).await;
    }

    /// The mark of a resource, if it was seen; [`Error::Unavailable`] if the marks are not ours.
    pub fn known(&self, key: &LockName) -> Result<(Under, Option<Fence>)> {
        match &*lock(&self.0.tenure) {
            Some(Tenure { guard, marks }) if guard.is_held() => {
                Ok((Under(guard.fence()), marks.get(key).copied()))
            }
            _ => Err(Error::Unavailable("another process keeps these marks, or nobody knows".into())),
        }
    }

    /// Whether the marks are ours now, under the same grant.
    pub fn still_under(&self, under: Under) -> bool {
        let tenure = lock(&self.0.tenure);
        tenure.as_ref().is_some_and(|tenure| tenure.guard.is_held() && Under(tenure.guard.fence()) == under)
    }

    /// Remembers a mark that the store has told; not if another process may raise it.
    pub fn learn(&self, under: Under, key: &LockName, mark: Fence) {
        if self.is_shared() {
            return;
        }
        if let Some(Tenure { guard, marks }) = &mut *lock(&self.0.tenure)
            && Under(guard.fence()) == under
        {
            if marks.len() >= REMEMBERED {
                marks.clear();
            }
            let known = marks.entry(key.clone()).or_insert(mark);
            *known = mark.max(*known);
        }
    }

    /// Gives the lock back, so that the next one need not wait for its end.
    pub async fn let_go(&self) {
        self.0.task.abort();
        *lock(&self.0.tenure) = None;
        self.0.lanes.lost();
        // The task has a share of the guard until it has really ended.
        while !self.0.task.is_finished() {
            tokio::task::yield_now().await;
        }
        self.0.keeper.settle().await;
    }
}

/// The lock. `None`: other processes share it, and one that wants to be alone is refused for as long as they do.
async fn acquire(keeper: &Lockkeeper, name: &LockName, hold: Hold) -> Result<Option<Guard>> {
    let ask = keeper.lock(name).label("keeps marks");
    let Hold::Alone { ttl, lock_delay } = hold else {
        return ask.ttl(SHARED_TTL).shared().acquire().await.map(Some);
    };
    // In the queue it would keep out every other process that wants to share the lock, and not get it itself.
    let view = keeper.inspect(name).await?;
    if view.is_some_and(|view| view.held.iter().any(|held| held.mode == Mode::Shared)) {
        tracing::warn!(%name, "processes that share these marks are at work: one that is to be alone waits for their end");
        return Ok(None);
    }
    let ask = ask.ttl(ttl);
    let ask = if keeper.profile().lock_delay { ask.lock_delay(lock_delay) } else { ask };
    ask.acquire().await.map(Some)
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.task.abort();
    }
}
