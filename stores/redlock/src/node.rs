//! One of the nodes: its connection, and what is still to be given back there.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lockkeeper_core::Moment;
use lockkeeper_host::Clock;
use lockkeeper_redis::{Failure, Link};
use redis::Value;
use tokio::sync::Notify;

use crate::quorum::millis;
use crate::script::{Call, RELEASE};

/// Releases that a node still has to hear of. More than this are left to their ttl.
const DEBTS: usize = 10_000;

/// A lock that is to be given back.
#[derive(Clone)]
pub struct Debt {
    keys: [String; 2],
    attempt: String,
    /// Rounds after this one are left alone; 0 leaves none.
    round: u64,
    /// The newest round that may have been sent before the release.
    latest: u64,
    channel: String,
    /// Then it is over anyway.
    until: Moment,
}

impl Debt {
    /// A release of one round: later rounds of the attempt are left alone.
    pub fn of_round(keys: [String; 2], attempt: &str, round: u64, channel: String, until: Moment) -> Self {
        Debt { keys, attempt: attempt.into(), round, latest: round, channel, until }
    }

    /// A release of whatever the attempt has. `latest`: the newest round that may have been sent.
    pub fn of_all(keys: [String; 2], attempt: &str, latest: u64, channel: String, until: Moment) -> Self {
        Debt { keys, attempt: attempt.into(), round: 0, latest, channel, until }
    }
}

/// One of the nodes.
pub struct Node {
    pub index: usize,
    pub link: Link,
    debts: Mutex<VecDeque<Debt>>,
    owing: Notify,
    unanswered: Mutex<Unanswered>,
    /// How long a request without a reply may take to arrive.
    late: Duration,
}

/// The attempts, in hexadecimal digits, whose requests this node may still get.
#[derive(Default)]
struct Unanswered {
    since: HashMap<String, Instant>,
    swept: Option<Instant>,
}

impl Node {
    pub fn new(index: usize, link: Link, late: Duration) -> Arc<Self> {
        let (debts, unanswered) = (Mutex::default(), Mutex::default());
        Arc::new(Node { index, link, debts, owing: Notify::new(), unanswered, late })
    }

    /// Notes that a request of this attempt had no reply: the node may get it after the attempt is released.
    pub fn note_unanswered(&self, attempt: &str) {
        let mut unanswered = self.unanswered.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if unanswered.swept.is_none_or(|swept| swept + self.late < now) {
            unanswered.swept = Some(now);
            unanswered.since.retain(|_, since| *since + self.late > now);
        }
        unanswered.since.insert(attempt.into(), now);
    }

    async fn release(&self, debt: &Debt) -> Result<Value, Failure> {
        let arrives = {
            let unanswered = self.unanswered.lock().unwrap_or_else(PoisonError::into_inner);
            unanswered.since.get(&debt.attempt).is_some_and(|since| since.elapsed() < self.late)
        };
        let arrives = if arrives { millis(self.late) } else { 0 };
        let call = Call::new(&RELEASE, &debt.keys[..]).arg(&debt.attempt).arg(debt.round);
        call.arg(&debt.channel).arg(debt.latest).arg(arrives).run(&self.link).await
    }

    /// Gives a lock back, and says whether it was there. What the node does not hear of now it hears of later.
    pub async fn give_back(&self, debt: Debt) -> Result<bool, Failure> {
        match self.release(&debt).await {
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
            let Err(failure) = self.release(&debt).await else {
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
