//! Hold-back nodes: they keep a lock from the next request after its holder is gone, for the rest of a minimum hold, a
//! lock-delay, or the rest of a ttl that exceeds the session.
//!
//! A hold-back node is persistent, so it stays when the session ends. A client that sees one for the first time
//! measures its duration on the client's own clock. A client that comes later may use the ensemble's clock: the time
//! of the node's last write, compared with that of the client's own writes. Leaders may have different clocks, so that
//! counts only with a margin of 10 s.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use lockkeeper_core::{BootInstant, IgnorePoison};
use zookeeper_client as zk;

use crate::client::ZooKeeperClient;
use crate::codec::{HoldBackKind, HoldBackNode, StoredRequest, millis};
use crate::error::Failure;
use crate::queue::{HoldBack, QueueSnapshot};
use crate::session::Session;

/// How far the clocks of successive leaders may differ, in milliseconds.
const MAX_CLOCK_SKEW_MS: u64 = 10_000;
/// How many entries are kept before expired ones are removed.
const SWEEP_THRESHOLD: usize = 1024;

/// When this process first saw each hold-back node: the path and the zxid of its last write, and until when it holds
/// the lock back.
#[derive(Default)]
struct FirstSeen(Mutex<HashMap<(String, i64), BootInstant>>);

impl FirstSeen {
    /// For how many more milliseconds a node holds the lock back, on this process's clock.
    fn left_ms(&self, path: &str, zxid: i64, ms: u64, now: BootInstant) -> u64 {
        let mut first_seen = self.0.lock().ignore_poison();
        if first_seen.len() >= SWEEP_THRESHOLD {
            first_seen.retain(|_, until| *until > now);
        }
        let until = *first_seen.entry((path.to_owned(), zxid)).or_insert(now + Duration::from_millis(ms));
        u64::try_from(until.since(now).as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
    }
}

/// The hold-back node of a grant, if the grant needs one: a guard trusts its whole ttl, and the session may end before
/// that.
pub fn hold_back_for(session: &Session, stored: &StoredRequest) -> Option<Vec<u8>> {
    let rest = stored.ttl_ms.saturating_sub(millis(session.trusted_for()));
    (rest > 0 || stored.lock_delay_ms > 0).then(|| HoldBackNode::of_lease(stored, rest))
}

/// Reads and removes hold-back nodes.
pub struct HoldBacks {
    client: Arc<ZooKeeperClient>,
    first_seen: FirstSeen,
}

impl HoldBacks {
    pub fn new(client: Arc<ZooKeeperClient>) -> Self {
        HoldBacks { client, first_seen: FirstSeen::default() }
    }

    /// Reads the hold-back nodes whose holders are gone. Expired ones are deleted. A node whose holder has just
    /// disappeared begins to count now.
    pub async fn read(&self, session: &Session, queue: &mut QueueSnapshot) -> Result<(), Failure> {
        if queue.orphans.is_empty() {
            return Ok(());
        }
        let time = self.client.ensemble_time(session).await?;
        let orphans = std::mem::take(&mut queue.orphans);
        let reads = orphans.into_iter().map(|(path, _)| async move {
            let Some((data, stat)) = Failure::if_exists(session.get(&path).await)? else { return Ok(None) };
            let node: Option<HoldBackNode> = serde_json::from_slice(&data).ok();
            let ms = node.as_ref().map_or(0, |node| node.duration_ms);
            if node.as_ref().is_some_and(|node| node.kind == HoldBackKind::Pending) {
                let node = node.map(|node| HoldBackNode { kind: HoldBackKind::Delayed, ..node });
                let data = node.as_ref().map(|node| node.of_kind(HoldBackKind::Delayed)).unwrap_or_default();
                match session.set(&path, &data, stat.version).await {
                    Ok(stat) => {
                        self.client.connection.observe_time(stat.mtime);
                        self.first_seen.left_ms(&path, stat.mzxid, ms, self.client.clock.now());
                    }
                    Err(Failure::Rejected(_, zk::Error::BadVersion | zk::Error::NoNode)) => {}
                    Err(failure) => return Err(failure),
                }
                return Ok(Some(HoldBack { path, node, left_ms: ms }));
            }
            let end = stat.mtime.unsigned_abs() + ms;
            let left = match node.as_ref().map(|node| node.kind) {
                // The holder has released the lock, so an early end does no harm.
                Some(HoldBackKind::Lingering) | None => end.saturating_sub(time),
                _ => {
                    let own_left = self.first_seen.left_ms(&path, stat.mzxid, ms, self.client.clock.now());
                    own_left.min((end + MAX_CLOCK_SKEW_MS).saturating_sub(time))
                }
            };
            if left == 0 {
                // The first client that finds it expired deletes it. The version spares a node that was rewritten.
                let gone = session.call(session.client.delete(&path, Some(stat.version))).await;
                if !matches!(gone, Ok(()) | Err(Failure::Rejected(..))) {
                    gone?;
                }
                return Ok(None);
            }
            Ok(Some(HoldBack { path, node, left_ms: left.min(ms) }))
        });
        for hold_back in join_all(reads).await {
            queue.hold_backs.extend(hold_back?);
        }
        Ok(())
    }

    /// Deletes hold-back nodes when they have expired: a foreign waiter does not know how.
    pub fn remove_later(&self, paths: Vec<String>, after: Duration) {
        let client = self.client.clone();
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            let Ok(session) = client.connection.session().await else { return };
            for path in paths {
                let Ok((data, stat)) = session.get(&path).await else { continue };
                let time = client.connection.known_ensemble_time().unwrap_or(0);
                let over = serde_json::from_slice::<HoldBackNode>(&data).is_ok_and(|node| {
                    node.kind != HoldBackKind::Pending && stat.mtime.unsigned_abs() + node.duration_ms <= time
                });
                if over {
                    _ = session.call(session.client.delete(&path, Some(stat.version))).await;
                }
            }
        });
    }
}
