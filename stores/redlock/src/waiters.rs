//! The waiters of this process. For each lock one waiter tries, and the others queue behind it, so that many waiters cost the
//! nodes no more than one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use futures_util::future::join_all;
use lockkeeper_core::IgnorePoison;
use lockkeeper_redis::PushEvent;
use redis::cmd;
use tokio::sync::Notify;

use crate::keys::Keys;
use crate::quorum::Quorum;

/// The waiters of this process, by the key of the lock.
pub struct Waiters {
    pub quorum: Arc<Quorum>,
    pub keys: Arc<Keys>,
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
    waiters: &'a Waiters,
    key: String,
    pub lock: Arc<LockWaiters>,
}

impl Waiters {
    pub fn new(quorum: Arc<Quorum>, keys: Arc<Keys>) -> Self {
        Waiters { quorum, keys, by_key: Mutex::default() }
    }

    /// A node sent a message, or the connection to it is lost.
    pub fn on_push(&self, node: usize, event: PushEvent) {
        match event {
            PushEvent::Disconnected => self.on_disconnect(node),
            PushEvent::Message { channel, text } => {
                if let Some(key) = channel.strip_prefix(self.keys.channel("").as_bytes()) {
                    self.on_released(key, &text);
                }
            }
        }
    }

    /// A waiter for the lock with this key.
    pub fn waiter(&self, key: &str) -> WaiterHandle<'_> {
        let new = || {
            Arc::new(LockWaiters {
                poller: tokio::sync::Mutex::default(),
                wake: Notify::new(),
                released_fence: AtomicU64::new(0),
                subscribed: self.quorum.nodes.iter().map(|_| AtomicBool::new(false)).collect(),
            })
        };
        let lock = self.by_key().entry(key.into()).or_insert_with(new).clone();
        WaiterHandle { waiters: self, key: key.into(), lock }
    }

    fn by_key(&self) -> MutexGuard<'_, HashMap<String, Arc<LockWaiters>>> {
        self.by_key.lock().ignore_poison()
    }

    /// A node published the release of the lock with this key.
    fn on_released(&self, key: &[u8], fence: &[u8]) {
        let Some((key, fence)) = std::str::from_utf8(key).ok().zip(std::str::from_utf8(fence).ok()) else {
            return;
        };
        let (Some(lock), Ok(fence)) = (self.by_key().get(key).cloned(), fence.parse()) else { return };
        if lock.released_fence.fetch_max(fence, Ordering::Relaxed) < fence {
            lock.wake.notify_one();
        }
    }

    /// The connection to a node is lost, and its subscriptions with it.
    fn on_disconnect(&self, node: usize) {
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

impl WaiterHandle<'_> {
    /// Subscribes at every node where this process is not subscribed yet, in the background.
    pub fn subscribe(&self) {
        let lock = &self.lock;
        let unsubscribed = self
            .waiters
            .quorum
            .nodes
            .iter()
            .filter(|node| !lock.subscribed[node.index].swap(true, Ordering::Relaxed));
        let unsubscribed: Vec<_> = unsubscribed.cloned().collect();
        if unsubscribed.is_empty() {
            return;
        }
        let (lock, channel) = (Arc::downgrade(&self.lock), self.waiters.keys.channel(&self.key));
        self.waiters.quorum.io_thread.spawn(async move {
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
        let mut by_key = self.waiters.by_key();
        // The map's reference and this one: no other waiter is left.
        if Arc::strong_count(&self.lock) > 2 {
            return;
        }
        by_key.remove(&self.key);
        let nodes: Vec<_> = self.waiters.quorum.nodes.clone();
        let channel = self.waiters.keys.channel(&self.key);
        self.waiters.quorum.io_thread.spawn(async move {
            let calls = nodes.iter().map(|node| {
                let (node, channel) = (node.clone(), channel.clone());
                async move { node.connection.call(cmd("UNSUBSCRIBE").arg(channel)).await }
            });
            // A node that cannot be reached has lost the connection, and the subscriptions with it.
            join_all(calls).await;
        });
    }
}
