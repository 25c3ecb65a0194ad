//! The worker as its own thread and the callers share it. Usually the worker's thread runs all requests. A caller that is alone runs
//! its own request, without the two changes of threads that would cost more than the transaction.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use lockkeeper_core::{Attempt, IgnorePoison, Result};
use lockkeeper_host::{log_elsewhere, may_block};

use crate::batch_delay::{collect_batch, next_message};
use crate::own_grants::OwnGrants;
use crate::requests::WriteRequest;
use crate::transaction::closed;
use crate::worker::{Worker, WorkerMessage};

/// After how long without another caller a caller counts as the only one.
const ALONE_AFTER: Duration = Duration::from_millis(2);

/// A task, or a thread outside of any task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caller {
    Task(tokio::task::Id),
    Thread(ThreadId),
}

impl Caller {
    fn this() -> Self {
        tokio::task::try_id().map_or_else(|| Caller::Thread(std::thread::current().id()), Caller::Task)
    }
}

pub(crate) struct SharedWorker {
    worker: Mutex<Worker>,
    messages: mpsc::Sender<WorkerMessage>,
    /// Messages of callers that are not among the worker's pending requests yet: no later request may overtake them.
    unreceived: AtomicUsize,
    /// The last caller, and when it came.
    last: Mutex<Option<(Caller, Instant)>>,
    own_grants: Arc<OwnGrants>,
    /// Whether the worker's thread has not ended: by a panic, for instance.
    running: AtomicBool,
    /// A fork copies the open database, but neither its file locks nor the worker's thread.
    pid: u32,
}

impl SharedWorker {
    pub fn new(worker: Worker, messages: mpsc::Sender<WorkerMessage>, own_grants: Arc<OwnGrants>) -> Self {
        let (worker, unreceived, last) = (Mutex::new(worker), AtomicUsize::new(0), Mutex::new(None));
        let (running, pid) = (AtomicBool::new(true), std::process::id());
        SharedWorker { worker, messages, unreceived, last, own_grants, running, pid }
    }

    fn lock(&self) -> MutexGuard<'_, Worker> {
        self.worker.lock().ignore_poison()
    }

    /// The worker's thread: runs until the store is closed.
    pub fn run(&self, messages: &mpsc::Receiver<WorkerMessage>) {
        let _running = ClearAtEnd(&self.running);
        let (mut stop, mut soon) = (false, false);
        while !stop {
            let idle = self.lock().is_idle();
            let first = match idle {
                true => {
                    let idle = || self.lock().catch_panic(Worker::reopen_if_files_were_lost);
                    let Some(message) = next_message(messages, soon, idle) else { return };
                    Some(message)
                }
                false => None,
            };
            let mut worker = self.lock();
            let handle = |worker: &mut Worker, message| self.handle(worker, message);
            stop |= first.is_some_and(|message| handle(&mut worker, message));
            stop |= collect_batch(&mut *worker, messages, handle, Worker::has_full_batch);
            worker.run_pending();
            soon = worker.answered > 0;
        }
        self.lock().finish();
    }

    /// Returns whether the worker has to stop.
    fn handle(&self, worker: &mut Worker, message: WorkerMessage) -> bool {
        let of_caller = matches!(message, WorkerMessage::Request(_) | WorkerMessage::Call(_));
        let stop = worker.handle_message(message);
        if of_caller {
            self.unreceived.fetch_sub(1, Ordering::Release);
        }
        stop
    }

    /// Sends a message of a caller to the worker's thread.
    pub fn send(&self, message: WorkerMessage) -> Result<()> {
        self.unreceived.fetch_add(1, Ordering::Relaxed);
        self.messages.send(message).map_err(|_| closed())
    }

    /// Runs a lock request or a release on this thread if its caller is alone and the disk is quick, and on the worker's thread
    /// otherwise.
    pub fn submit(&self, request: WriteRequest, attempt: &Attempt) -> Result<()> {
        let left = match self.is_only_caller() && may_block() && self.pid == std::process::id() {
            true => self.run_here(request, attempt),
            false => Some(request),
        };
        left.map_or(Ok(()), |request| self.send(WorkerMessage::Request(request)))
    }

    /// Whether the last request had the same caller. The requests of several callers are better run together by the worker's thread,
    /// with one sync.
    fn is_only_caller(&self) -> bool {
        let (caller, now) = (Caller::this(), Instant::now());
        let last = self.last.lock().ignore_poison().replace((caller, now));
        last.is_none_or(|(last, at)| last == caller || now - at > ALONE_AFTER)
    }

    /// Returns the request if this thread must not run it.
    ///
    /// If the disk hangs, this thread hangs with it. So it runs nothing while this store holds another lock, whose loss the same thread
    /// may have to act on.
    fn run_here(&self, request: WriteRequest, attempt: &Attempt) -> Option<WriteRequest> {
        let Ok(mut worker) = self.worker.try_lock() else { return Some(request) };
        // Without its thread the store could neither renew a lock nor serve a waiter.
        let free = self.running.load(Ordering::Acquire)
            && self.unreceived.load(Ordering::Acquire) == 0
            && worker.is_free_for_caller()
            && !self.own_grants.has_others(attempt, worker.now());
        if !free {
            return Some(request);
        }
        let _log = log_elsewhere();
        let left = worker.run_at_once(request);
        if !worker.is_at_rest() {
            let _ = self.messages.send(WorkerMessage::Continue);
        }
        left
    }
}

struct ClearAtEnd<'a>(&'a AtomicBool);

impl Drop for ClearAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use lockkeeper_core::{AcquireOutcome, Holder, LockName, LockRequest, ReleaseOutcome};
    use tokio::sync::oneshot;

    use super::*;
    use crate::Options;

    /// A store without its thread: what a caller does not run itself stays among the messages.
    struct Rig {
        shared: SharedWorker,
        messages: Mutex<mpsc::Receiver<WorkerMessage>>,
        dir: std::path::PathBuf,
    }

    impl Rig {
        fn new(test: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("lockkeeper-caller-{test}-{}", std::process::id()));
            std::fs::create_dir_all(&dir).unwrap();
            let (sender, messages) = mpsc::channel();
            let own_grants = Arc::new(OwnGrants::default());
            let wakes = Arc::new(AtomicU64::new(0));
            let options = Options::new(dir.join("locks.db"));
            let worker = Worker::open(options, sender.clone(), wakes, own_grants.clone()).unwrap();
            worker.assume_quick_disk();
            let messages = Mutex::new(messages);
            Rig { shared: SharedWorker::new(worker, sender, own_grants), messages, dir }
        }

        /// Requests a lock. `None`: this thread has not run the request.
        fn acquire(&self, name: &str) -> Option<LockRequest> {
            let holder = Arc::new(Holder::new("here", 1, None).unwrap());
            let attempt = Attempt::from_bytes(lockkeeper_host::random_128());
            let name = LockName::new(name).unwrap();
            let request = LockRequest::new(attempt, name, Duration::from_secs(600), holder);
            let (reply, mut answer) = oneshot::channel();
            self.shared.submit(WriteRequest::Acquire { request: request.clone(), reply }, &attempt).unwrap();
            // The next request is not to be late because this one's disk was slow.
            self.shared.lock().assume_quick_disk();
            match answer.try_recv() {
                Ok(answer) => {
                    assert!(matches!(answer.unwrap(), AcquireOutcome::Granted(_)));
                    Some(request)
                }
                Err(_) => {
                    assert!(matches!(
                        self.messages.lock().unwrap().try_recv().unwrap(),
                        WorkerMessage::Request(_)
                    ));
                    self.shared.unreceived.fetch_sub(1, Ordering::Release);
                    None
                }
            }
        }

        fn release(&self, request: &LockRequest) {
            let (reply, mut answer) = oneshot::channel();
            let release = WriteRequest::Release { key: request.key.clone(), reply };
            self.shared.submit(release, &request.key.attempt).unwrap();
            assert_eq!(answer.try_recv().unwrap().unwrap(), ReleaseOutcome::Released);
        }
    }

    impl Drop for Rig {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }

    #[test]
    fn a_caller_that_is_alone_runs_its_own_transactions() {
        let rig = Rig::new("alone");
        for _ in 0..3 {
            let request = rig.acquire("a").expect("this thread runs it");
            rig.release(&request);
        }
    }

    /// A disk that hangs would keep this thread from acting on the loss of the other lock.
    #[test]
    fn a_holder_of_another_lock_does_not_wait_for_the_disk() {
        let rig = Rig::new("holder");
        let held = rig.acquire("a").unwrap();
        assert!(rig.acquire("b").is_none());
        rig.release(&held);
        assert!(rig.acquire("b").is_some());
    }

    #[test]
    fn only_a_lone_caller_that_may_block_on_a_quick_disk_runs_its_request() {
        let rig = Rig::new("only");
        rig.release(&rig.acquire("a").unwrap());
        // The requests of two callers are better run together.
        // An hour ahead: on a slow machine it must not be long ago when the other caller comes.
        let just_now = Instant::now() + Duration::from_secs(3600);
        *rig.shared.last.lock().unwrap() = Some((Caller::this(), just_now));
        std::thread::scope(|scope| assert!(scope.spawn(|| rig.acquire("a")).join().unwrap().is_none()));
        *rig.shared.last.lock().unwrap() = None;
        let forbidden = || {
            lockkeeper_host::forbid_blocking();
            rig.acquire("a")
        };
        std::thread::scope(|scope| assert!(scope.spawn(forbidden).join().unwrap().is_none()));
        *rig.shared.last.lock().unwrap() = None;
        rig.shared.lock().assume_slow_disk();
        assert!(rig.acquire("a").is_none());
        rig.release(&rig.acquire("a").unwrap());
        rig.shared.unreceived.fetch_add(1, Ordering::Release);
        assert!(rig.acquire("a").is_none(), "it overtook an earlier request");
        rig.shared.unreceived.fetch_sub(1, Ordering::Release);
        rig.shared.running.store(false, Ordering::Release);
        assert!(rig.acquire("a").is_none(), "no thread would renew it");
    }

    #[test]
    fn a_caller_does_not_wait_for_the_write_lock() {
        let rig = Rig::new("busy");
        rig.release(&rig.acquire("a").unwrap());
        let writer = rusqlite::Connection::open(rig.dir.join("locks.db")).unwrap();
        writer.execute_batch("BEGIN IMMEDIATE").unwrap();
        assert!(rig.acquire("a").is_none());
        writer.execute_batch("ROLLBACK").unwrap();
        assert!(rig.acquire("a").is_some());
    }
}
