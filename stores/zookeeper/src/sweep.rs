//! The sweep: removes what dead processes have left, which is hold-back nodes of locks that no client uses any more,
//! and chunks that no record names. All processes of a store share one interval: the process that finds it over writes
//! a node, and sweeps. If it ends before its sweep does, another process sweeps a minute later.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper_core::LockName;
use lockkeeper_host::random_128;
use tokio::sync::Notify;
use zookeeper_client::{self as zk, CreateMode, Stat};

use crate::client::ZooKeeperClient;
use crate::error::Failure;
use crate::hold_back::HoldBacks;
use crate::keys;
use crate::read_queue::QueueReader;
use crate::record_chunks::ChunkStore;
use crate::session::Session;

/// How long a process that has begun to sweep keeps others from it.
const CLAIM: Duration = Duration::from_secs(60);
/// The content of the node while a process sweeps; later the node is empty.
const SWEEPING: &[u8] = b"sweeping";

/// Sweeps for one process.
pub struct Sweeper {
    pub client: Arc<ZooKeeperClient>,
    pub hold_backs: Arc<HoldBacks>,
    pub queues: Arc<QueueReader>,
    pub chunks: Arc<ChunkStore>,
    /// The interval.
    pub every: Duration,
    /// Notified when the store is opened and the interval is over: most processes may live for seconds only.
    pub overdue: Arc<Notify>,
}

/// Whether the interval is over. The first process on a path begins the first interval.
pub async fn is_overdue(client: &ZooKeeperClient, every: Duration) -> Result<bool, Failure> {
    let session = client.connection.session().await?;
    let path = client.keys.sweep();
    match Failure::if_exists(session.get(&path).await)? {
        Some((data, stat)) => Ok(is_over(&data, stat.mtime, every, client.ensemble_time(&session).await?)),
        None => {
            let mode = CreateMode::Persistent.with_acls(client.connection.acls());
            won(session.call(session.client.create(&path, b"", &mode)).await)?;
            Ok(false)
        }
    }
}

/// Whether the interval is over, or a process ended while it was sweeping.
fn is_over(data: &[u8], mtime: i64, every: Duration, now: u64) -> bool {
    let pause = if data == SWEEPING { every.min(CLAIM) } else { every };
    mtime.unsigned_abs().saturating_add(crate::codec::millis(pause)) <= now
}

impl Sweeper {
    /// Sweeps once per interval for as long as the store is open.
    pub async fn run(self) {
        loop {
            // Another process may have ended while it was sweeping, so this one looks more often than once per interval.
            tokio::select! {
                () = tokio::time::sleep(self.every.min(CLAIM)) => {}
                () = self.overdue.notified() => {}
            }
            if let Err(failure) = self.sweep_once().await {
                tracing::debug!(
                    ?failure,
                    "the sweep failed; nodes of dead processes stay until the next sweep"
                );
            }
        }
    }

    async fn sweep_once(&self) -> Result<(), Failure> {
        let session = self.client.connection.session().await?;
        let now = self.client.ensemble_time(&session).await?;
        let Some(mut claim) = self.claim_sweep(&session, now).await? else { return Ok(()) };
        let swept = self.sweep_all(&session, now, &mut claim).await;
        // Also after a rejected request, which would be rejected again. Not if another process has begun meanwhile.
        won(session.set(&self.client.keys.sweep(), b"", claim.version).await)?;
        swept
    }

    async fn sweep_all(&self, session: &Session, now: u64, claim: &mut Claim) -> Result<(), Failure> {
        let keys = Failure::if_exists(session.children(&self.client.keys.chunks()).await)?;
        for key in names(keys) {
            if !self.keep_claim(session, claim).await? {
                return Ok(());
            }
            // Longer than any write takes. The transaction that names chunks checks that they exist in any case.
            let since = now.saturating_sub(crate::codec::millis(self.every));
            self.chunks.sweep_chunks(session, &key, since).await?;
        }
        let locks = Failure::if_exists(session.children(self.client.keys.root()).await)?;
        for name in names(locks) {
            if !self.keep_claim(session, claim).await? {
                return Ok(());
            }
            let mut queue = self.queues.list_queue(session, &name).await?;
            // A hold-back node whose holder has just disappeared begins to count now, as for any other reader.
            self.hold_backs.read(session, &mut queue).await?;
            for hold_back in queue.hold_backs {
                let left = Duration::from_millis(hold_back.left_ms);
                if left < self.every {
                    self.hold_backs.remove_later(vec![hold_back.path], left + Duration::from_millis(5));
                }
            }
        }
        Ok(())
    }

    /// Writes the node, if the interval is over and no other process sweeps.
    async fn claim_sweep(&self, session: &Session, now: u64) -> Result<Option<Claim>, Failure> {
        let path = self.client.keys.sweep();
        match Failure::if_exists(session.get(&path).await)? {
            Some((data, stat)) if is_over(&data, stat.mtime, self.every, now) => {
                self.write_claim(session, stat.version).await
            }
            Some(_) => Ok(None),
            // An administrator has deleted it.
            None => is_overdue(&self.client, self.every).await.map(|_| None),
        }
    }

    async fn write_claim(&self, session: &Session, version: i32) -> Result<Option<Claim>, Failure> {
        let written = won(session.set(&self.client.keys.sweep(), SWEEPING, version).await)?;
        Ok(written.map(|stat| Claim { version: stat.version, at: Instant::now() }))
    }

    /// Extends a claim that lasts for long. False: another process has taken over.
    async fn keep_claim(&self, session: &Session, claim: &mut Claim) -> Result<bool, Failure> {
        if claim.at.elapsed() < CLAIM / 3 {
            return Ok(true);
        }
        let Some(extended) = self.write_claim(session, claim.version).await? else { return Ok(false) };
        *claim = extended;
        Ok(true)
    }
}

/// The node as the process that sweeps has written it.
struct Claim {
    version: i32,
    at: Instant,
}

/// `None`: another process was faster.
fn won<T>(written: Result<T, Failure>) -> Result<Option<T>, Failure> {
    match written {
        Ok(written) => Ok(Some(written)),
        Err(Failure::Rejected(_, zk::Error::NodeExists | zk::Error::BadVersion | zk::Error::NoNode)) => {
            Ok(None)
        }
        Err(failure) => Err(failure),
    }
}

/// The names of these nodes, beginning with any of them: a process that ends while it sweeps has swept others than the last one.
fn names(found: Option<(Vec<String>, Stat)>) -> Vec<LockName> {
    let mut children = found.map_or(Vec::new(), |(children, _)| children);
    let first = u128::from_be_bytes(random_128()) % children.len().max(1) as u128;
    children.rotate_left(first as usize);
    children.iter().filter_map(|child| keys::decode(child)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_that_was_not_finished_is_done_again_before_the_interval_is_over() {
        let (hour, minute) = (Duration::from_secs(3600), 60_000);
        assert!(!is_over(SWEEPING, 0, hour, minute - 1));
        assert!(is_over(SWEEPING, 0, hour, minute));
        assert!(!is_over(b"", 0, hour, 60 * minute - 1));
        assert!(is_over(b"", 0, hour, 60 * minute));
        assert!(is_over(SWEEPING, 0, Duration::from_secs(1), 1000));
    }
}
