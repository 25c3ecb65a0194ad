//! The sweep: removes what dead processes have left, which is hold-back nodes of locks that no client uses any more,
//! and chunks that no record names. All processes of a store share one interval: the process that finds it over writes
//! a node, and sweeps.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::LockName;
use zookeeper_client::{self as zk, CreateMode};

use crate::client::ZooKeeperClient;
use crate::error::Failure;
use crate::hold_back::HoldBacks;
use crate::keys;
use crate::read_queue::QueueReader;
use crate::record_chunks::ChunkStore;
use crate::session::Session;

/// The first sweep comes no later than this, so that processes that run for minutes sweep too.
const FIRST_SWEEP: Duration = Duration::from_secs(60);

/// Sweeps for one process.
pub struct Sweeper {
    pub client: Arc<ZooKeeperClient>,
    pub hold_backs: Arc<HoldBacks>,
    pub queues: Arc<QueueReader>,
    pub chunks: Arc<ChunkStore>,
    /// The interval.
    pub every: Duration,
}

impl Sweeper {
    /// Sweeps once per interval for as long as the store is open.
    pub async fn run(self) {
        let every = self.every;
        let mut pause = every.min(FIRST_SWEEP);
        loop {
            tokio::time::sleep(pause).await;
            pause = every;
            if let Err(failure) = self.sweep_once().await {
                tracing::debug!(
                    ?failure,
                    "the sweep failed; nodes of dead processes stay until the next interval"
                );
            }
        }
    }

    async fn sweep_once(&self) -> Result<(), Failure> {
        let session = self.client.connection.session().await?;
        let now = self.client.ensemble_time(&session).await?;
        if !self.claim_sweep(&session, now).await? {
            return Ok(());
        }
        let keys = Failure::if_exists(session.children(&self.client.keys.chunks()).await)?;
        for key in names(keys) {
            // Longer than any write takes. The transaction that names chunks checks that they exist in any case.
            let since = now.saturating_sub(crate::codec::millis(self.every));
            self.chunks.sweep_chunks(&session, &key, since).await?;
        }
        let locks = Failure::if_exists(session.children(self.client.keys.root()).await)?;
        for name in names(locks) {
            let mut queue = self.queues.list_queue(&session, &name).await?;
            // A hold-back node whose holder has just disappeared begins to count now, as for any other reader.
            self.hold_backs.read(&session, &mut queue).await?;
            for hold_back in queue.hold_backs {
                let left = Duration::from_millis(hold_back.left_ms);
                if left < self.every {
                    self.hold_backs.remove_later(vec![hold_back.path], left + Duration::from_millis(5));
                }
            }
        }
        Ok(())
    }

    /// Whether the interval is over, and no other process has begun to sweep.
    async fn claim_sweep(&self, session: &Session, now: u64) -> Result<bool, Failure> {
        let path = self.client.keys.sweep();
        let Some((_, stat)) = Failure::if_exists(session.get(&path).await)? else {
            let mode = CreateMode::Persistent.with_acls(self.client.connection.acls());
            return won(session.call(session.client.create(&path, b"", &mode)).await.map(drop));
        };
        let every = crate::codec::millis(self.every);
        if stat.mtime.unsigned_abs().saturating_add(every) > now {
            return Ok(false);
        }
        won(session.set(&path, b"", stat.version).await.map(drop))
    }
}

fn won(written: Result<(), Failure>) -> Result<bool, Failure> {
    match written {
        Ok(()) => Ok(true),
        Err(Failure::Rejected(_, zk::Error::NodeExists | zk::Error::BadVersion | zk::Error::NoNode)) => {
            Ok(false)
        }
        Err(failure) => Err(failure),
    }
}

fn names(found: Option<(Vec<String>, zk::Stat)>) -> Vec<LockName> {
    found.iter().flat_map(|(children, _)| children).filter_map(|child| keys::decode(child)).collect()
}
