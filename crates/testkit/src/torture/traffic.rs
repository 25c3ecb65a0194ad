//! The plan of one client process: which locks it takes, and how.

use std::path::{Path, PathBuf};
use std::time::Duration;

use lockkeeper_core::Mode;
use serde::{Deserialize, Serialize};

use super::TortureRng;

/// How many names the tasks of [`TrafficKind::Many`] share.
const MANY: u64 = 6;
/// The lock of the requests that do not wait.
const TRY: &str = "try";

/// The work that one task of a client repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrafficKind {
    /// Short holds of one lock that all clients want.
    Hot,
    /// Holds of the same lock for up to two and a half ttls. Some holders go on writing after they have lost the lock.
    Slow,
    /// Short holds of a few locks.
    Many,
    /// Shared holds, and now and then an exclusive one.
    Shared,
    /// One of two permits.
    Permits,
    /// Requests that do not wait.
    TryOnly,
    /// Waiters that stay in the queue for as long as it takes.
    Queue,
}

/// The work of one client process. It reaches the process on its standard input, because a URL may contain a password.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrafficPlan {
    /// The URL of the store.
    pub store: String,
    /// Where the history, the pauses and the resources are.
    pub dir: PathBuf,
    /// The name of the process in the history.
    pub proc: String,
    /// The prefix of the names of all its locks.
    pub prefix: String,
    /// The seed of the run.
    pub seed: u64,
    /// The ttl of every request.
    pub ttl_ms: u64,
    /// One task for each of these.
    pub tasks: Vec<TrafficKind>,
    /// The pause of a task between two holds.
    pub rest_ms: u64,
    /// How many of 100 slow holders go on writing after they have lost the lock.
    pub careless_percent: u64,
}

/// One hold, as a task plans it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlannedHold {
    pub lock: String,
    pub mode: Mode,
    /// `None`: the request does not wait.
    pub wait: Option<Duration>,
    pub span: Duration,
    /// The holder goes on after it has lost the lock.
    pub careless: bool,
}

impl TrafficPlan {
    /// The ttl of every request.
    pub fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms)
    }

    pub(super) fn history(&self) -> PathBuf {
        history_path(&self.dir)
    }

    pub(super) fn pauses(&self) -> PathBuf {
        pauses_path(&self.dir)
    }

    /// The next hold of a task of this kind.
    pub(super) fn next_hold(&self, kind: TrafficKind, rng: &mut TortureRng) -> PlannedHold {
        let ms = Duration::from_millis;
        let ttl = self.ttl();
        let (lock, mode) = match kind {
            TrafficKind::Hot | TrafficKind::Slow | TrafficKind::Queue => ("hot".to_owned(), Mode::Exclusive),
            TrafficKind::TryOnly => (TRY.to_owned(), Mode::Exclusive),
            TrafficKind::Many => (format!("many/{}", rng.below(MANY)), Mode::Exclusive),
            TrafficKind::Shared => {
                ("shared".to_owned(), if rng.percent(75) { Mode::Shared } else { Mode::Exclusive })
            }
            TrafficKind::Permits => ("permits".to_owned(), Mode::Permit(2)),
        };
        let span = match kind {
            TrafficKind::Slow => rng.duration(ttl / 2, ttl * 5 / 2),
            TrafficKind::Queue => ms(1),
            _ => rng.duration(ms(2), ms(40)),
        };
        let wait = match kind {
            TrafficKind::TryOnly => None,
            TrafficKind::Queue => Some(Duration::from_secs(600)),
            _ => Some(rng.duration(ms(300), ms(3000))),
        };
        let careless = kind == TrafficKind::Slow && rng.percent(self.careless_percent);
        PlannedHold { lock: format!("{}{lock}", self.prefix), mode, wait, span, careless }
    }
}

/// Whether the requests for this lock wait.
pub(super) fn waits(lock: &str) -> bool {
    !lock.ends_with(TRY)
}

/// The history of a run.
pub(super) fn history_path(dir: &Path) -> PathBuf {
    dir.join("history.jsonl")
}

/// The pauses that the clients noticed.
pub(super) fn pauses_path(dir: &Path) -> PathBuf {
    dir.join("pauses.jsonl")
}

/// The resource that a lock protects, and its twin that checks no fence.
pub(super) fn resource_paths(dir: &Path, lock: &str) -> [PathBuf; 2] {
    let file: String = lock.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    ["fenced", "unfenced"].map(|kind| dir.join(format!("{kind}-{file}")))
}
