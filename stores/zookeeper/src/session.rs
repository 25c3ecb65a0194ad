//! One session with the ensemble: calls and their timeouts, transactions, and the state that belongs to the session.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockkeeper_core::{BootInstant, IgnorePoison};
use lockkeeper_host::Clock;
use zookeeper_client::{
    self as zk, Acls, Client, CreateMode, MultiWriteError, MultiWriteResult, SessionState, Stat,
};

use crate::error::Failure;
use crate::statements::{self, TxnOp};

/// One session, until it ends.
pub struct Session {
    pub client: Client,
    pub id: i64,
    pub barrier: BarrierNode,
    timeout: Duration,
    clock: Arc<dyn Clock>,
    login: bool,
    /// The last call got no reply in time.
    unanswered: AtomicBool,
    /// The bytes of the paths that waiters watch.
    watched_bytes: AtomicUsize,
}

/// The request barrier of a session, see `request_barrier.rs`: how often it was replaced, and its node.
#[derive(Default)]
pub struct BarrierNode {
    current: Mutex<(u64, String)>,
    /// One task replaces the barrier at a time. Tasks that waited meanwhile use the new one.
    pub replacing: tokio::sync::Mutex<()>,
}

impl BarrierNode {
    pub fn current(&self) -> (u64, String) {
        self.current.lock().ignore_poison().clone()
    }

    pub fn set(&self, count: u64, node: String) {
        *self.current.lock().ignore_poison() = (count, node);
    }
}

/// The most bytes of watched paths at a time. On a new connection the client library sends all watches in one message
/// of at most 128 KiB. With more it could never reconnect, and the session would end.
const MAX_WATCHED_BYTES: usize = 100 << 10;

/// The part of a session timeout that certainly remains after a write that a majority has accepted.
///
/// The leader does not restart a session's timeout for a write. It uses the activity that a follower reports with its
/// reply to each ping, every half tick. If that follower dies before it reports the write, the leader's information is
/// older by half a tick and by the pause of the client before the write. The client pings at least every 3/10 of the
/// session timeout. Servers require sessions of at least two ticks, so half a tick is at most 1/4 of the timeout. That
/// leaves 9/20, of which the store uses 8/20.
fn trusted(session: Duration) -> Duration {
    session * 2 / 5
}

/// The right to watch one path, see [`Session::reserve_watch`].
pub struct WatchReservation<'a>(&'a Session, usize);

impl Drop for WatchReservation<'_> {
    fn drop(&mut self) {
        self.0.watched_bytes.fetch_sub(self.1, Ordering::Relaxed);
    }
}

/// The reply to a transaction: when it was sent, and one result for each operation.
pub struct MultiReply {
    pub sent_at: BootInstant,
    pub answers: Vec<MultiWriteResult>,
}

impl MultiReply {
    /// The paths of the nodes that the transaction created.
    pub fn created(&self) -> impl Iterator<Item = &str> {
        self.answers.iter().filter_map(|answer| match answer {
            MultiWriteResult::Create { path, .. } => Some(path.as_str()),
            _ => None,
        })
    }

    /// The state after the last set operation. Servers before 3.9 return no state for a create (ZOOKEEPER-4026).
    pub fn stat(&self) -> Option<&Stat> {
        self.answers.iter().rev().find_map(|answer| match answer {
            MultiWriteResult::SetData { stat } => Some(stat),
            _ => None,
        })
    }
}

impl Session {
    pub fn new(client: Client, timeout: Duration, clock: Arc<dyn Clock>, login: bool) -> Self {
        Session {
            id: client.session_id().0,
            barrier: BarrierNode::default(),
            client,
            timeout,
            clock,
            login,
            unanswered: AtomicBool::new(false),
            watched_bytes: AtomicUsize::new(0),
        }
    }

    pub fn is_over(&self) -> bool {
        self.client.state().is_terminated()
    }

    pub fn is_connected(&self) -> bool {
        self.client.state() == SessionState::SyncConnected
    }

    /// How long a guard may trust the session after a write that a majority has accepted.
    pub fn trusted_for(&self) -> Duration {
        trusted(self.client.session_timeout())
    }

    /// Reserves room for one more watch. A waiter that gets none polls instead.
    pub fn reserve_watch(&self, path: &str) -> Option<WatchReservation<'_>> {
        let reservation = WatchReservation(self, path.len());
        let before = self.watched_bytes.fetch_add(path.len(), Ordering::Relaxed);
        (before + path.len() <= MAX_WATCHED_BYTES).then_some(reservation)
    }

    /// Waits for the connection. The client library queues requests that are made without a connection, and cannot
    /// cancel them.
    pub async fn wait_connected(&self, deadline: Duration) -> Result<(), Failure> {
        let mut watcher = self.client.state_watcher();
        let wait = async {
            let mut state = self.client.state();
            loop {
                match state {
                    SessionState::SyncConnected => return Ok(()),
                    SessionState::AuthFailed => return Err(Failure::of(zk::Error::AuthFailed)),
                    state if state.is_terminated() => return Err(Failure::SessionEnded),
                    _ => state = watcher.changed().await,
                }
            }
        };
        match tokio::time::timeout(deadline, wait).await {
            // Nothing was sent.
            Ok(Err(Failure::SessionEnded)) => {
                Err(Failure::NotSent("the session with ZooKeeper has ended".into()))
            }
            Ok(answer) => answer,
            Err(_) => Err(Failure::NotSent(format!("no connection to ZooKeeper within {deadline:?}"))),
        }
    }

    /// After a timeout, sends a harmless request first. The client library reports a connection that breaks while the
    /// session is resumed as connected until there is another one, and queues requests meanwhile.
    pub async fn probe_after_silence(&self) -> Result<(), Failure> {
        if !self.unanswered.load(Ordering::Relaxed) {
            return Ok(());
        }
        let reply = self.with_timeout(self.client.check_stat("/")).await;
        reply
            .map(drop)
            .map_err(|_| Failure::NotSent(format!("ZooKeeper has not replied for {:?}", self.timeout)))
    }

    async fn with_timeout<T>(&self, answer: impl Future<Output = T>) -> Result<T, Failure> {
        let answer = tokio::time::timeout(self.timeout, answer).await;
        self.unanswered.store(answer.is_err(), Ordering::Relaxed);
        answer.map_err(|_| Failure::NoReply(format!("no reply within {:?}", self.timeout)))
    }

    /// Waits for the reply to a call.
    pub async fn call<T>(&self, answer: impl Future<Output = Result<T, zk::Error>>) -> Result<T, Failure> {
        self.with_timeout(answer).await?.map_err(Failure::of)
    }

    /// Applies all of these operations or none.
    pub async fn multi<'a>(&self, ops: impl IntoIterator<Item = &'a TxnOp>) -> Result<MultiReply, Failure> {
        let sent_at = self.clock.now();
        let mut writer = self.client.new_multi_writer();
        for op in ops {
            let added = match op {
                TxnOp::Check(path, version) => writer.add_check_version(path, *version),
                TxnOp::Create { path, data, mode } => {
                    writer.add_create(path, data, &mode.with_acls(statements::acls(self.login)))
                }
                TxnOp::Set { path, data, version } => writer.add_set_data(path, data, Some(*version)),
                TxnOp::Delete(path, version) => writer.add_delete(path, Some(*version)),
            };
            added.map_err(Failure::of)?;
        }
        match self.with_timeout(writer.commit()).await? {
            Ok(answers) => Ok(MultiReply { sent_at, answers }),
            Err(MultiWriteError::RequestFailed { source }) => Err(Failure::of(source)),
            Err(MultiWriteError::OperationFailed { index, source }) => Err(Failure::at(index, source)),
        }
    }

    /// After this, reads of this session return everything that the connected server could know from the leader; a server
    /// that is the leader itself may not have applied it yet: see `catch_up`.
    pub async fn sync(&self) -> Result<(), Failure> {
        self.call(self.client.sync("/")).await
    }

    pub async fn children(&self, path: &str) -> Result<(Vec<String>, Stat), Failure> {
        self.call(self.client.get_children(path)).await
    }

    pub async fn get(&self, path: &str) -> Result<(Vec<u8>, Stat), Failure> {
        self.call(self.client.get_data(path)).await
    }

    pub async fn set(&self, path: &str, data: &[u8], version: i32) -> Result<Stat, Failure> {
        self.call(self.client.set_data(path, data, Some(version))).await
    }

    /// Deletes a node. False: there was none.
    pub async fn delete(&self, path: &str) -> Result<bool, Failure> {
        Ok(Failure::if_exists(self.call(self.client.delete(path, None)).await)?.is_some())
    }

    /// Creates a container node, which the servers remove when it has had no children for a while. Servers without
    /// containers get a plain node.
    pub async fn create_container(&self, path: &str, acls: Acls<'static>) -> Result<(), Failure> {
        let container = CreateMode::Container.with_acls(acls);
        let made = match self.call(self.client.create(path, b"", &container)).await {
            Err(failure) if failure.is(&zk::Error::Unimplemented) => {
                let plain = CreateMode::Persistent.with_acls(acls);
                self.call(self.client.create(path, b"", &plain)).await
            }
            made => made,
        };
        match made {
            Err(failure) if !failure.is(&zk::Error::NodeExists) => Err(failure),
            _ => Ok(()),
        }
    }

    /// Creates a persistent node and its parents.
    pub async fn create_with_parents(&self, path: &str, acls: Acls<'static>) -> Result<(), Failure> {
        let plain = CreateMode::Persistent.with_acls(acls);
        self.call(self.client.mkdir(path, &plain)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three fifths were too much for sessions of fewer than five ticks: another client got the lock during the
    /// holder's lease.
    #[test]
    fn a_lease_ends_before_the_earliest_end_of_its_session() {
        let tick = Duration::from_millis(2000);
        for ticks in 2..=20 {
            let session = tick * ticks;
            let (reported, idle) = (tick / 2, session * 3 / 10);
            assert!(trusted(session) + reported + idle < session, "a session of {ticks} ticks");
        }
    }
}
