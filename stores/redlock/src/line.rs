//! Those of this process who wait. For each lock one of them tries, for all: the others stand behind it, so a crowd
//! costs the nodes no more than one waiter does.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::join_all;
use redis::cmd;
use tokio::sync::Notify;

use crate::store::Shared;

/// Everybody of this process who waits, by the key of the lock.
#[derive(Default)]
pub struct Line {
    gates: Mutex<HashMap<String, Arc<Gate>>>,
}

/// Where those stand who wait for one lock.
pub struct Gate {
    /// Whoever has it tries; the others wait for it, in the order in which they came.
    turn: tokio::sync::Mutex<()>,
    hint: Notify,
    /// The highest fence whose release we were told of: every node tells it.
    freed: AtomicU64,
    /// Which nodes will tell us.
    told_by: Vec<AtomicBool>,
}

/// A place at a gate.
pub struct Place<'a> {
    shared: &'a Arc<Shared>,
    key: String,
    pub gate: Arc<Gate>,
}

impl Line {
    fn gates(&self) -> MutexGuard<'_, HashMap<String, Arc<Gate>>> {
        self.gates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A node said that the lock with this key was given back.
    pub fn freed(&self, key: &[u8], fence: &[u8]) {
        let Some((key, fence)) = std::str::from_utf8(key).ok().zip(std::str::from_utf8(fence).ok()) else {
            return;
        };
        let (Some(gate), Ok(fence)) = (self.gates().get(key).cloned(), fence.parse()) else { return };
        if gate.freed.fetch_max(fence, Ordering::Relaxed) < fence {
            gate.hint.notify_one();
        }
    }

    /// The connection to a node is gone, and what it was to tell us with it.
    pub fn deaf(&self, node: usize) {
        for gate in self.gates().values() {
            gate.told_by[node].store(false, Ordering::Relaxed);
        }
    }
}

impl Gate {
    /// Ends when it is this one's turn to try. It is, until what comes back is dropped.
    pub async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// Ends when it is worth trying.
    pub async fn hint(&self) {
        self.hint.notified().await;
    }
}

impl Shared {
    /// A place among those who wait for the lock with this key.
    pub fn join(self: &Arc<Self>, key: &str) -> Place<'_> {
        let new = || {
            Arc::new(Gate {
                turn: tokio::sync::Mutex::default(),
                hint: Notify::new(),
                freed: AtomicU64::new(0),
                told_by: self.nodes.iter().map(|_| AtomicBool::new(false)).collect(),
            })
        };
        let gate = self.line.gates().entry(key.into()).or_insert_with(new).clone();
        Place { shared: self, key: key.into(), gate }
    }
}

impl Place<'_> {
    /// Sees to it that every node that can be reached tells us of releases. Does not wait for that.
    pub fn listen(&self) {
        let gate = &self.gate;
        let deaf =
            self.shared.nodes.iter().filter(|node| !gate.told_by[node.index].swap(true, Ordering::Relaxed));
        let deaf: Vec<_> = deaf.cloned().collect();
        if deaf.is_empty() {
            return;
        }
        let (gate, channel) = (Arc::downgrade(&self.gate), self.shared.channel(&self.key));
        self.shared.reactor.spawn(async move {
            let calls = deaf.iter().map(|node| {
                let (node, channel) = (node.clone(), channel.clone());
                async move { (node.index, node.link.call(cmd("SUBSCRIBE").arg(channel)).await.is_ok()) }
            });
            let heard = join_all(calls).await;
            let Some(gate) = gate.upgrade() else { return };
            for (node, _) in heard.iter().filter(|(_, heard)| !heard) {
                gate.told_by[*node].store(false, Ordering::Relaxed);
            }
            // What was published before the subscription was not heard. Without a new subscription nothing was missed:
            // a waiter that is woken now would subscribe again, fail again, and never pause.
            if heard.iter().any(|(_, heard)| *heard) {
                gate.hint.notify_one();
            }
        });
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut gates = self.shared.line.gates();
        // The map's and ours: nobody else waits.
        if Arc::strong_count(&self.gate) > 2 {
            return;
        }
        gates.remove(&self.key);
        let nodes: Vec<_> = self.shared.nodes.clone();
        let channel = self.shared.channel(&self.key);
        self.shared.reactor.spawn(async move {
            let calls = nodes.iter().map(|node| {
                let (node, channel) = (node.clone(), channel.clone());
                async move { node.link.call(cmd("UNSUBSCRIBE").arg(channel)).await }
            });
            // A node that does not hear of it has lost the connection, and what was subscribed to with it.
            join_all(calls).await;
        });
    }
}
