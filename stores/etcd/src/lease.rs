//! An etcd lease of this process, and the requests about leases.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lockkeeper_core::BootInstant;
use tokio::sync::watch;

use crate::connection::Connection;
use crate::error::Failure;
use crate::proto::{LeaseGrantRequest, LeaseGrantResponse, LeaseRequest, LeaseResponse, LeaseRevokeResponse};

/// An etcd lease of this process.
#[derive(Debug)]
pub struct EtcdLease {
    pub id: i64,
    pub ttl: Duration,
    /// How much longer it lasts than its locks need.
    pub slack: Duration,
    /// The lease lasts at least until then: counted from when the keep-alive was sent.
    pub valid_until: watch::Sender<BootInstant>,
    expired: AtomicBool,
    /// When it was last used, in nanoseconds.
    pub used: AtomicU64,
}

impl EtcdLease {
    /// A lease that was requested at `sent_at`.
    pub fn new(id: i64, ttl: Duration, slack: Duration, sent_at: BootInstant) -> Self {
        EtcdLease {
            id,
            ttl,
            slack,
            valid_until: watch::Sender::new(sent_at + ttl),
            expired: AtomicBool::new(false),
            used: AtomicU64::new(sent_at.as_nanos()),
        }
    }

    pub fn is_expired(&self) -> bool {
        self.expired.load(Ordering::Relaxed)
    }

    pub fn touch(&self, now: BootInstant) {
        self.used.fetch_max(now.as_nanos(), Ordering::Relaxed);
    }

    pub fn expire(&self) {
        self.expired.store(true, Ordering::Relaxed);
        self.valid_until.send_modify(|_| {});
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

    /// How long a lease lasts without a keep-alive. `None`: the lease does not exist.
    pub async fn lease_time_left(&self, id: i64) -> Result<Option<Duration>, Failure> {
        let reply: LeaseResponse =
            self.call("/etcdserverpb.Lease/LeaseTimeToLive", &LeaseRequest { id }).await?;
        Ok(u64::try_from(reply.ttl).ok().map(Duration::from_secs))
    }
}
