//! The lock of a space of marks: shared by processes that ask the store for every mark, exclusive for one that is alone with
//! the marks, and need not ask for what it has written itself. So the two kinds are never at work together.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper::{Guard, Lockkeeper};
use lockkeeper_core::{Error, Fence, IgnorePoison, LockName, Mode, Result};
use tokio::sync::watch;

use super::in_flight::InFlightRequests;

/// So many marks are remembered, and then all are forgotten: they are in the store.
const MARKS_CACHED: usize = 100_000;
/// The pause after a failed request for the lock.
const PAUSE: Duration = Duration::from_millis(500);

/// How long a process that is to be alone stands in the queue before it looks again who holds the lock.
const ALONE_WAIT: Duration = Duration::from_secs(2);

/// How the lock of a space is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MarksMode {
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
pub(super) struct MarksLock(Arc<MarksLockState>);

struct MarksLockState {
    keeper: Lockkeeper,
    grant: Arc<Mutex<Option<MarksGrant>>>,
    owns: watch::Receiver<bool>,
    in_flight: InFlightRequests,
    hold: MarksMode,
    task: tokio::task::AbortHandle,
}

/// One grant of the lock, and the marks that were seen under it.
struct MarksGrant {
    guard: Arc<Guard>,
    marks: HashMap<LockName, Fence>,
}

/// Which grant something was seen under: what was seen under one says nothing under the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GrantId(Fence);

impl fmt::Debug for MarksLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MarksLock({})", self.owns())
    }
}

fn lock(grant: &Mutex<Option<MarksGrant>>) -> MutexGuard<'_, Option<MarksGrant>> {
    grant.lock().ignore_poison()
}

impl MarksLock {
    /// Acquires the lock in the background. When it is lost, all requests in flight are notified.
    pub fn start(
        keeper: &Lockkeeper,
        name: LockName,
        hold: MarksMode,
        in_flight: InFlightRequests,
    ) -> MarksLock {
        let grant = Arc::<Mutex<Option<MarksGrant>>>::default();
        let (sender, owns) = watch::channel(false);
        let (its_keeper, its_grant, its_in_flight) = (keeper.clone(), grant.clone(), in_flight.clone());
        let task = tokio::spawn(async move {
            loop {
                match acquire(&its_keeper, &name, hold).await {
                    Ok(None) => tokio::time::sleep(PAUSE).await,
                    Ok(Some(guard)) => {
                        let guard = Arc::new(guard);
                        *lock(&its_grant) = Some(MarksGrant { guard: guard.clone(), marks: HashMap::new() });
                        sender.send_replace(true);
                        let why = guard.lost().await;
                        tracing::warn!(%why, "the marks are not ours any more: fences are refused until they are");
                        *lock(&its_grant) = None;
                        its_in_flight.lost();
                        sender.send_replace(false);
                    }
                    Err(error) => {
                        tracing::warn!(%error, "the lock of the marks cannot be had");
                        tokio::time::sleep(PAUSE).await;
                    }
                }
            }
        });
        MarksLock(Arc::new(MarksLockState {
            keeper: keeper.clone(),
            grant,
            owns,
            in_flight,
            hold,
            task: task.abort_handle(),
        }))
    }

    /// Whether the marks are ours now: a comparison with the deadline of the lock.
    pub fn owns(&self) -> bool {
        lock(&self.0.grant).as_ref().is_some_and(|grant| grant.guard.is_held())
    }

    /// Whether other processes may hold the lock at the same time.
    pub fn is_shared(&self) -> bool {
        self.0.hold == MarksMode::Shared
    }

    /// Ends when the marks are ours.
    pub async fn owned(&self) {
        // The task lives as long as we do.
        let _ = self.0.owns.clone().wait_for(|owns| *owns).await;
    }

    /// The mark of a resource, if it was seen; [`Error::Unavailable`] if the marks are not ours.
    pub fn known(&self, key: &LockName) -> Result<(GrantId, Option<Fence>)> {
        match &*lock(&self.0.grant) {
            Some(MarksGrant { guard, marks }) if guard.is_held() => {
                Ok((GrantId(guard.fence()), marks.get(key).copied()))
            }
            _ => Err(Error::Unavailable("this process does not hold the lock of the marks".into())),
        }
    }

    /// Whether the marks are ours now, under the same grant.
    pub fn still_under(&self, under: GrantId) -> bool {
        let grant = lock(&self.0.grant);
        grant.as_ref().is_some_and(|grant| grant.guard.is_held() && GrantId(grant.guard.fence()) == under)
    }

    /// Remembers a mark that the store has returned; not if another process may raise it.
    pub fn learn(&self, under: GrantId, key: &LockName, mark: Fence) {
        if self.is_shared() {
            return;
        }
        if let Some(MarksGrant { guard, marks }) = &mut *lock(&self.0.grant)
            && GrantId(guard.fence()) == under
        {
            if marks.len() >= MARKS_CACHED {
                marks.clear();
            }
            let known = marks.entry(key.clone()).or_insert(mark);
            *known = mark.max(*known);
        }
    }

    /// Gives the lock back, so that the next one need not wait for its end.
    pub async fn let_go(&self) {
        self.0.task.abort();
        *lock(&self.0.grant) = None;
        self.0.in_flight.lost();
        // The task has a share of the guard until it has really ended.
        while !self.0.task.is_finished() {
            tokio::task::yield_now().await;
        }
        self.0.keeper.settle().await;
    }
}

/// The lock. `None`: other processes hold it. One that wants to be alone is refused for as long as they share it.
async fn acquire(keeper: &Lockkeeper, name: &LockName, hold: MarksMode) -> Result<Option<Guard>> {
    let request = keeper.lock(name).label("keeps marks");
    let MarksMode::Alone { ttl, lock_delay } = hold else {
        return request.ttl(SHARED_TTL).shared().acquire().await.map(Some);
    };
    // In the queue it would keep out every other process that wants to share the lock, and not get it itself.
    let view = keeper.inspect(name).await?;
    if view.is_some_and(|view| view.held.iter().any(|held| held.mode == Mode::Shared)) {
        tracing::warn!(%name, "processes that share these marks are at work: one that is to be alone waits for their end");
        return Ok(None);
    }
    let request = request.ttl(ttl);
    let request = if keeper.profile().lock_delay { request.lock_delay(lock_delay) } else { request };
    // A process that shares the lock may come between: then this one would stand in the queue in front of all others that share it.
    match request.wait(ALONE_WAIT).acquire().await {
        Err(Error::Busy(_)) => Ok(None),
        guard => guard.map(Some),
    }
}

impl Drop for MarksLockState {
    fn drop(&mut self) {
        self.task.abort();
    }
}
