//! The order in which the tasks of this process try and write one lock: one waiter polls for all, and one update writes at a time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use lockkeeper_core::{IgnorePoison, LockName};
use tokio::sync::Notify;

/// The queues of this process, by the first name of the request.
#[derive(Debug, Default)]
pub struct LocalQueues(Mutex<HashMap<LockName, Weak<LocalQueue>>>);

/// The tasks of this process that use one lock.
#[derive(Debug, Default)]
pub struct LocalQueue {
    /// The waiter that has it polls; the others wait for it in the order in which they came.
    poller: tokio::sync::Mutex<()>,
    /// A task of this process released the lock.
    released: Notify,
    /// Lock requests and releases that are to be written, in the order in which they came. Renewals do not queue here.
    writers: tokio::sync::Mutex<()>,
    /// The one update of this process that is writing: DynamoDB would reject one of two at once.
    writing: tokio::sync::Mutex<()>,
}

/// The right of one update to write, until this is dropped.
#[derive(Debug)]
pub struct WritePermit<'a> {
    _queued: Option<tokio::sync::MutexGuard<'a, ()>>,
    _writing: tokio::sync::MutexGuard<'a, ()>,
}

impl LocalQueue {
    /// Waits until this waiter is the one that polls. It is, until the guard is dropped.
    pub async fn become_poller(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.poller.lock().await
    }

    /// The right to write, if no other update has it or waits for it.
    pub fn try_write(&self) -> Option<WritePermit<'_>> {
        Some(WritePermit {
            _queued: Some(self.writers.try_lock().ok()?),
            _writing: self.writing.try_lock().ok()?,
        })
    }

    /// Waits for the right to write. An urgent update waits for one or two other updates, and not for the queue.
    pub async fn write(&self, urgent: bool) -> WritePermit<'_> {
        let queued = if urgent { None } else { Some(self.writers.lock().await) };
        WritePermit { _queued: queued, _writing: self.writing.lock().await }
    }

    /// Waits until a task of this process releases the lock.
    pub async fn released(&self) {
        self.released.notified().await;
    }
}

impl LocalQueues {
    fn by_name(&self) -> MutexGuard<'_, HashMap<LockName, Weak<LocalQueue>>> {
        self.0.lock().ignore_poison()
    }

    /// The queue of a lock.
    pub fn get(&self, name: &LockName) -> Arc<LocalQueue> {
        let mut by_name = self.by_name();
        if let Some(queue) = by_name.get(name).and_then(Weak::upgrade) {
            return queue;
        }
        by_name.retain(|_, queue| queue.strong_count() > 0);
        let queue = Arc::new(LocalQueue::default());
        by_name.insert(name.clone(), Arc::downgrade(&queue));
        queue
    }

    /// Wakes the pollers of locks that a task of this process has released.
    pub fn wake<'a>(&self, names: impl Iterator<Item = &'a LockName>) {
        let by_name = self.by_name();
        for queue in names.filter_map(|name| by_name.get(name).and_then(Weak::upgrade)) {
            queue.released.notify_one();
        }
    }
}
