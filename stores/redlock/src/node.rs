//! One of the nodes: its connection, and what is still to be given back there.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lockkeeper_core::Moment;
use lockkeeper_host::Clock;
use lockkeeper_redis::{Failure, Link};
use redis::Value;
use tokio::sync::Notify;

use crate::script::{Call, RELEASE};

/// Releases that a node still has to hear of. More than this are left to their ttl.
const DEBTS: usize = 10_000;

/// A lock that is to be given back.
#[derive(Clone)]
pub struct Debt {
    call: Call,
    /// Then it is over anyway.
    until: Moment,
}

impl Debt {
    /// `round`: rounds after this one are left alone; 0 leaves none.
    pub fn new(keys: &[String; 2], attempt: &str, round: u64, channel: &str, until: Moment) -> Self {
        Debt { call: Call::new(&RELEASE, &keys[..]).arg(attempt).arg(round).arg(channel), until }
    }
}

/// One of the nodes.
pub struct Node {
    pub index: usize,
    pub link: Link,
    debts: Mutex<VecDeque<Debt>>,
    owing: Notify,
}

impl Node {
    pub fn new(index: usize, link: Link) -> Arc<Self> {
        Arc::new(Node { index, link, debts: Mutex::default(), owing: Notify::new() })
    }

    /// Gives a lock back, and says whether it was there. What the node does not hear of now it hears of later.
    pub async fn give_back(&self, debt: Debt) -> Result<bool, Failure> {
        match debt.call.run(&self.link).await {
            Ok(answer) => Ok(answer == Value::Int(1)),
            Err(failure) => {
                self.owe(debt);
                Err(failure)
            }
        }
    }

    fn debts(&self) -> std::sync::MutexGuard<'_, VecDeque<Debt>> {
        self.debts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn owe(&self, debt: Debt) {
        let mut debts = self.debts();
        if debts.len() == DEBTS {
            debts.pop_front();
        }
        debts.push_back(debt);
        self.owing.notify_one();
    }

    /// Sends the pending releases as soon as the node answers again, for as long as the store is open: one at a time, so
    /// that a node that is down for long costs one call a second and not one for every release that it missed.
    pub async fn pay(self: Arc<Self>, clock: Arc<dyn Clock>) {
        let mut pause = Duration::ZERO;
        loop {
            let Some(debt) = self.debts().pop_front() else {
                self.owing.notified().await;
                continue;
            };
            if debt.until <= clock.now() {
                continue;
            }
            let Err(failure) = debt.call.run(&self.link).await else {
                pause = Duration::ZERO;
                continue;
            };
            // Also a refusal can end (a full disk, a missing right, a replica that becomes the primary), so the release
            // waits for its turn again. It does so behind the others, because it may be refused for its own key.
            self.debts().push_back(debt);
            pause = (pause * 2).clamp(Duration::from_millis(50), Duration::from_secs(1));
            let node = self.link.door();
            tracing::debug!(%node, ?failure, "a release failed; next try in {pause:?}");
            tokio::time::sleep(pause).await;
        }
    }
}
