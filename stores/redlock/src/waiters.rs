//! The waiters of this process. For each lock one waiter tries, and the others queue behind it, so that many waiters cost the
//! nodes no more than one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::join_all;
use redis::cmd;
use tokio::sync::Notify;

use crate::store::RedlockInner;

/// The waiters of this process, by the key of the lock.
#[derive(Default)]
pub struct Waiters {
    by_key: Mutex<HashMap<String, Arc<LockWaiters>>>,
}

/// The waiters of one lock.
pub struct LockWaiters {
    /// The waiter that has it tries; the others wait for it in the order in which they came.
    poller: tokio::sync::Mutex<()>,
    wake: Notify,
    /// The highest fence whose release was published. Every node publishes each release.
    released_fence: AtomicU64,
    /// Which nodes this process has subscribed at.
    subscribed: Vec<AtomicBool>,
}

/// One waiter. Dropping the last one of a lock unsubscribes.
pub struct WaiterHandle<'a> {
    inner: &'a Arc<RedlockInner>,
    key: String,
    pub lock: Arc<LockWaiters>,
}

impl Waiters {
    fn by_key(&self) -> MutexGuard<'_, HashMap<String, Arc<LockWaiters>>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A node published the release of the lock with this key.
    pub fn on_released(&self, key: &[u8], fence: &[u8]) {
        let Some((key, fence)) = std::str::from_utf8(key).ok().zip(std::str::from_utf8(fence).ok()) else {
            return;
        };
        let (Some(lock), Ok(fence)) = (self.by_key().get(key).cloned(), fence.parse()) else { return };
        if lock.released_fence.fetch_max(fence, Ordering::Relaxed) < fence {
            lock.wake.notify_one();
        }
    }

    /// The connection to a node is lost, and its subscriptions with it.
    pub fn on_disconnect(&self, node: usize) {
        for lock in self.by_key().values() {
            lock.subscribed[node].store(false, Ordering::Relaxed);
        }
    }
}

impl LockWaiters {
    /// Waits until this waiter is the one that tries. It is, until the guard is dropped.
    pub async fn become_poller(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.poller.lock().await
    }

    /// Waits for a published release.
    pub async fn woken(&self) {
        self.wake.notified().await;
    }
}

impl RedlockInner {
    /// A waiter for the lock with this key.
    pub fn waiter(self: &Arc<Self>, key: &str) -> WaiterHandle<'_> {
        let new = || {
            Arc::new(LockWaiters {
                poller: tokio::sync::Mutex::default(),
                wake: Notify::new(),
                released_fence: AtomicU64::new(0),
                subscribed: self.nodes.iter().map(|_| AtomicBool::new(false)).collect(),
            })
        };
        let lock = self.waiters.by_key().entry(key.into()).or_insert_with(new).clone();
        WaiterHandle { inner: self, key: key.into(), lock }
    }
}

impl WaiterHandle<'_> {
    /// Subscribes at every node where this process is not subscribed yet, in the background.
    pub fn subscribe(&self) {
        let lock = &self.lock;
        let unsubscribed =
            self.inner.nodes.iter().filter(|node| !lock.subscribed[node.index].swap(true, Ordering::Relaxed));
        let unsubscribed: Vec<_> = unsubscribed.cloned().collect();
        if unsubscribed.is_empty() {
            return;
        }
        let (lock, channel) = (Arc::downgrade(&self.lock), self.inner.channel(&self.key));
        self.inner.io_thread.spawn(async move {
            let calls = unsubscribed.iter().map(|node| {
                let (node, channel) = (node.clone(), channel.clone());
                async move { (node.index, node.connection.call(cmd("SUBSCRIBE").arg(channel)).await.is_ok()) }
            });
            let replies = join_all(calls).await;
            let Some(lock) = lock.upgrade() else { return };
            for (node, _) in replies.iter().filter(|(_, subscribed)| !subscribed) {
                lock.subscribed[*node].store(false, Ordering::Relaxed);
            }
            // A release before the subscription was missed, so the waiter tries once. Without a new subscription it is not woken: it
            // would subscribe again, fail again, and never pause.
            if replies.iter().any(|(_, subscribed)| *subscribed) {
                lock.wake.notify_one();
            }
        });
    }
}

impl Drop for WaiterHandle<'_> {
    fn drop(&mut self) {
        let mut by_key = self.inner.waiters.by_key();
        // The map's reference and this one: no other waiter is left.
        if Arc::strong_count(&self.lock) > 2 {
            return;
        }
        by_key.remove(&self.key);
        let nodes: Vec<_> = self.inner.nodes.clone();
        let channel = self.inner.channel(&self.key);
        self.inner.io_thread.spawn(async move {
            let calls = nodes.iter().map(|node| {
                let (node, channel) = (node.clone(), channel.clone());
                async move { node.connection.call(cmd("UNSUBSCRIBE").arg(channel)).await }
            });
            // A node that cannot be reached has lost the connection, and the subscriptions with it.
            join_all(calls).await;
        });
    }
}
