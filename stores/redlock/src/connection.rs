//! One node: its connection, and the releases that it has not confirmed.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lockkeeper_core::{BootInstant, IgnorePoison};
use lockkeeper_host::Clock;
use lockkeeper_redis::{Connection, Failure};
use redis::Value;
use tokio::sync::Notify;

use crate::statements::{RELEASE, ScriptCall, millis};

/// Releases that a node still has to hear of. More than this are left to their ttl.
const MAX_PENDING_RELEASES: usize = 10_000;

/// A release to send to a node.
#[derive(Clone)]
pub struct NodeRelease {
    keys: [String; 2],
    attempt: String,
    /// Rounds after this one are left alone; 0 leaves none.
    round: u64,
    /// The newest round that may have been sent before the release.
    latest: u64,
    channel: String,
    /// Then it is over anyway.
    until: BootInstant,
}

impl NodeRelease {
    /// A release of one round: later rounds of the attempt are left alone.
    pub fn of_round(
        keys: [String; 2],
        attempt: &str,
        round: u64,
        channel: String,
        until: BootInstant,
    ) -> Self {
        NodeRelease { keys, attempt: attempt.into(), round, latest: round, channel, until }
    }

    /// A release of whatever the attempt has. `latest`: the newest round that may have been sent.
    pub fn of_all(
        keys: [String; 2],
        attempt: &str,
        latest: u64,
        channel: String,
        until: BootInstant,
    ) -> Self {
        NodeRelease { keys, attempt: attempt.into(), round: 0, latest, channel, until }
    }
}

/// One of the nodes.
pub struct RedlockNode {
    pub index: usize,
    pub connection: Connection,
    pending_releases: Mutex<VecDeque<NodeRelease>>,
    enqueued: Notify,
    unanswered: Mutex<UnansweredAttempts>,
    /// How long a request without a reply may take to arrive.
    late: Duration,
}

/// The attempts, in hexadecimal digits, whose requests this node may still get.
#[derive(Default)]
struct UnansweredAttempts {
    since: HashMap<String, Instant>,
    swept: Option<Instant>,
}

impl RedlockNode {
    pub fn new(index: usize, connection: Connection, late: Duration) -> Arc<Self> {
        let (pending_releases, unanswered) = (Mutex::default(), Mutex::default());
        Arc::new(RedlockNode {
            index,
            connection,
            pending_releases,
            enqueued: Notify::new(),
            unanswered,
            late,
        })
    }

    /// Notes that a request of this attempt had no reply: the node may get it after the attempt is released.
    pub fn note_unanswered(&self, attempt: &str) {
        let mut unanswered = self.unanswered.lock().ignore_poison();
        let now = Instant::now();
        if unanswered.swept.is_none_or(|swept| swept + self.late < now) {
            unanswered.swept = Some(now);
            unanswered.since.retain(|_, since| *since + self.late > now);
        }
        unanswered.since.insert(attempt.into(), now);
    }

    async fn release(&self, release: &NodeRelease) -> Result<Value, Failure> {
        let arrives = {
            let unanswered = self.unanswered.lock().ignore_poison();
            unanswered.since.get(&release.attempt).is_some_and(|since| since.elapsed() < self.late)
        };
        let arrives = if arrives { millis(self.late) } else { 0 };
        let call = ScriptCall::new(&RELEASE, &release.keys[..]).arg(&release.attempt).arg(release.round);
        call.arg(&release.channel).arg(release.latest).arg(arrives).run(&self.connection).await
    }

    /// Releases a lock and returns whether the node had it. A release that fails is sent again in the background.
    pub async fn release_or_enqueue(&self, release: NodeRelease) -> Result<bool, Failure> {
        match self.release(&release).await {
            Ok(answer) => Ok(answer == Value::Int(1)),
            Err(failure) => {
                self.enqueue(release);
                Err(failure)
            }
        }
    }

    fn pending_releases(&self) -> std::sync::MutexGuard<'_, VecDeque<NodeRelease>> {
        self.pending_releases.lock().ignore_poison()
    }

    fn enqueue(&self, release: NodeRelease) {
        let mut pending_releases = self.pending_releases();
        if pending_releases.len() == MAX_PENDING_RELEASES {
            pending_releases.pop_front();
        }
        pending_releases.push_back(release);
        self.enqueued.notify_one();
    }

    /// Sends the pending releases as soon as the node answers again, for as long as the store is open: one at a time, so
    /// that a node that is down for long costs one call a second and not one for every release that it missed.
    pub async fn drain(self: Arc<Self>, clock: Arc<dyn Clock>) {
        let mut pause = Duration::ZERO;
        loop {
            let Some(release) = self.pending_releases().pop_front() else {
                self.enqueued.notified().await;
                continue;
            };
            if release.until <= clock.now() {
                continue;
            }
            let Err(failure) = self.release(&release).await else {
                pause = Duration::ZERO;
                continue;
            };
            // Also a refusal can end (a full disk, a missing right, a replica that becomes the primary), so the release
            // waits for its turn again. It does so behind the others, because it may be refused for its own key.
            self.pending_releases().push_back(release);
            pause = (pause * 2).clamp(Duration::from_millis(50), Duration::from_secs(1));
            let node = self.connection.endpoint();
            tracing::debug!(%node, ?failure, "a release failed; next try in {pause:?}");
            tokio::time::sleep(pause).await;
        }
    }
}
