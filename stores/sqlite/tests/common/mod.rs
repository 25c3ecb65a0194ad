//! What the tests of this store share: a directory that goes away, and other processes that do as they are told.
#![allow(dead_code, reason = "every test uses some of it")]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use lockkeeper_core::{
    AcquireOutcome, Attempt, Busy, Error, Grant, Holder, LockName, LockRequest, Locks, Names, Result, Wait,
};
use lockkeeper_host::{Clock, VirtualClock, random_128};
use lockkeeper_sqlite::{Options, SqliteStore};

/// How long something that must happen may take: a busy machine is not a broken lock.
pub const PATIENCE: Duration = Duration::from_secs(60);
pub const TTL: Duration = Duration::from_secs(600);

/// A directory of one test.
pub struct Dir(PathBuf);

impl Dir {
    pub fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("lockkeeper-sqlite-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn db(&self) -> PathBuf {
        self.0.join("locks.db")
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Whether a test cannot run here. What is missing is an error, unless the run was told to go without it.
#[must_use]
pub fn without(word: &str, present: bool, what: &str) -> bool {
    lockkeeper_testkit::servers::demand(word, present, what).is_err()
}

#[must_use]
pub fn without_root() -> bool {
    without("root", rustix::process::geteuid().is_root(), "to be run by root")
}

pub fn has(program: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':').chain(["/usr/sbin", "/sbin"]).any(|dir| Path::new(dir).join(program).exists())
}

/// Runs a program that must succeed.
pub fn run(program: &str, args: &[&str]) {
    let out = Command::new(program).args(args).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{program} {args:?}: {text}");
}

pub fn name(text: &str) -> LockName {
    LockName::new(text).unwrap()
}

pub fn request(text: &str) -> LockRequest {
    let holder = Holder::new("here", std::process::id(), None).unwrap();
    let names = Names::from(name(text));
    LockRequest::new(Attempt::from_bytes(random_128()), names, TTL, Arc::new(holder))
}

pub fn waiting(text: &str) -> LockRequest {
    LockRequest { wait: Wait::Forever, ..request(text) }
}

pub fn open(path: &Path) -> SqliteStore {
    SqliteStore::open(Options::new(path)).unwrap()
}

pub fn open_by(path: &Path, clock: &VirtualClock) -> SqliteStore {
    let clock: Arc<dyn Clock> = Arc::new(clock.clone());
    SqliteStore::open(Options { clock, ..Options::new(path) }).unwrap()
}

pub async fn take(store: &SqliteStore, request: &LockRequest) -> Grant {
    match soon("a free lock is granted", store.acquire(request)).await {
        Ok(AcquireOutcome::Granted(grant)) => grant,
        other => panic!("it was to be granted: {other:?}"),
    }
}

pub async fn refused(store: &SqliteStore, request: &LockRequest) -> Busy {
    match soon("a request is answered", store.acquire(request)).await {
        Ok(AcquireOutcome::Busy(busy)) => busy,
        other => panic!("it was to be busy: {other:?}"),
    }
}

pub async fn soon<F: Future>(what: &str, work: F) -> F::Output {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| panic!("it did not happen: {what}"))
}

/// Waits until the queue of a lock has `count` waiters.
pub async fn wait_for_waiters(store: &SqliteStore, text: &str, count: usize) {
    let enough = async {
        while store.inspect(&name(text)).await.unwrap().map_or(0, |view| view.waiting) != count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon("the requests are queued", enough).await;
}

/// Another process with the file open, which does as it is told. It is killed when dropped.
pub struct Contender {
    child: Child,
    to: ChildStdin,
    from: mpsc::Receiver<String>,
    /// Its own process, which is not the child's if a wrapper stands between.
    pub pid: u32,
}

impl Contender {
    pub fn start(db: &Path) -> Self {
        Self::start_in(&[], db)
    }

    /// Started by a wrapper such as `unshare`.
    pub fn start_in(wrapper: &[&str], db: &Path) -> Self {
        let contender = Self::begin(wrapper, db);
        contender.ready()
    }

    /// Started, but not waited for.
    pub fn begin(wrapper: &[&str], db: &Path) -> Self {
        Self::spawn(wrapper, &std::env::current_exe().unwrap(), db)
    }

    /// Started from a copy of the program in `dir`, for a user who may not go where it is.
    pub fn begin_copy(wrapper: &[&str], dir: &Path, db: &Path) -> Self {
        let copy = dir.join("contender");
        if !copy.exists() {
            std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
        }
        Self::spawn(wrapper, &copy, db)
    }

    fn spawn(wrapper: &[&str], me: &Path, db: &Path) -> Self {
        let mut words = wrapper.to_vec();
        let test = ["--exact", "contender", "--ignored", "--nocapture", "--test-threads=1"];
        words.push(me.to_str().unwrap());
        words.extend(test);
        let mut child = Command::new(words[0])
            .args(&words[1..])
            .env("LOCKKEEPER_CONTENDER", db)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("{words:?}: {e}"));
        let to = child.stdin.take().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (tell, from) = mpsc::channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(std::result::Result::ok) {
                if let Some((_, said)) = line.split_once('@') {
                    let _ = tell.send(said.to_owned());
                }
            }
        });
        let pid = child.id();
        Contender { child, to, from, pid }
    }

    pub fn ready(mut self) -> Self {
        let said = self.hear();
        self.pid = said.strip_prefix("open ").unwrap_or_else(|| panic!("{said}")).parse().unwrap();
        self
    }

    /// What it says next.
    pub fn hear(&self) -> String {
        self.from.recv_timeout(PATIENCE).expect("the other process answers")
    }

    /// Whether it has said anything.
    pub fn silent(&self) -> bool {
        matches!(self.from.try_recv(), Err(mpsc::TryRecvError::Empty))
    }

    pub fn tell(&mut self, command: &str) {
        writeln!(self.to, "{command}").unwrap();
    }

    pub fn request(&mut self, command: &str) -> String {
        self.tell(command);
        self.hear()
    }

    pub fn fence(said: &str) -> u64 {
        said.strip_prefix("granted ").unwrap_or_else(|| panic!("{said}")).parse().unwrap()
    }

    /// Stops it while it has no transaction.
    pub fn stop(&self, db: &Path) {
        lockkeeper_testkit::stop::stop_between_transactions(self.pid, db);
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.pid).unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Kills it and waits until it is gone.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Contender {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the other process runs: the body of a test that is ignored otherwise.
pub fn contender() {
    let db = std::env::var_os("LOCKKEEPER_CONTENDER").expect("started by another test");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
    let store = match SqliteStore::open(Options::from_url(&format!("sqlite:{}", db.display())).unwrap()) {
        Ok(store) => store,
        Err(e) => return println!("@{}", said(&Err(e))),
    };
    // Inside a pid namespace this is a small number that means nothing outside.
    println!("@open {}", std::process::id());
    let mut last = None;
    let mut held = None;
    let mut second = None;
    for line in std::io::stdin().lines().map_while(std::result::Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["take", text, ..] => {
                let ttl = words.get(2).map_or(TTL, |ms| Duration::from_millis(ms.parse().unwrap()));
                let request = LockRequest { ttl, ..request(text) };
                last = Some(request.key.clone());
                let answer = runtime.block_on(store.acquire(&request));
                println!("@{}", said(&answer));
                if let Ok(AcquireOutcome::Granted(grant)) = answer {
                    held = Some(grant);
                }
            }
            ["renew"] => {
                let grant = held.clone().unwrap();
                println!("@{:?}", runtime.block_on(store.renew(&[grant])).unwrap()[0]);
            }
            // Acquires and releases a lock of its own, and says the fences.
            ["cycles", count] => {
                let own = format!("cycle/{}", std::process::id());
                let fences = runtime.block_on(async {
                    let mut fences = Vec::new();
                    for _ in 0..count.parse().unwrap() {
                        let grant = take(&store, &request(&own)).await;
                        store.release(&grant.key).await.unwrap();
                        fences.push(grant.fence.to_string());
                    }
                    fences.join(" ")
                });
                println!("@{fences}");
            }
            // Opens a second store of this process, which does nothing.
            ["second"] => {
                second = Some(open(Path::new(&db)));
                println!("@open");
            }
            ["close"] => {
                drop((store, second));
                return println!("@closed");
            }
            ["wait", text] => {
                let request = waiting(text);
                last = Some(request.key.clone());
                let store = store.clone();
                runtime.spawn(async move { println!("@{}", said(&store.acquire(&request).await)) });
            }
            ["release"] => {
                let done = runtime.block_on(store.release(&last.take().unwrap()));
                println!("@{:?}", done.unwrap());
            }
            // Takes and gives back a lock without end.
            ["churn"] => {
                let store = store.clone();
                runtime.spawn(async move {
                    loop {
                        let request = request("churn");
                        store.acquire(&request).await.unwrap();
                        store.release(&request.key).await.unwrap();
                    }
                });
            }
            ["stop"] => lockkeeper_host::stop_this_process(),
            ["wakes"] => println!("@{}", store.wakes()),
            ["findings"] => {
                let texts: Vec<_> =
                    store.profile().findings.into_iter().map(|finding| finding.text).collect();
                println!("@{}", texts.join(" | "));
            }
            _ => panic!("{line}"),
        }
    }
}

fn said(answer: &Result<AcquireOutcome, Error>) -> String {
    match answer {
        Ok(AcquireOutcome::Granted(grant)) => format!("granted {}", grant.fence),
        Ok(AcquireOutcome::Busy(_)) => "busy".into(),
        Err(e) => format!("error {}: {e}", e.outcome().as_str()),
    }
}

/// Waits, without a runtime, until `check` is true.
pub fn until(what: &str, mut check: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !check() {
        assert!(Instant::now() < end, "it did not happen: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
