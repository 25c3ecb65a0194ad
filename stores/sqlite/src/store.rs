use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{
    Acquired, Ask, Claim, Delete, Error, EventStream, Expect, Fence, Grant, LockName, LockPage, LockView,
    Locks, Page, Profile, Promise, Record, RecordPage, Records, Release, Renewal, Result, Waiting, Write,
    limits,
};
use lockkeeper_host::{SystemClock, log_elsewhere};
use tokio::sync::oneshot;

use crate::Options;
use crate::batch::Request;
use crate::place::Medium;
use crate::post::{POLL, SILENCE};
use crate::tx::{Tx, closed};
use crate::worker::{Job, Worker};

/// Locks and records in one SQLite file. Clones share the open file.
///
/// When the last clone is dropped the file is closed; grants stay what they are until they are released, expire, or
/// their process ends.
#[derive(Clone)]
pub struct SqliteStore(Arc<Inner>);

struct Inner {
    jobs: mpsc::Sender<Job>,
    thread: Mutex<Option<JoinHandle<()>>>,
    medium: Medium,
    wakes: Arc<AtomicU64>,
    path: std::path::PathBuf,
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SqliteStore({})", self.0.path.display())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.jobs.send(Job::Stop);
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join();
        }
    }
}

impl SqliteStore {
    /// Opens the file, and makes it if there is none.
    ///
    /// # Errors
    /// - [`Error::Denied`]: the file or its directory may not be written.
    /// - [`Error::Invalid`]: it is a database of another application; it is left as it is.
    /// - [`Error::Unsupported`]: it was written by a newer version, or is on a network file system.
    /// - [`Error::Unavailable`]: it is damaged or no database, the disk is full, or somebody keeps it locked.
    pub fn open(options: Options) -> Result<Self> {
        options.clock.start().map_err(|e| {
            Error::Unavailable(format!("no thread or no file descriptor is left for the timers: {e}"))
        })?;
        let (jobs, todo) = mpsc::channel();
        let path = options.path.clone();
        let wakes = Arc::new(AtomicU64::new(0));
        let worker = Worker::open(options, jobs.clone(), wakes.clone())?;
        let medium = worker.medium();
        let thread = std::thread::Builder::new()
            .name("lockkeeper-sqlite".into())
            .spawn(move || {
                let _log = log_elsewhere();
                worker.run(&todo);
            })
            .map_err(|e| Error::Unavailable(format!("no thread can be started: {e}")))?;
        let inner = Inner { jobs, thread: Mutex::new(Some(thread)), medium, wakes, path };
        Ok(SqliteStore(Arc::new(inner)))
    }

    /// How often another process woke this one so far. One release wakes one process, however many wait.
    pub fn wakes(&self) -> u64 {
        self.0.wakes.load(Ordering::Relaxed)
    }

    fn request(&self, request: Request) -> Result<()> {
        self.0.jobs.send(Job::Request(request)).map_err(|_| closed())
    }

    /// Changes something, together with what others want changed at the same time. Dropping the future does not stop it.
    async fn change<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Tx<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (tell, told) = oneshot::channel();
        self.request(Request::other(work, tell))?;
        told.await.unwrap_or_else(|_| Err(closed()))
    }

    /// Lets the worker do something and waits for it. Dropping the future does not stop the worker.
    async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Worker) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (tell, told) = oneshot::channel();
        let call = move |worker: &mut Worker| drop(tell.send(work(worker)));
        self.0.jobs.send(Job::Call(Box::new(call))).map_err(|_| closed())?;
        told.await.unwrap_or_else(|_| Err(closed()))
    }
}

#[async_trait]
impl Locks for SqliteStore {
    fn profile(&self) -> Profile {
        let Medium { remote, durable, notes } = &self.0.medium;
        let mut notes = notes.clone();
        notes.extend([
            "for the processes of one host: the file must be on a local disk".to_owned(),
            format!(
                "if the first in line is stopped (SIGSTOP, a debugger), the next is let in after up to {:.1} s",
                (SILENCE + POLL * 6 / 5).as_secs_f64()
            ),
            "a holder that is paused for longer than its ttl may be late: check the fence at the resource"
                .to_owned(),
            "a lock whose process ends is free at once, also if the process meant to keep it".to_owned(),
        ]);
        if SystemClock::shift() != 0 {
            notes.push(
                "this process runs in a time namespace: its shift is taken off, so that all agree on deadlines".into(),
            );
        }
        let kept_if = |good: bool| if good { Promise::Kept } else { Promise::Likely };
        Profile {
            store: "sqlite".into(),
            exclusion: kept_if(!remote),
            fence: kept_if(*durable),
            durable: kept_if(*durable),
            waiting: Waiting::Line,
            // A waiter that is stopped counts as present for SILENCE, and the poll behind it finds the lock.
            wake: SILENCE + POLL * 6 / 5 + Duration::from_millis(100),
            shared: true,
            permits: true,
            several: true,
            reentry: true,
            deadlocks: true,
            lock_delay: true,
            min_hold: true,
            watch: true,
            revoke: true,
            records: true,
            notes,
        }
    }

    async fn acquire(&self, ask: &Ask) -> Result<Acquired> {
        ask.check()?;
        let (tell, told) = oneshot::channel();
        self.request(Request::Acquire { ask: ask.clone(), tell })?;
        // The sender goes only when the same attempt asks again, leaves, or the store is closed.
        told.await.unwrap_or_else(|_| Err(Error::Unknown("the ask left the line".into())))
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<Renewal>> {
        if grants.is_empty() {
            return Ok(Vec::new());
        }
        let attempts: Vec<_> = grants.iter().map(|grant| grant.claim.attempt).collect();
        self.change(move |tx| attempts.iter().map(|attempt| tx.extend(attempt)).collect()).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        let (tell, told) = oneshot::channel();
        self.request(Request::Release { claim: claim.clone(), tell })?;
        told.await.unwrap_or_else(|_| Err(closed()))
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        let name = name.clone();
        self.call(move |worker| worker.look_at(|tx| tx.inspect(&name))).await
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        let (prefix, page) = (prefix.to_owned(), page.clone());
        self.call(move |worker| worker.look_at(|tx| tx.list(&prefix, &page))).await
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

#[async_trait]
impl Records for SqliteStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        let key = key.clone();
        self.call(move |worker| Ok(worker.read(|tx| tx.record(&key))?.0)).await
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<Write> {
        Record::check(value, ttl)?;
        let (key, value) = (key.clone(), value.to_vec());
        self.change(move |tx| tx.put(&key, &value, expect, ttl)).await
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<Delete> {
        let key = key.clone();
        self.change(move |tx| tx.delete(&key, expect)).await
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        let (prefix, page) = (prefix.to_owned(), page.clone());
        self.call(move |worker| Ok(worker.read(|tx| tx.scan(&prefix, &page))?.0)).await
    }
}
