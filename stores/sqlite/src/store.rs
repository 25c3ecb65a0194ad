//! The store: opens the file, starts the worker, and sends it the calls of the [`Locks`] trait.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;

use async_trait::async_trait;
use lockkeeper_core::{
    AcquireOutcome, Error, EventStream, Fence, Grant, IgnorePoison, LockName, LockPage, LockRequest,
    LockView, Locks, Page, Profile, ReleaseOutcome, RenewOutcome, RequestKey, Result, limits,
};
use lockkeeper_host::{Clock, forbid_blocking, log_elsewhere};
use tokio::sync::oneshot;

use crate::Options;
use crate::own_grants::OwnGrants;
use crate::profile::StorageInfo;
use crate::requests::WriteRequest;
use crate::serve_waiters::left_queue;
use crate::shared_worker::SharedWorker;
use crate::transaction::{Tx, closed};
use crate::worker::{Worker, WorkerMessage};

/// Locks and records in one SQLite file. Clones share the open file.
///
/// Dropping the last clone closes the file. Its grants last until they are released, expire, or their process ends.
#[derive(Clone)]
pub struct SqliteStore(Arc<WorkerHandle>);

struct WorkerHandle {
    worker: Arc<SharedWorker>,
    own_grants: Arc<OwnGrants>,
    clock: Arc<dyn Clock>,
    thread: Mutex<Option<JoinHandle<()>>>,
    storage: StorageInfo,
    wakes: Arc<AtomicU64>,
    path: std::path::PathBuf,
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SqliteStore({})", self.0.path.display())
    }
}

impl Drop for WorkerHandle {
    fn drop(&mut self) {
        let _ = self.worker.send(WorkerMessage::Stop);
        if let Some(thread) = self.thread.lock().ignore_poison().take() {
            let _ = thread.join();
        }
    }
}

impl SqliteStore {
    /// Opens the file, and creates it if there is none.
    ///
    /// # Errors
    /// - [`Error::Denied`]: the file or its directory may not be written.
    /// - [`Error::Invalid`]: it is a database of another application, and stays unchanged.
    /// - [`Error::Unsupported`]: it was written by a newer version, or is on a network file system.
    /// - [`Error::Unavailable`]: it is damaged or no database, the disk is full, or another process keeps it locked.
    pub fn open(options: Options) -> Result<Self> {
        // The pipes of waiters have times of the machine's own clock, whichever clock the locks go by.
        lockkeeper_host::read_clock_offsets().and_then(|()| options.clock.start()).map_err(|e| {
            Error::Unavailable(format!("no thread or no file descriptor is left for the timers: {e}"))
        })?;
        let (messages, received) = mpsc::channel();
        let path = options.path.clone();
        let wakes = Arc::new(AtomicU64::new(0));
        let (own_grants, clock) = (Arc::new(OwnGrants::default()), options.clock.clone());
        let worker = Worker::open(options, messages.clone(), wakes.clone(), own_grants.clone())?;
        let storage = worker.storage();
        let worker = Arc::new(SharedWorker::new(worker, messages, own_grants.clone()));
        let shared = worker.clone();
        let thread = std::thread::Builder::new()
            .name("lockkeeper-sqlite".into())
            .spawn(move || {
                let _log = log_elsewhere();
                forbid_blocking();
                shared.run(&received);
            })
            .map_err(|e| Error::Unavailable(format!("no thread can be started: {e}")))?;
        let inner = WorkerHandle {
            worker,
            own_grants,
            clock,
            thread: Mutex::new(Some(thread)),
            storage,
            wakes,
            path,
        };
        Ok(SqliteStore(Arc::new(inner)))
    }

    /// How often other processes have woken this one. One release wakes one process, however many wait.
    pub fn wakes(&self) -> u64 {
        self.0.wakes.load(Ordering::Relaxed)
    }

    pub(crate) fn path(&self) -> &std::path::Path {
        &self.0.path
    }

    /// Sends a change to the worker, which batches it with others. Dropping the future does not cancel the change.
    pub(crate) async fn change<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Tx<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        self.0.worker.send(WorkerMessage::Request(WriteRequest::other(work, reply)))?;
        answer.await.unwrap_or_else(|_| Err(closed()))
    }

    /// Runs a function on the worker's thread. Dropping the future does not cancel it.
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Worker) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        let call = move |worker: &mut Worker| drop(reply.send(work(worker)));
        self.0.worker.send(WorkerMessage::Call(Box::new(call)))?;
        answer.await.unwrap_or_else(|_| Err(closed()))
    }
}

#[async_trait]
impl Locks for SqliteStore {
    fn profile(&self) -> Profile {
        self.0.storage.profile()
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        request.check()?;
        let (reply, answer) = oneshot::channel();
        let acquire = WriteRequest::Acquire { request: request.clone(), reply };
        self.0.worker.submit(acquire, &request.key.attempt)?;
        // The worker drops the sender only if the same attempt is sent again or withdrawn, or the store is closed.
        match answer.await.unwrap_or_else(|_| Err(left_queue())) {
            // A release came between the grant and now, and the next client may have the lock.
            Ok(AcquireOutcome::Granted(grant)) if !self.0.own_grants.has(&grant.key.attempt) => {
                Err(left_queue())
            }
            other => other,
        }
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        if grants.is_empty() {
            return Ok(Vec::new());
        }
        let attempts: Vec<_> = grants.iter().map(|grant| grant.key.attempt).collect();
        let sent = self.0.clock.now();
        let outcomes: Vec<RenewOutcome> =
            self.change(move |tx| attempts.iter().map(|attempt| tx.renew(attempt)).collect()).await?;
        for (grant, outcome) in grants.iter().zip(&outcomes) {
            match outcome {
                RenewOutcome::Renewed => self.0.own_grants.renew(&grant.key.attempt, sent + grant.ttl),
                RenewOutcome::Lost => self.0.own_grants.remove(&grant.key.attempt),
                _ => {}
            }
        }
        Ok(outcomes)
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let (reply, answer) = oneshot::channel();
        self.0.worker.submit(WriteRequest::Release { key: key.clone(), reply }, &key.attempt)?;
        answer.await.unwrap_or_else(|_| Err(closed()))
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        let name = name.clone();
        self.call(move |worker| worker.inspect_and_repair(|tx| tx.inspect(&name))).await
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        let (prefix, page) = (prefix.to_owned(), page.clone());
        self.call(move |worker| worker.inspect_and_repair(|tx| tx.list(&prefix, &page))).await
    }

    async fn watch(&self, prefix: &str) -> Result<EventStream> {
        let prefix = prefix.to_owned();
        self.call(move |worker| worker.watch(&prefix)).await
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        let (name, reason) = (name.clone(), reason.to_owned());
        self.change(move |tx| tx.revoke(&name, &reason)).await
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        let (name, reason) = (name.clone(), reason.to_owned());
        self.change(move |tx| tx.break_lock(&name, &reason)).await
    }
}
