//! The etcd leases of this process: one for each length, shared by all locks and queue entries of that length. One
//! stream keeps all of them alive.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper_core::{BootInstant, IgnorePoison};
use lockkeeper_host::Clock;
use lockkeeper_store_kit::SingleFlight;
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt;
use tonic::Streaming;

use crate::config::{CLAIM_MIN, Options};
use crate::connection::Connection;
use crate::error::Failure;
use crate::hold_registry::EtcdHolds;
use crate::lease::EtcdLease;
use crate::proto::{LeaseRequest, LeaseResponse};

/// How long an unused lease is kept alive, so that the next grant of that length costs one round trip.
const KEEP_IDLE: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(200);
const RECONNECT_DELAY: Duration = Duration::from_millis(50);

/// The leases of this process.
pub struct LeasePool {
    clock: Arc<dyn Clock>,
    connection: Arc<Connection>,
    registry: Arc<EtcdHolds>,
    /// How long the queue entry of a dead process stays at most.
    claim: Duration,
    /// One for each length in seconds.
    by_length: Mutex<HashMap<u64, Arc<SharedLease>>>,
    /// The leases to keep alive.
    living: Mutex<HashMap<i64, Arc<EtcdLease>>>,
    /// The leases of queue entries, one for each length.
    queue_leases: Mutex<Vec<Arc<EtcdLease>>>,
    requests: mpsc::UnboundedSender<i64>,
}

/// The lease of one length: the first task that needs it creates it.
type SharedLease = SingleFlight<Arc<EtcdLease>, Failure>;

pub struct KeepAliveRequests(mpsc::UnboundedReceiver<i64>);

/// The extra time, so that not every grant needs a keep-alive first.
fn slack(needed: Duration) -> Duration {
    (needed / 8).max(Duration::from_secs(1))
}

impl LeasePool {
    pub fn new(
        options: &Options,
        connection: Arc<Connection>,
        registry: Arc<EtcdHolds>,
    ) -> (Self, KeepAliveRequests) {
        let (requests, receiver) = mpsc::unbounded_channel();
        let pool = LeasePool {
            clock: options.clock.clone(),
            connection,
            registry,
            claim: options.claim,
            by_length: Mutex::default(),
            living: Mutex::default(),
            queue_leases: Mutex::default(),
            requests,
        };
        (pool, KeepAliveRequests(receiver))
    }

    /// The lease for locks that need `needed`. It lasts at least that long after its last keep-alive.
    pub async fn lease(&self, needed: Duration) -> Result<Arc<EtcdLease>, Failure> {
        let slack = slack(needed);
        let seconds = (needed + slack).as_millis().div_ceil(1000) as u64;
        let single_flight = {
            let mut by_length = self.by_length.lock().ignore_poison();
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
        let lease = Arc::new(EtcdLease::new(id, ttl, slack, sent_at));
        self.living().insert(id, lease.clone());
        Ok(lease)
    }

    fn living(&self) -> MutexGuard<'_, HashMap<i64, Arc<EtcdLease>>> {
        self.living.lock().ignore_poison()
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
                _ = self.requests.send(lease.id);
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

    /// The lease for queue entries of requests with this ttl. A request whose holder may be silent only for a short
    /// time need not be waited for any longer as a waiter.
    pub async fn queue_lease(&self, ttl: Duration) -> Result<Arc<EtcdLease>, Failure> {
        let key = self.claim.min(ttl.max(CLAIM_MIN));
        let lease = self.lease(key).await?;
        let mut leases = self.queue_leases();
        leases.retain(|other| !other.is_expired());
        if leases.iter().all(|other| other.id != lease.id) {
            leases.push(lease.clone());
        }
        Ok(lease)
    }

    fn queue_leases(&self) -> MutexGuard<'_, Vec<Arc<EtcdLease>>> {
        self.queue_leases.lock().ignore_poison()
    }

    /// The leases of queue entries, if this process has a waiter.
    fn queue_leases_in_use(&self) -> Vec<i64> {
        let has_waiters = self.registry.table().holds.values().any(|hold| hold.caller.is_some());
        if !has_waiters {
            return Vec::new();
        }
        self.queue_leases().iter().map(|lease| lease.id).collect()
    }

    /// etcd rejected a transaction because a lease does not exist: find out which one.
    pub async fn check_leases(&self, lease: &EtcdLease) -> Result<(), Failure> {
        let leases = self.queue_leases().clone();
        for lease in leases.iter().map(|lease| &**lease).chain([lease]) {
            if self.connection.lease_time_left(lease.id).await?.is_none() {
                self.mark_expired(lease);
            }
        }
        Ok(())
    }

    /// The leases that need a keep-alive now. Leases that were not used for a while are left to expire.
    fn leases_due(&self) -> Vec<i64> {
        let now = self.clock.now();
        let mut living = self.living();
        living.retain(|_, lease| {
            if *lease.valid_until.borrow() <= now {
                lease.expire();
            }
            !lease.is_expired()
        });
        let queue_leases = self.queue_leases_in_use();
        let leases_due = living.values().filter(|lease| {
            let valid_until = *lease.valid_until.borrow();
            let used = BootInstant::from_nanos(lease.used.load(Ordering::Relaxed));
            // Renew before the slack is used up: a grant would have to wait for the keep-alive.
            (queue_leases.contains(&lease.id) && now + lease.ttl * 2 / 3 >= valid_until)
                || (now.since(used) < KEEP_IDLE && now + lease.ttl >= valid_until + lease.slack / 2)
        });
        leases_due.map(|lease| lease.id).collect()
    }
}

/// Keeps the leases in use alive while the store is open.
pub async fn run(pool: Arc<LeasePool>, KeepAliveRequests(mut requests): KeepAliveRequests) {
    let mut failed_channels = pool.connection.failed_channels();
    loop {
        let Some(first) = next_request(&pool, &mut requests).await else { return };
        // Whatever happens to this stream, the callers that wait for a keep-alive are woken below, and request it
        // again.
        let (send, to_send) = mpsc::unbounded_channel();
        let mut stream = KeepAliveStream { pool: &pool, send, sent_at: HashMap::new() };
        stream.request(first);
        if stream.sent_at.is_empty() {
            // The lease has ended. A stream without a request would look like a silent server.
            continue;
        }
        failed_channels.mark_unchanged();
        if let Ok(channel) = pool.connection.channel().await {
            let to_send = tokio_stream::wrappers::UnboundedReceiverStream::new(to_send);
            match pool.connection.stream(&channel, "/etcdserverpb.Lease/LeaseKeepAlive", to_send).await {
                Ok(mut replies) => stream.run(&mut requests, &mut replies, &mut failed_channels).await,
                Err(failure) => tracing::debug!(
                    ?failure,
                    "the keep-alive stream could not be opened; failing over to the next member"
                ),
            }
            // Whatever ended the stream: another member, or a new login, may succeed.
            pool.connection.fail_over(&channel).await;
            pool.connection.forget_login();
        }
        tokio::time::sleep(RECONNECT_DELAY).await;
        for lease in pool.living().values() {
            lease.valid_until.send_modify(|_| {});
        }
    }
}

async fn next_request(pool: &LeasePool, requests: &mut mpsc::UnboundedReceiver<i64>) -> Option<i64> {
    loop {
        tokio::select! {
            request = requests.recv() => return request,
            () = tokio::time::sleep(TICK) => {
                if let Some(leases_due) = pool.leases_due().into_iter().next() {
                    return Some(leases_due);
                }
            }
        }
    }
}

struct KeepAliveStream<'a> {
    pool: &'a LeasePool,
    send: mpsc::UnboundedSender<LeaseRequest>,
    /// When the keep-alives without a reply were sent.
    sent_at: HashMap<i64, BootInstant>,
}

impl KeepAliveStream<'_> {
    fn request(&mut self, id: i64) {
        if !self.sent_at.contains_key(&id) && self.pool.living().contains_key(&id) {
            self.sent_at.insert(id, self.pool.clock.now());
            _ = self.send.send(LeaseRequest { id });
        }
    }

    fn handle_reply(&mut self, reply: &LeaseResponse) {
        let Some(sent_at) = self.sent_at.remove(&reply.id) else { return };
        let Some(lease) = self.pool.living().get(&reply.id).cloned() else { return };
        match u64::try_from(reply.ttl) {
            Ok(seconds) if seconds > 0 => {
                let valid_until = sent_at + Duration::from_secs(seconds);
                lease.valid_until.send_modify(|now| *now = valid_until.max(*now));
            }
            _ => self.pool.mark_expired(&lease),
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
                    for id in self.pool.leases_due() {
                        self.request(id);
                    }
                    let now = self.pool.clock.now();
                    if self.sent_at.values().any(|sent_at| now.since(*sent_at) > self.pool.connection.timeout()) {
                        return;
                    }
                }
                _ = failed_channels.changed() => return,
            }
        }
    }
}
