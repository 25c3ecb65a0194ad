//! Reads queues: the node names with one request for each queue, and the content of only the nodes that are needed.

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::future::join_all;
use lockkeeper_core::{LockName, LockRequest, Mode, Names};
use lockkeeper_store_kit::AttemptHash;

use crate::client::ZooKeeperClient;
use crate::error::Failure;
use crate::hold_back::HoldBacks;
use crate::queue::{NodeContent, QueueEntry, QueueSnapshot};
use crate::session::Session;

/// How many entries are read to report the holders to a request that was refused.
const SHOWN_IN_BUSY: usize = 3;

/// The nodes of one attempt.
pub struct OwnEntries {
    pub entries: Vec<QueueEntry>,
    pub has_hold_back: bool,
}

/// Reads queues.
pub struct QueueReader {
    pub client: Arc<ZooKeeperClient>,
    pub hold_backs: Arc<HoldBacks>,
}

impl QueueReader {
    /// Lists the queue of a name without the content of its nodes. Empty if there is no such node.
    pub async fn list_queue(&self, session: &Session, name: &LockName) -> Result<QueueSnapshot, Failure> {
        let dir = self.client.keys.queue(name);
        let (children, children_zxid) = match Failure::if_exists(session.children(&dir).await)? {
            Some((children, stat)) => (children, stat.pzxid),
            None => (Vec::new(), 0),
        };
        Ok(QueueSnapshot::new(name, &dir, children, children_zxid))
    }

    pub async fn list_queues(
        &self,
        session: &Session,
        names: &[LockName],
    ) -> Result<Vec<QueueSnapshot>, Failure> {
        join_all(names.iter().map(|name| self.list_queue(session, name))).await.into_iter().collect()
    }

    /// Reads the content of some of the nodes. Entries whose nodes are gone are removed from the snapshot.
    pub async fn read_entries(
        &self,
        session: &Session,
        queue: &mut QueueSnapshot,
        wanted: impl Fn(usize, &QueueEntry) -> bool,
    ) -> Result<(), Failure> {
        let reads = queue
            .entries
            .iter()
            .enumerate()
            .filter(|(i, entry)| entry.content.is_none() && wanted(*i, entry));
        let reads =
            reads.map(|(i, entry)| async move { (i, Failure::if_exists(session.get(&entry.path).await)) });
        let mut gone = HashSet::new();
        for (i, found) in join_all(reads).await {
            match found? {
                Some((data, stat)) => {
                    let stored = queue.entries[i].hash.and_then(|_| serde_json::from_slice(&data).ok());
                    queue.entries[i].content = Some(NodeContent { stored, stat });
                }
                None => _ = gone.insert(queue.entries[i].path.clone()),
            }
        }
        queue.entries.retain(|entry| !gone.contains(&entry.path));
        Ok(())
    }

    /// Reads what is needed to decide about a request. An exclusive request without an owner only needs to know whether there is an entry
    /// ahead; but re-entries may be at any position. The nearest entry ahead that has no owner decides most other requests.
    pub async fn read_for_request(
        &self,
        session: &Session,
        request: &LockRequest,
        queue: &mut QueueSnapshot,
        own: &str,
    ) -> Result<(), Failure> {
        let position = queue.position(own).unwrap_or(queue.entries.len());
        if request.mode == Mode::Exclusive && request.owner.is_none() {
            self.read_entries(session, queue, |_, entry| position == 0 && entry.owned).await?;
        } else if !self.read_nearest(session, request.mode, queue, position).await? {
            self.read_entries(session, queue, |i, _| i < position).await?;
        }
        self.hold_backs.read(session, queue).await
    }

    /// Reads the nearest entry ahead that has no owner, the first entry, and all that have an owner. Returns whether that decides the request.
    async fn read_nearest(
        &self,
        session: &Session,
        mode: Mode,
        queue: &mut QueueSnapshot,
        position: usize,
    ) -> Result<bool, Failure> {
        let listed = queue.entries.len();
        let nearest = queue.entries[..position].iter().rposition(|entry| !entry.owned);
        let wanted =
            |i: usize, entry: &QueueEntry| i != position && (i == 0 || Some(i) == nearest || entry.owned);
        self.read_entries(session, queue, wanted).await?;
        // The caller lists the queue again if an entry is gone.
        let is_gone = queue.entries.len() < listed;
        Ok(is_gone || nearest.is_none_or(|nearest| queue.conclude_from(nearest, mode)))
    }

    /// Reads the first entries, to report the holders.
    pub async fn read_first_entries(
        &self,
        session: &Session,
        queue: &mut QueueSnapshot,
    ) -> Result<(), Failure> {
        self.read_entries(session, queue, |i, _| i < SHOWN_IN_BUSY).await
    }

    /// Finds the nodes of an attempt in the queues of these names, also those that were created on an earlier
    /// connection.
    pub async fn find_own(
        &self,
        session: &Session,
        names: &Names,
        hash: &AttemptHash,
    ) -> Result<OwnEntries, Failure> {
        self.client.sync_by_write(session).await?;
        let queues = self.list_queues(session, names.as_slice()).await?;
        let mut own = OwnEntries { entries: Vec::new(), has_hold_back: false };
        for mut queue in queues {
            queue.entries.retain(|entry| entry.hash.as_ref() == Some(hash));
            self.read_entries(session, &mut queue, |_, _| true).await?;
            own.entries.append(&mut queue.entries);
            own.has_hold_back |= queue.hold_back_hashes.contains(hash)
                || queue.orphans.iter().any(|(_, orphan)| orphan == hash);
        }
        Ok(own)
    }
}
