//! The etcd leases of this process: one for each length, shared by all locks and queue entries of that length. One
//! stream keeps all of them alive.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lockkeeper_core::BootInstant;
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt;
use tonic::Streaming;

use crate::connection::Connection;
use crate::error::Failure;
use crate::proto::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeysRequest, LeaseRequest, LeaseResponse, LeaseRevokeResponse,
};
use crate::single_flight::SingleFlight;
use crate::store::EtcdShared;

/// How long an unused lease is kept alive, so that the next grant of that length costs one round trip.
const KEEP_IDLE: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(200);
const RECONNECT_DELAY: Duration = Duration::from_millis(50);

/// An etcd lease of this process.
#[derive(Debug)]
pub struct EtcdLease {
    pub id: i64,
    ttl: Duration,
    /// How much longer it lasts than its locks need.
    slack: Duration,
    /// The lease lasts at least until then: counted from when the keep-alive was sent.
    valid_until: watch::Sender<BootInstant>,
    expired: AtomicBool,
    /// When it was last used, in nanoseconds.
    used: AtomicU64,
}

impl EtcdLease {
    pub fn is_expired(&self) -> bool {
        self.expired.load(Ordering::Relaxed)
    }

    pub fn touch(&self, now: BootInstant) {
        self.used.fetch_max(now.as_nanos(), Ordering::Relaxed);
    }

    fn expire(&self) {
        self.expired.store(true, Ordering::Relaxed);
        self.valid_until.send_modify(|_| {});
    }
}

pub struct LeasePool {
    /// One for each length in seconds.
    by_length: Mutex<HashMap<u64, Arc<SingleFlight<Arc<EtcdLease>>>>>,
    /// The leases to keep alive.
    living: Mutex<HashMap<i64, Arc<EtcdLease>>>,
    requests: mpsc::UnboundedSender<i64>,
}

pub struct KeepAliveRequests(mpsc::UnboundedReceiver<i64>);

pub fn pool() -> (LeasePool, KeepAliveRequests) {
    let (requests, receiver) = mpsc::unbounded_channel();
    (
        LeasePool { by_length: Mutex::default(), living: Mutex::default(), requests },
        KeepAliveRequests(receiver),
    )
}

/// The extra time, so that not every grant needs a keep-alive first.
fn slack(needed: Duration) -> Duration {
    (needed / 8).max(Duration::from_secs(1))
}

impl EtcdShared {
    /// The lease for locks that need `needed`. It lasts at least that long after its last keep-alive.
    pub async fn lease(&self, needed: Duration) -> Result<Arc<EtcdLease>, Failure> {
        let slack = slack(needed);
        let seconds = (needed + slack).as_millis().div_ceil(1000) as u64;
        let single_flight = {
            let mut by_length = self.leases.by_length.lock().unwrap_or_else(PoisonError::into_inner);
            by_length.entry(seconds).or_default().clone()
        };
        let lease = single_flight
            .get(|lease| !lease.is_expired(), || Box::pin(self.new_lease(seconds, slack)))
            .await?;
        lease.touch(self.clock.now());
        Ok(lease)
    }

    async fn new_lease(&self, seconds: u64, slack: Duration) -> Result<Arc<EtcdLease>, Failure> {
        let sent_at = self.clock.now();
        let (id, ttl) = self.connection.grant_lease(seconds).await?;
        let lease = Arc::new(EtcdLease {
            id,
            ttl,
            slack,
            valid_until: watch::Sender::new(sent_at + ttl),
            expired: AtomicBool::new(false),
            used: AtomicU64::new(sent_at.as_nanos()),
        });
        self.living().insert(id, lease.clone());
        Ok(lease)
    }

    fn living(&self) -> std::sync::MutexGuard<'_, HashMap<i64, Arc<EtcdLease>>> {
        self.leases.living.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this process keeps the lease alive. Any other lease ends by itself.
    pub fn keeps_alive(&self, id: i64) -> bool {
        self.living().contains_key(&id)
    }

    /// Sends keep-alives until the lease lasts until `until`. False: the lease does not exist any more.
    pub async fn ensure_valid_until(
        &self,
        lease: &EtcdLease,
        valid_until: BootInstant,
    ) -> Result<bool, Failure> {
        if !lease.is_expired() && *lease.valid_until.borrow() >= valid_until {
            return Ok(true);
        }
        let mut valid = lease.valid_until.subscribe();
        let wait = async {
            loop {
                if lease.is_expired() {
                    return false;
                }
                if *valid.borrow_and_update() >= valid_until {
                    return true;
                }
                _ = self.leases.requests.send(lease.id);
                _ = valid.changed().await;
            }
        };
        match Box::pin(tokio::time::timeout(self.connection.timeout(), wait)).await {
            Ok(valid) => Ok(valid),
            Err(_) => Err(Failure::NoReply(format!(
                "no reply to a keep-alive within {:?}",
                self.connection.timeout()
            ))),
        }
    }

    /// etcd rejected a request because this lease does not exist.
    pub fn mark_expired(&self, lease: &EtcdLease) {
        lease.expire();
        self.living().remove(&lease.id);
    }
}

/// Rounds up to whole seconds, the unit of etcd's leases.
pub fn whole_seconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis().div_ceil(1000)).unwrap_or(u64::MAX).max(1)
}

impl Connection {
    /// Creates a lease. Returns its id, and how long it really lasts.
    pub async fn grant_lease(&self, seconds: u64) -> Result<(i64, Duration), Failure> {
        let request = LeaseGrantRequest { ttl: i64::try_from(seconds).unwrap_or(i64::MAX) };
        let reply: LeaseGrantResponse = self.call("/etcdserverpb.Lease/LeaseGrant", &request).await?;
        let given = reply.ttl.max(0) as u64;
        if given > seconds {
            // etcd gives no lease below one and a half election timeouts.
            self.shortest_lease.fetch_max(given, Ordering::Relaxed);
        }
        Ok((reply.id, Duration::from_secs(given)))
    }

    pub async fn revoke_lease(&self, id: i64) -> Result<(), Failure> {
        let done: Result<LeaseRevokeResponse, _> =
            self.call("/etcdserverpb.Lease/LeaseRevoke", &LeaseRequest { id }).await;
        match done {
            Err(failure) if !failure.lease_is_gone() => Err(failure),
            _ => Ok(()),
        }
    }

    /// How long a lease lasts without a keep-alive, and the keys attached to it. `None`: the lease does not exist.
    pub async fn lease_time_left(
        &self,
        id: i64,
        keys: bool,
    ) -> Result<Option<(Duration, Vec<Vec<u8>>)>, Failure> {
        let request = LeaseKeysRequest { id, keys };
        let reply: LeaseResponse = self.call("/etcdserverpb.Lease/LeaseTimeToLive", &request).await?;
        Ok(u64::try_from(reply.ttl).ok().map(|ttl| (Duration::from_secs(ttl), reply.keys)))
    }
}

/// Keeps the leases in use alive while the store is open.
pub async fn run(shared: Arc<EtcdShared>, KeepAliveRequests(mut requests): KeepAliveRequests) {
    let mut failed_channels = shared.connection.failed_channels();
    loop {
        let Some(first) = next_request(&shared, &mut requests).await else { return };
        // Whatever happens to this stream, the callers that wait for a keep-alive are woken below, and request it
        // again.
        let (send, to_send) = mpsc::unbounded_channel();
        let mut stream = KeepAliveStream { shared: &shared, send, sent_at: HashMap::new() };
        stream.request(first);
        if stream.sent_at.is_empty() {
            // The lease has ended. A stream without a request would look like a silent server.
            continue;
        }
        failed_channels.mark_unchanged();
        if let Ok(channel) = shared.connection.channel().await {
            let to_send = tokio_stream::wrappers::UnboundedReceiverStream::new(to_send);
            match shared.connection.stream(&channel, "/etcdserverpb.Lease/LeaseKeepAlive", to_send).await {
                Ok(mut replies) => stream.run(&mut requests, &mut replies, &mut failed_channels).await,
                Err(failure) => tracing::debug!(
                    ?failure,
                    "the keep-alive stream could not be opened; failing over to the next member"
                ),
            }
            // Whatever ended the stream: another member, or a new login, may succeed.
            shared.connection.fail_over(&channel).await;
            shared.connection.forget_login();
        }
        tokio::time::sleep(RECONNECT_DELAY).await;
        for lease in shared.living().values() {
            lease.valid_until.send_modify(|_| {});
        }
    }
}

async fn next_request(shared: &EtcdShared, requests: &mut mpsc::UnboundedReceiver<i64>) -> Option<i64> {
    loop {
        tokio::select! {
            request = requests.recv() => return request,
            () = tokio::time::sleep(TICK) => {
                if let Some(leases_due) = leases_due(shared).into_iter().next() {
                    return Some(leases_due);
                }
            }
        }
    }
}

/// The leases that need a keep-alive now. Leases that were not used for a while are left to expire.
fn leases_due(shared: &EtcdShared) -> Vec<i64> {
    let now = shared.clock.now();
    let mut living = shared.living();
    living.retain(|_, lease| {
        if *lease.valid_until.borrow() <= now {
            lease.expire();
        }
        !lease.is_expired()
    });
    let queue_leases = shared.queue_leases_in_use();
    let leases_due = living.values().filter(|lease| {
        let valid_until = *lease.valid_until.borrow();
        let used = BootInstant::from_nanos(lease.used.load(Ordering::Relaxed));
        // Renew before the slack is used up: a grant would have to wait for the keep-alive.
        (queue_leases.contains(&lease.id) && now + lease.ttl * 2 / 3 >= valid_until)
            || (now.since(used) < KEEP_IDLE && now + lease.ttl >= valid_until + lease.slack / 2)
    });
    leases_due.map(|lease| lease.id).collect()
}

struct KeepAliveStream<'a> {
    shared: &'a EtcdShared,
    send: mpsc::UnboundedSender<LeaseRequest>,
    /// When the keep-alives without a reply were sent.
    sent_at: HashMap<i64, BootInstant>,
}

impl KeepAliveStream<'_> {
    fn request(&mut self, id: i64) {
        if !self.sent_at.contains_key(&id) && self.shared.living().contains_key(&id) {
            self.sent_at.insert(id, self.shared.clock.now());
            _ = self.send.send(LeaseRequest { id });
        }
    }

    fn handle_reply(&mut self, reply: &LeaseResponse) {
        let Some(sent_at) = self.sent_at.remove(&reply.id) else { return };
        let Some(lease) = self.shared.living().get(&reply.id).cloned() else { return };
        match u64::try_from(reply.ttl) {
            Ok(seconds) if seconds > 0 => {
                let valid_until = sent_at + Duration::from_secs(seconds);
                lease.valid_until.send_modify(|now| *now = valid_until.max(*now));
            }
            _ => self.shared.mark_expired(&lease),
        }
    }

    async fn run(
        &mut self,
        requests: &mut mpsc::UnboundedReceiver<i64>,
        replies: &mut Streaming<LeaseResponse>,
        failed_channels: &mut watch::Receiver<u64>,
    ) {
        let mut tick = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                request = requests.recv() => match request {
                    Some(id) => self.request(id),
                    None => return,
                },
                reply = replies.next() => match reply {
                    Some(Ok(reply)) => self.handle_reply(&reply),
                    other => {
                        tracing::debug!(?other, "the keep-alive stream has ended; reopening it on the next member");
                        return;
                    }
                },
                _ = tick.tick() => {
                    for id in leases_due(self.shared) {
                        self.request(id);
                    }
                    let now = self.shared.clock.now();
                    if self.sent_at.values().any(|sent_at| now.since(*sent_at) > self.shared.connection.timeout()) {
                        return;
                    }
                }
                _ = failed_channels.changed() => return,
            }
        }
    }
}
