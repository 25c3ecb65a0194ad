//! Guards in a process that has forked, or that has no file descriptor left. Each test starts this test
//! program again as a child process.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use lockkeeper::{
    Clock, Error, LeaseState, Lockkeeper, LossReason, ReleaseOutcome, Result, Store, SystemClock,
};
use lockkeeper_core::{AcquireOutcome, Grant, LockRequest, RenewOutcome, RequestKey};
use lockkeeper_testkit::servers::{TempDir, require};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const ROLE: &str = "LOCKKEEPER_TEST_ROLE";
const STORE: &str = "LOCKKEEPER_TEST_STORE";

/// This program again, as the child process of a test: it runs only the test `child`, which plays the role.
struct Role {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Role {
    fn start(role: &str, store: &str, env: &[(&str, &std::ffi::OsStr)]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, role).env(STORE, store).envs(env.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Role { child, stdin, stdout: BufReader::new(stdout) }
    }

    /// The next line that the role says; what the test harness prints does not count.
    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "the child ended without a word");
            if let Some((_, said)) = line.trim_end().split_once('@') {
                return said.to_owned();
            }
        }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(line: &str) {
    println!("@{line}");
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().build().unwrap()
}

#[test]
fn child() {
    match std::env::var(ROLE).as_deref() {
        Ok("fork") => fork(),
        Ok("exhausted-before") => exhausted_before(),
        Ok("exhausted-after") => exhausted_after(),
        Ok("blocked-log") => blocked_log(),
        _ => {}
    }
}

// The holder forks and ends. The store (SQLite sees that the process is gone) lets the next one in at once, and the child
// still has a copy of the guard, with a deadline that is half a minute away.
#[test]
fn a_guard_that_went_through_a_fork_is_lost_in_the_child() {
    let Ok(cc) = require("cc", "cc", "gcc") else { return };
    let dir = TempDir::new("fork");
    let shim = dir.join("shim.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fork_shim.c");
    let built = Command::new(cc).args(["-shared", "-fPIC", "-o"]).arg(&shim).arg(source).status().unwrap();
    assert!(built.success());

    let url = format!("sqlite:{}", dir.join("locks.db").display());
    let mut role = Role::start("fork", &url, &[("LD_PRELOAD", shim.as_os_str())]);
    assert_eq!(role.hear(), "forked");
    role.child.wait().unwrap();
    let (next_keeper, next) = runtime().block_on(async {
        let keeper = Lockkeeper::open(&url).await.unwrap();
        let next = keeper.lock("x").wait(Duration::from_secs(20)).acquire().await;
        (keeper, next.expect("its process is gone: it is free"))
    });
    role.tell("look");
    assert_eq!(role.hear(), "state Lost(Forked)");
    assert_eq!(role.hear(), "lost is told");
    assert_eq!(role.hear(), "run is refused");
    assert_eq!(role.hear(), "release is refused");
    assert_eq!(role.hear(), "keeper is refused");
    assert_eq!(role.hear(), "opened anew: busy");
    assert_eq!(role.hear(), "opened anew: held, renewed");
    // The hold names the child. With the pid of its parent, which has ended, other processes would take it for dead.
    let other = runtime().block_on(next_keeper.lock("z").try_acquire()).unwrap();
    assert!(other.is_none(), "the child still holds it: {other:?}");
    role.tell("end");
    assert!(next.is_held());
}

fn fork() {
    let url = std::env::var(STORE).unwrap();
    let (keeper, guard) = runtime().block_on(async {
        let keeper = Lockkeeper::open(&url).await.unwrap();
        let guard = keeper.lock("x").acquire().await.unwrap();
        (keeper, guard)
    });
    if std::env::set_current_dir("/lockkeeper-fork").is_err() {
        std::process::exit(0);
    }
    say("forked");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    say(&format!("state {:?}", guard.state()));
    assert!(!guard.is_held() && guard.remaining().is_zero());
    assert!(matches!(guard.lost().now_or_never(), Some(Error::Lost(_))));
    say("lost is told");
    assert!(matches!(guard.run(async { 7 }).now_or_never(), Some(Err(Error::Lost(_)))));
    say("run is refused");
    assert!(matches!(guard.release().now_or_never(), Some(Err(Error::Lost(_)))));
    say("release is refused");
    assert!(matches!(keeper.lock("y").try_acquire().now_or_never(), Some(Err(Error::Unavailable(_)))));
    assert!(matches!(keeper.inspect("y").now_or_never(), Some(Err(Error::Unavailable(_)))));
    drop(keeper);
    say("keeper is refused");
    // A process that opens the store itself is as good as any other.
    runtime().block_on(async {
        let keeper = Lockkeeper::open(&url).await.unwrap();
        assert!(keeper.lock("x").try_acquire().await.unwrap().is_none());
        say("opened anew: busy");
        let ttl = Duration::from_secs(3);
        let own = keeper.lock("y").ttl(ttl).acquire().await.unwrap();
        let end = std::time::Instant::now() + ttl * 2;
        own.run(async {
            while std::time::Instant::now() < end {
                lockkeeper_host::sleep_until(&SystemClock, SystemClock.now() + ttl / 10).await;
            }
        })
        .await
        .unwrap();
        let _held = keeper.lock("z").acquire().await.unwrap();
        say("opened anew: held, renewed");
        std::io::stdin().read_line(&mut String::new()).unwrap();
    });
    std::process::exit(0);
}

/// Leaves this process without a descriptor to open.
fn use_up_descriptors() {
    let highest = std::fs::read_dir("/proc/self/fd").unwrap();
    let highest =
        highest.map(|fd| fd.unwrap().file_name().to_str().unwrap().parse::<u64>().unwrap()).max().unwrap();
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(highest + 1), maximum }).unwrap();
    // The limit is above gaps in the numbers, and those are filled.
    let mut files = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        files.push(file);
    }
    std::mem::forget(files);
}

#[test]
fn a_keeper_that_can_have_no_timer_is_not_opened() {
    let mut role = Role::start("exhausted-before", "memory:", &[]);
    let said = role.hear();
    assert!(said.starts_with("refused unavailable: ") && said.contains("descriptor"), "{said}");
    assert_eq!(role.hear(), "opened later");
}

fn exhausted_before() {
    let runtime = runtime();
    let before = getrlimit(Resource::Nofile);
    use_up_descriptors();
    let refused = runtime.block_on(Lockkeeper::open("memory:")).unwrap_err();
    say(&format!("refused {}: {refused}", refused.outcome().as_str()));
    setrlimit(Resource::Nofile, before).unwrap();
    let keeper = runtime.block_on(Lockkeeper::open("memory:")).unwrap();
    drop(runtime.block_on(keeper.lock("x").acquire()).unwrap());
    say("opened later");
}

// The clock's thread used to make its timer when the first lock was asked for, and to end silently when it could not:
// nothing was renewed, and no deadline was told.
#[test]
fn a_guard_is_renewed_and_its_loss_is_reported_without_a_free_descriptor() {
    let mut role = Role::start("exhausted-after", "memory:", &[]);
    assert_eq!(role.hear(), "renewed");
    assert_eq!(role.hear(), "lost: Lost(MaxHold)");
}

fn exhausted_after() {
    let runtime = runtime();
    let keeper = runtime.block_on(Lockkeeper::open(&std::env::var(STORE).unwrap())).unwrap();
    use_up_descriptors();
    let ttl = Duration::from_millis(900);
    let guard = runtime.block_on(keeper.lock("x").ttl(ttl).max_hold(ttl * 3).acquire()).unwrap();
    std::thread::sleep(ttl * 2);
    assert!(guard.is_held(), "{guard:?}");
    say("renewed");
    let lost = runtime.block_on(guard.lost());
    assert!(matches!(lost, Error::Lost(_)));
    assert_eq!(guard.state(), LeaseState::Lost(LossReason::MaxHold));
    say(&format!("lost: {:?}", guard.state()));
    std::process::exit(0);
}

// The subscriber of a program writes to a pipe that no process reads. The thread that renews logged its
// first failure there, and neither renewed anything after that nor reported the loss.
#[test]
fn a_subscriber_that_blocks_keeps_no_lock_from_being_renewed() {
    let mut role = Role::start("blocked-log", "memory:", &[]);
    assert_eq!(role.hear(), "renewed after 2 failures");
    assert_eq!(role.hear(), "lost: Lost(MaxHold)");
}

/// A subscriber that never returns.
struct Blocks(std::sync::mpsc::SyncSender<()>);

impl tracing::Subscriber for Blocks {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn event(&self, _: &tracing::Event<'_>) {
        let _ = self.0.send(());
        loop {
            std::thread::park();
        }
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// The memory store; its first renewals fail.
struct FailsAtFirst {
    store: Arc<dyn Store>,
    left: AtomicUsize,
}

lockkeeper_testkit::forward!(FailsAtFirst, {
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.store.acquire(request).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        if self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok() {
            return Err(Error::Unavailable("not now".into()));
        }
        self.store.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.store.release(key).await
    }
});

fn blocked_log() {
    let (tell, told) = std::sync::mpsc::sync_channel(0);
    let clock = Arc::new(SystemClock);
    let store = Arc::new(lockkeeper_memory::MemoryStore::new(clock.clone()));
    let failing = Arc::new(FailsAtFirst { store, left: AtomicUsize::new(2) });
    let keeper = Lockkeeper::with_store(failing.clone(), clock);
    tracing::subscriber::set_global_default(Blocks(tell)).unwrap();
    let runtime = runtime();
    let ttl = Duration::from_millis(1200);
    let guard = runtime.block_on(keeper.lock("x").ttl(ttl).max_hold(ttl * 3).acquire()).unwrap();
    told.recv().expect("the failure is logged");
    std::thread::sleep(ttl * 2);
    assert!(guard.is_held(), "{guard:?}");
    say(&format!("renewed after {} failures", 2 - failing.left.load(Ordering::SeqCst)));
    let lost = runtime.block_on(guard.lost());
    assert!(matches!(lost, Error::Lost(_)));
    say(&format!("lost: {:?}", guard.state()));
    std::process::exit(0);
}
