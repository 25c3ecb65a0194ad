//! The fence base. A fence is a zxid plus the base: a number that is stored once, and checked by every transaction
//! that grants. So fences begin at the clock, and keep growing when an administrator deletes everything.
//!
//! The base is the name of a node and not its content: a base that was deleted and created again has another name, so
//! a transaction that checks the old one is rejected. The content of the node is the time until which a client
//! watches.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use lockkeeper_core::{Error, Fence, IgnorePoison, Result};
use zookeeper_client as zk;

use crate::client::ZooKeeperClient;
use crate::error::Failure;
use crate::session::Session;
use crate::statements::{ANY, TxnOp, check, create, delete, set};

/// The fence base as this process knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KnownBase {
    pub number: u64,
    /// The data version of its node. It changes when a client begins to watch.
    pub version: i32,
    /// Until when a client watches, in milliseconds of the ensemble's clock.
    pub watched: u64,
}

/// The fence of a write. The upper half of a zxid counts elections: about 1.6 million of them fit.
pub fn fence_at(base: u64, zxid: i64) -> Result<Fence> {
    let fence = base.saturating_add(zxid.unsigned_abs());
    Fence::new(fence).map_err(|_| Error::Limited("this store has used all fences up to 2^53".into()))
}

/// The fence base as this process knows it, and the fences that it has seen.
pub struct FenceBase {
    client: Arc<ZooKeeperClient>,
    /// The number that is added to a zxid to make a fence.
    known: Mutex<KnownBase>,
    highest_fence_seen: AtomicU64,
}

impl FenceBase {
    pub fn new(client: Arc<ZooKeeperClient>) -> Self {
        FenceBase { client, known: Mutex::default(), highest_fence_seen: AtomicU64::new(0) }
    }

    /// The base as this process knows it.
    pub fn get(&self) -> KnownBase {
        *self.known.lock().ignore_poison()
    }

    /// The check that the base has not changed, and that no client has begun to watch.
    pub fn check(&self, base: KnownBase) -> TxnOp {
        check(self.client.keys.base(base.number), base.version)
    }

    /// The highest fence that this process has seen.
    pub fn highest_fence_seen(&self) -> u64 {
        self.highest_fence_seen.load(Ordering::Relaxed)
    }

    pub fn observe_fence(&self, fence: Fence) {
        self.highest_fence_seen.fetch_max(fence.get(), Ordering::Relaxed);
    }

    /// Reads the base. A missing base is created, and a base that would allow a lower fence is raised: an
    /// administrator who deletes or restores nodes does not intend every fenced resource to refuse its writers.
    pub async fn refresh(&self, session: &Session, suspect: bool) -> Result<(), Failure> {
        let highest_fence_seen = self.highest_fence_seen();
        loop {
            let (known, found) = (self.get(), self.bases(session).await?.into_iter().max());
            // The base is another than before: the client that created it may not know the highest fence.
            let may_be_stale =
                found.is_none() || suspect || (known.number != 0 && found != Some(known.number));
            let usable = match found.filter(|_| !may_be_stale) {
                Some(number) => Some(number),
                None => self.raise(session, highest_fence_seen).await?,
            };
            if let Some(number) = usable
                && self.adopt(session, number).await?
            {
                return Ok(());
            }
        }
    }

    /// The bases that exist: one, as a rule.
    async fn bases(&self, session: &Session) -> Result<Vec<u64>, Failure> {
        let bases = self.client.keys.bases();
        loop {
            match session.children(&bases).await {
                Ok((children, _)) => {
                    let numbers = children.iter().filter_map(|child| child.parse::<u64>().ok());
                    return Ok(numbers.filter(|n| *n < 1 << 53).collect());
                }
                Err(failure) if failure.is(&zk::Error::NoNode) => {
                    self.client.create_root(session).await?;
                    session.create_with_parents(&bases, self.client.connection.acls()).await?;
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Returns a base under which no fence is lower than `highest_fence_seen`: the existing one, or a new one. `None`:
    /// another client changed the bases at the same time.
    async fn raise(&self, session: &Session, highest_fence_seen: u64) -> Result<Option<u64>, Failure> {
        // This write returns the current zxid. The bases are listed after it, and its version guards the transaction
        // below: without that, two clients that found no base would each create one.
        let bases = self.client.keys.bases();
        let Some(stat) = Failure::if_exists(session.set(&bases, b"", ANY).await)? else { return Ok(None) };
        self.client.connection.observe_time(stat.mtime);
        let all = self.bases(session).await?;
        let zxid = stat.mzxid.unsigned_abs();
        let needed = highest_fence_seen.saturating_sub(zxid);
        if let [number] = all[..]
            && number >= needed
        {
            return Ok(Some(number));
        }
        let clock = self.client.clock.wall().as_micros().min(Fence::MAX.get() / 2);
        let highest = all.iter().copied().max().unwrap_or(0);
        let number = clock.saturating_sub(zxid).max(needed).max(highest);
        let mut ops = vec![set(bases, Vec::new(), stat.version)];
        ops.extend(all.iter().map(|old| delete(self.client.keys.base(*old), ANY)));
        ops.push(create(self.client.keys.base(number), Vec::new()));
        match session.multi(&ops).await {
            Ok(_) => tracing::info!(number, "wrote a new fence base"),
            // Another client was faster.
            Err(Failure::Rejected(_, zk::Error::BadVersion | zk::Error::NoNode | zk::Error::NodeExists)) => {
                return Ok(None);
            }
            Err(failure) => return Err(failure),
        }
        Ok(Some(number))
    }

    /// Remembers the base. False: its node is gone.
    async fn adopt(&self, session: &Session, number: u64) -> Result<bool, Failure> {
        let Some((data, stat)) = Failure::if_exists(session.get(&self.client.keys.base(number)).await)?
        else {
            return Ok(false);
        };
        let watched = std::str::from_utf8(&data).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
        *self.known.lock().ignore_poison() = KnownBase { number, version: stat.version, watched };
        Ok(true)
    }

    /// Reads the fence base again after a rejected transaction. True: it differs from `before`, and the transaction
    /// can be retried.
    pub async fn changed_since(&self, session: &Session, before: KnownBase) -> Result<bool, Failure> {
        self.refresh(session, false).await?;
        Ok(before != self.get())
    }
}
