//! Those of this process who ask: so that whoever takes an ask back reaches it, and a crowd of waiters costs no more than one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use lockkeeper_core::{Attempt, LockName};
use tokio::sync::{Notify, watch};

/// Everybody of this process who asks.
#[derive(Debug, Default)]
pub struct Errands {
    asks: Mutex<HashMap<Attempt, Weak<Errand>>>,
    gates: Mutex<HashMap<LockName, Weak<Gate>>>,
}

/// One ask, for as long as somebody waits for its answer.
#[derive(Debug, Default)]
pub struct Errand {
    withdrawn: watch::Sender<bool>,
}

/// Where those stand who wait for one lock.
#[derive(Debug, Default)]
pub struct Gate {
    /// Whoever has it tries; the others wait for it, in the order in which they came.
    turn: tokio::sync::Mutex<()>,
    /// Somebody of this process gave the lock back.
    hint: Notify,
    /// Requests and releases that are to be written, in the order in which they came.
    queue: tokio::sync::Mutex<()>,
    /// The one step of this process that is writing: of two at once one would be refused. A renewal passes the queue.
    writing: tokio::sync::Mutex<()>,
}

/// The right of one step to write, until this is dropped.
#[derive(Debug)]
pub struct WriteTurn<'a> {
    _queue: Option<tokio::sync::MutexGuard<'a, ()>>,
    _writing: tokio::sync::MutexGuard<'a, ()>,
}

impl Errand {
    pub fn is_withdrawn(&self) -> bool {
        *self.withdrawn.borrow()
    }

    /// Ends when the ask is taken back.
    pub async fn withdrawn(&self) {
        // The sender is in self: it cannot be gone.
        _ = self.withdrawn.subscribe().wait_for(|withdrawn| *withdrawn).await;
    }
}

impl Gate {
    /// Ends when it is this one's turn to try. It is, until what comes back is dropped.
    pub async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// The right to write, if no other step has it or waits for it.
    pub fn try_write(&self) -> Option<WriteTurn<'_>> {
        Some(WriteTurn { _queue: Some(self.queue.try_lock().ok()?), _writing: self.writing.try_lock().ok()? })
    }

    /// Waits for the right to write. What is `urgent` waits for one other step, or two, and not for the queue.
    pub async fn write(&self, urgent: bool) -> WriteTurn<'_> {
        let queue = if urgent { None } else { Some(self.queue.lock().await) };
        WriteTurn { _queue: queue, _writing: self.writing.lock().await }
    }

    /// Ends when it is worth trying.
    pub async fn hint(&self) {
        self.hint.notified().await;
    }
}

impl Errands {
    fn asks(&self) -> MutexGuard<'_, HashMap<Attempt, Weak<Errand>>> {
        self.asks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn gates(&self) -> MutexGuard<'_, HashMap<LockName, Weak<Gate>>> {
        self.gates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The errand of an attempt: the one that is under way, or a new one.
    pub fn begin(&self, attempt: Attempt) -> Arc<Errand> {
        let mut asks = self.asks();
        if let Some(known) = asks.get(&attempt).and_then(Weak::upgrade)
            && !known.is_withdrawn()
        {
            return known;
        }
        asks.retain(|_, errand| errand.strong_count() > 0);
        let errand = Arc::new(Errand::default());
        asks.insert(attempt, Arc::downgrade(&errand));
        errand
    }

    /// Takes an ask back, and says whether somebody was still asking.
    pub fn withdraw(&self, attempt: Attempt) -> bool {
        let Some(errand) = self.asks().remove(&attempt).and_then(|errand| errand.upgrade()) else {
            return false;
        };
        errand.withdrawn.send_replace(true);
        true
    }

    /// Where those wait who want this lock.
    pub fn gate(&self, name: &LockName) -> Arc<Gate> {
        let mut gates = self.gates();
        if let Some(gate) = gates.get(name).and_then(Weak::upgrade) {
            return gate;
        }
        gates.retain(|_, gate| gate.strong_count() > 0);
        let gate = Arc::new(Gate::default());
        gates.insert(name.clone(), Arc::downgrade(&gate));
        gate
    }

    /// Somebody of this process gave these back.
    pub fn freed<'a>(&self, names: impl Iterator<Item = &'a LockName>) {
        let gates = self.gates();
        for gate in names.filter_map(|name| gates.get(name).and_then(Weak::upgrade)) {
            gate.hint.notify_one();
        }
    }
}
