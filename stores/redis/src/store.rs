//! The store: its parts, and the traits of `core` on top of them.

use std::sync::{Arc, Weak};

use async_trait::async_trait;
use lockkeeper_core::{
    AcquireOutcome, Error, EventStream, Fence, Grant, LockName, LockPage, LockRequest, LockView, Locks, Page,
    Profile, ReleaseOutcome, RenewOutcome, RequestKey, Result, limits,
};
use lockkeeper_store_kit::{IoThread, PendingRequests, Task};

use crate::acquire::{AcquireCall, Acquirer, released};
use crate::batch::{self, BatchKind, BatchSender, BatchWorker};
use crate::config::Options;
use crate::connection::{Listener, PushEvent};
use crate::events::{self, Watchers};
use crate::keys::KeyGroup;
use crate::multi_slot::MultiSlot;
use crate::profile::{self, KnownSettings, ProfileMonitor};
use crate::release::Releaser;
use crate::router::Router;
use crate::runner::ScriptRunner;
use crate::unknown::UnknownOutcomes;
use crate::waiters::{self, Waiters};
use crate::{break_lock, renew, revoke};

/// Locks and records in Redis. Clones share one set of connections.
#[derive(Clone)]
pub struct RedisStore {
    inner: Arc<RedisStoreInner>,
    // Last, because dropping it ends the thread and the tasks on it.
    _io: Arc<(IoThread, [Task<()>; 8])>,
}

/// The parts of a store, each with its own state.
struct RedisStoreInner {
    runner: Arc<ScriptRunner>,
    acquirer: Acquirer,
    releaser: Releaser,
    /// The acquire calls without an answer.
    pending: PendingRequests,
    takes: BatchSender,
    waiters: Arc<Waiters>,
    watchers: Arc<Watchers>,
    unknown: Arc<UnknownOutcomes>,
    settings: Arc<KnownSettings>,
}

impl std::fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RedisStore({:?})", self.inner.runner.options.servers)
    }
}

impl RedisStore {
    /// Connects, checks the servers, and refuses servers that cannot keep locks.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if no server replies, [`Error::Denied`] if the password is wrong, [`Error::Invalid`] or
    /// [`Error::Unsupported`] if a server cannot keep locks.
    pub async fn open(options: Options) -> Result<Self> {
        options.check()?;
        let io = IoThread::start("lockkeeper-redis")
            .map_err(|error| Error::Unavailable(format!("no thread for the connection: {error}")))?;
        let (requests, request_items) = batch::channel(BatchKind::Acquire);
        let (releases, release_items) = batch::channel(BatchKind::Release);
        let (confirms, confirm_items) = batch::channel(BatchKind::Confirm);
        let (takes, take_items) = batch::channel(BatchKind::Take);
        let inner = Arc::new_cyclic(|weak: &Weak<RedisStoreInner>| {
            let settings = Arc::new(KnownSettings::default());
            let runner = new_runner(options, &io, listener(weak.clone()), &settings);
            let unknown = Arc::new(UnknownOutcomes::new(runner.tombstone_ttl(), runner.options.poll));
            let waiters = Arc::new(Waiters::new(runner.clone(), requests.clone(), confirms));
            RedisStoreInner {
                acquirer: Acquirer {
                    runner: runner.clone(),
                    requests,
                    waiters: waiters.clone(),
                    unknown: unknown.clone(),
                },
                releaser: Releaser {
                    runner: runner.clone(),
                    releases,
                    waiters: waiters.clone(),
                    unknown: unknown.clone(),
                },
                watchers: Arc::new(Watchers::new(runner.clone())),
                pending: PendingRequests::default(),
                takes,
                runner,
                waiters,
                unknown,
                settings,
            }
        });
        let worker = BatchWorker { runner: inner.runner.clone(), unknown: inner.unknown.clone() };
        let monitor = ProfileMonitor { runner: inner.runner.clone(), settings: inner.settings.clone() };
        let tasks = [
            io.spawn(worker.clone().run(request_items)),
            io.spawn(worker.clone().run(release_items)),
            io.spawn(worker.clone().run(confirm_items)),
            io.spawn(worker.run(take_items)),
            io.spawn(waiters::run(inner.waiters.clone())),
            io.spawn(events::run(inner.watchers.clone())),
            io.spawn(inner.releaser.clone().run()),
            io.spawn(profile::run(monitor.clone())),
        ];
        let store = RedisStore { inner, _io: Arc::new((io, tasks)) };
        profile::check_servers(&monitor).await?;
        Ok(store)
    }

    pub(crate) fn runner(&self) -> &ScriptRunner {
        &self.inner.runner
    }

    pub(crate) fn takes(&self) -> &BatchSender {
        &self.inner.takes
    }

    async fn release_parts(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        match self.runner().group_of(&key.names) {
            Some(group) => self.inner.releaser.release(group, key).await,
            None => self.multi_slot().release_multi_slot(&self.runner().parts(&key.names), key).await,
        }
    }

    fn multi_slot(&self) -> MultiSlot<'_> {
        MultiSlot { acquirer: &self.inner.acquirer, releaser: &self.inner.releaser }
    }
}

fn new_runner(
    options: Options,
    io: &IoThread,
    listener: Listener,
    settings: &Arc<KnownSettings>,
) -> Arc<ScriptRunner> {
    Arc::new_cyclic(|weak| {
        let handshake = profile::handshake(weak.clone(), settings.clone());
        let (servers, access) = (options.servers.clone(), options.access.clone());
        let router = Router::new(servers, access, io.handle().clone(), Some(listener), Some(handshake));
        ScriptRunner::new(options, router)
    })
}

/// Passes messages on to the waiters or the watchers, and the end of a connection to both.
fn listener(store: Weak<RedisStoreInner>) -> Listener {
    Arc::new(move |event| {
        let Some(store) = store.upgrade() else { return };
        match event {
            PushEvent::Disconnected => {
                store.waiters.on_disconnect();
                store.watchers.on_disconnect();
            }
            PushEvent::Message { channel, text } if channel == store.runner.wake_channel().as_bytes() => {
                store.waiters.on_hand_off(&text);
            }
            PushEvent::Message { text, .. } => store.watchers.emit(&text),
        }
    })
}

#[async_trait]
impl Locks for RedisStore {
    fn profile(&self) -> Profile {
        self.inner.settings.profile().expect("an open store has a profile")
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        request.check()?;
        let suspended = self.inner.unknown.suspend(&request.key);
        let pending = self.inner.pending.begin(request.key.attempt);
        let answer = match self.runner().group_of(&request.key.names) {
            Some(group) => {
                let call = AcquireCall { request, others: &[], pending: &pending };
                self.inner.acquirer.acquire_in_group(group, call).await
            }
            None => {
                let parts = self.runner().parts(&request.key.names);
                self.multi_slot().acquire_multi_slot(&parts, request, &pending).await
            }
        }?;
        // The release has ended the grant, and the next client may have the lock.
        if matches!(answer, AcquireOutcome::Granted(_)) && pending.is_cancelled() {
            return Err(released());
        }
        // The caller of a busy lock has nothing to release. The release leaves a tombstone for the earlier requests of the attempt.
        let attempt = request.key.attempt.to_hex();
        if matches!(answer, AcquireOutcome::Busy(_)) && self.inner.unknown.may_arrive(&attempt) {
            self.release_parts(&request.key).await.map_err(|error| {
                Error::Unknown(format!("the lock is busy, and an earlier request may still take it: {error}"))
            })?;
            self.inner.unknown.record_tombstone(&attempt);
        }
        suspended.cancel();
        Ok(answer)
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        let mut keys: Vec<(usize, KeyGroup, RequestKey)> = Vec::with_capacity(grants.len());
        for (i, grant) in grants.iter().enumerate() {
            for (group, names) in self.runner().parts(&grant.key.names) {
                keys.push((i, group, RequestKey { attempt: grant.key.attempt, names }));
            }
        }
        let parts: Vec<(KeyGroup, &RequestKey)> = keys.iter().map(|(_, group, key)| (*group, key)).collect();
        let shortest = grants.iter().map(|grant| grant.ttl).min().unwrap_or_default();
        let mut answers = vec![RenewOutcome::Renewed; grants.len()];
        for ((i, ..), answer) in keys.iter().zip(renew::renew_all(self.runner(), &parts, shortest).await?) {
            // A grant of several names is lost as a whole, and its outcome is the worst of its parts.
            answers[*i] = match (&answers[*i], answer) {
                (RenewOutcome::Lost, _) | (_, RenewOutcome::Lost) => RenewOutcome::Lost,
                (RenewOutcome::Revoked(reason), _) => RenewOutcome::Revoked(reason.clone()),
                (_, revoked @ RenewOutcome::Revoked(_)) => revoked,
                (RenewOutcome::Unknown, _) | (_, RenewOutcome::Unknown) => RenewOutcome::Unknown,
                (RenewOutcome::Renewed, RenewOutcome::Renewed) => RenewOutcome::Renewed,
            };
        }
        Ok(answers)
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        if self.inner.pending.cancel(key.attempt) {
            // A request of the call may arrive after this release.
            self.inner.unknown.record_attempt(&key.attempt.to_hex());
        }
        self.release_parts(key).await
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        self.runner().inspect_lock(name).await
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.runner().list_locks(prefix, page).await
    }

    async fn watch(&self, prefix: &str) -> Result<EventStream> {
        self.inner.watchers.watch_prefix(prefix).await
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        revoke::revoke(self.runner(), name, reason).await
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        break_lock::break_lock(self.runner(), name, reason).await
    }
}
