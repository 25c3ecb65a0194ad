//! Runs scripts on the servers of a store. Every operation uses it; waiters and batches are elsewhere.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lockkeeper_core::{Fence, Result};
use lockkeeper_host::random_128;
use redis::{Pipeline, Value, cmd};

use crate::config::{Options, Servers};
use crate::error::{Failure, unexpected_reply};
use crate::keys::{KeyGroup, Keys};
use crate::router::{OnSplitKeys, Router};
use crate::statements::{ScriptCall, millis};

/// The servers, the names of the keys, and the identity of this client.
pub(crate) struct ScriptRunner {
    pub options: Options,
    pub keys: Keys,
    pub router: Router,
    /// Connections for grants that wait for replicas: `WAIT` blocks all later requests of its connection.
    pub grant_router: Option<Router>,
    /// The identity of this process on the server: its queue entries expire together when it stops polling.
    pub client: String,
    highest_fence_seen: AtomicU64,
}

impl ScriptRunner {
    pub fn new(options: Options, router: Router) -> Self {
        ScriptRunner {
            keys: Keys::new(&options.prefix, matches!(options.servers, Servers::Cluster(_))),
            grant_router: (options.wait_replicas > 0).then(|| router.sibling()),
            router,
            options,
            client: random_128()[..8].iter().map(|byte| format!("{byte:02x}")).collect(),
            highest_fence_seen: AtomicU64::new(0),
        }
    }

    /// The channel on which scripts publish hand-offs to this process.
    pub fn wake_channel(&self) -> String {
        format!("lockkeeper:wake:{}", self.client)
    }

    /// The channel on which scripts publish events.
    pub fn events_channel(&self) -> String {
        format!("lockkeeper:events:{}", self.options.access.db)
    }

    pub fn claim_ms(&self) -> u64 {
        millis(self.options.claim)
    }

    pub fn scheme(&self) -> &'static str {
        match self.options.servers {
            Servers::Single(_) => "redis",
            Servers::Sentinel { .. } => "redis+sentinel",
            Servers::Cluster(_) => "redis+cluster",
        }
    }

    /// The highest fence that this client has seen. Scripts grant exclusive locks above it, also on a server that has lost data.
    pub fn highest_fence_seen(&self) -> u64 {
        self.highest_fence_seen.load(Ordering::Relaxed)
    }

    pub fn raise_fence_seen(&self, fence: u64) {
        self.highest_fence_seen.fetch_max(fence, Ordering::Relaxed);
    }

    /// Reads a fence from a reply and remembers it if it is the highest.
    pub fn record_fence(&self, fence: i64) -> Result<Fence> {
        let fence = u64::try_from(fence).map_err(|_| unexpected_reply())?;
        self.raise_fence_seen(fence);
        Fence::new(fence)
    }

    /// How long a request without a reply may take to arrive. For that long the server refuses requests of a released attempt.
    pub fn tombstone_ttl(&self) -> Duration {
        self.options.access.timeout * 2 + Duration::from_secs(10)
    }

    /// The keys of a script: the fence counter and the two flags of the group, then the lock keys.
    pub fn script_keys<K: AsRef<str>>(
        &self,
        group: KeyGroup,
        locks: impl IntoIterator<Item = K>,
    ) -> Vec<String> {
        let prefix = self.keys.group_prefix(group);
        let mut keys = Vec::new();
        keys.push(format!("{prefix}fence"));
        keys.push(format!("{prefix}watched"));
        keys.push(format!("{prefix}waited"));
        keys.extend(locks.into_iter().map(|key| key.as_ref().to_owned()));
        keys
    }

    /// Runs a script on the node of a group. While the slot is migrated, the router sends it again until the timeout.
    pub async fn run(&self, group: KeyGroup, call: &ScriptCall) -> Result<Value, Failure> {
        call.run(&self.router, group.slot(), OnSplitKeys::Retry).await
    }

    /// Runs a script on the node of a group, and returns at once if the slot is being migrated.
    pub async fn run_or_report(&self, group: KeyGroup, call: &ScriptCall) -> Result<Value, Failure> {
        call.run(&self.router, group.slot(), OnSplitKeys::Report).await
    }

    /// Runs a script and waits until `wait_replicas` replicas have its writes, on the connection that ran it. The second
    /// part of the result says whether they have.
    pub async fn run_replicated(
        &self,
        grant_router: &Router,
        group: KeyGroup,
        call: &ScriptCall,
        split: OnSplitKeys,
    ) -> Result<(Value, Result<(), Failure>), Failure> {
        let wanted = self.options.wait_replicas;
        let timeout = self.options.access.timeout / 2;
        let mut script = call.by_hash.clone();
        for _ in 0..2 {
            let mut both = Pipeline::with_capacity(2);
            both.add_command(script).add_command(cmd("WAIT").arg(wanted).arg(millis(timeout)).to_owned());
            let mut replies = grant_router.calls(group.slot(), &both, split).await?.into_iter();
            let (Some(reply), Some(count)) = (replies.next(), replies.next()) else { break };
            let reply = match reply {
                Err(failure) if failure.is("NOSCRIPT") => {
                    script = call.in_full();
                    continue;
                }
                reply => reply?,
            };
            let replicated = match count {
                Ok(Value::Int(count)) if count >= i64::from(wanted) => Ok(()),
                Ok(Value::Int(count)) => Err(Failure::NotSent(format!(
                    "{count} of {wanted} replicas had the write after {timeout:?}"
                ))),
                Ok(_) => Err(Failure::NotSent("the reply to WAIT is no number".into())),
                Err(failure) => Err(failure),
            };
            return Ok((reply, replicated));
        }
        Err(Failure::unexpected_reply())
    }
}

/// Sleeps until `at`, on a thread of the store; without a time it never returns.
pub(crate) async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
