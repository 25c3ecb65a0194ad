//! Other lock clients on the same key: theirs keep ours out and ours keep theirs out.

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{ask_for, client_of, grow, keeper, renew};
use lockkeeper_core::{Mode, Outcome, ReleaseOutcome, RenewOutcome};
use lockkeeper_testkit::laws::{
    LONG, give_back, granted, is_free, join_queue, name, refused, request, soon, take, with,
};
use lockkeeper_testkit::resource::CounterFile;
use lockkeeper_testkit::servers::{self, RedisOptions, Server, TempDir};
use rslock::{Lock, LockError, LockManager};

/// A process with redis-py in it, which is killed when dropped.
struct Python(Child, BufReader<std::process::ChildStdout>);

/// Debian's own: the package is of no use to another Python that may come first in PATH.
const PYTHON: &str = "/usr/bin/python3";

impl Python {
    fn is_there() -> bool {
        let tried = Command::new(PYTHON).args(["-c", "import redis"]).stderr(Stdio::null()).status();
        let found = tried.is_ok_and(|status| status.success());
        servers::demand("redis-py", found, "the Debian package python3-redis").is_ok()
    }

    fn start(server: &Server, counter: &CounterFile, rounds: u64, how: &str) -> Self {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign.py");
        let mut command = Command::new(PYTHON);
        command.arg(program).arg(server.addr().port().to_string()).arg(counter.path());
        command.args([&rounds.to_string(), how]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("Python can be run");
        let out = BufReader::new(child.stdout.take().expect("it has one"));
        let mut python = Python(child, out);
        python.hears("ready");
        python
    }

    fn go(&mut self) {
        self.0.stdin.as_mut().expect("it has one").write_all(b"go\n").expect("it listens");
    }

    fn hears(&mut self, word: &str) {
        let mut line = String::new();
        self.1.read_line(&mut line).expect("it speaks");
        assert_eq!(line.trim_end(), word);
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn increment(counter: &CounterFile) {
    counter.increment_with(|| std::thread::sleep(Duration::from_micros(500))).unwrap();
    let log = format!("{}.log", counter.path().display());
    let mut log = File::options().create(true).append(true).open(log).unwrap();
    log.write_all(b"ours\n").unwrap();
}

/// Two foreign clients and two of ours count in one file. The result is the content of the file and the clients in their order.
async fn count_together(rounds: u64, how: &'static str) -> Option<(u64, Vec<String>)> {
    if !Python::is_there() {
        return None;
    }
    let server = servers::redis(RedisOptions::default()).ok()?;
    let dir = TempDir::new("foreign");
    let counter = CounterFile::new(dir.join("counter"));
    let mut theirs: Vec<Python> = (0..2).map(|_| Python::start(&server, &counter, rounds, how)).collect();
    let mut ours = Vec::new();
    for _ in 0..2 {
        let (keeper, counter) = (keeper(&client_of(&server).await), counter.clone());
        ours.push(tokio::spawn(async move {
            for _ in 0..rounds {
                if how == "free" {
                    tokio::task::block_in_place(|| increment(&counter));
                    continue;
                }
                let guard = keeper.lock("counter").wait(Duration::from_secs(60)).acquire().await.unwrap();
                tokio::task::block_in_place(|| increment(&counter));
                guard.release().await.unwrap();
                // Theirs do not stand in our line: without a gap they would come last.
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }));
    }
    theirs.iter_mut().for_each(Python::go);
    for task in ours {
        tokio::time::timeout(Duration::from_secs(120), task).await.expect("ours are served").unwrap();
    }
    for mut python in theirs {
        let told = tokio::task::spawn_blocking(move || python.hears("done"));
        soon("theirs are served", told).await.unwrap();
    }
    let log = std::fs::read_to_string(format!("{}.log", counter.path().display())).unwrap();
    Some((counter.get().unwrap(), log.lines().map(str::to_owned).collect()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn redis_py_and_we_keep_each_other_out() {
    let Some((count, log)) = count_together(200, "locked").await else { return };
    assert_eq!(count, 800, "updates were lost");
    let first = |who: &str| log.iter().position(|line| line == who).unwrap();
    let last = |who: &str| log.iter().rposition(|line| line == who).unwrap();
    let together = first("ours") < last("theirs") && first("theirs") < last("ours");
    assert!(together, "nothing is shown: they counted one after the other");
}

/// The same without locks: the file does lose updates if it can.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn without_a_lock_the_count_is_wrong() {
    let Some((count, _)) = count_together(200, "free").await else { return };
    assert!(count < 800, "nothing was lost: the test above shows nothing");
}

fn rslock(server: &Server) -> LockManager {
    let mut manager = LockManager::new(vec![common::url(server)]);
    manager.set_retry(1, Duration::from_millis(10));
    manager
}

const KEY: &str = "lock:counter";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn rslock_and_we_keep_each_other_out() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let dir = TempDir::new("rslock");
    let counter = CounterFile::new(dir.join("counter"));
    let mut tasks = Vec::new();
    for nth in 0..4 {
        let (keeper, counter) = (keeper(&client_of(&server).await), counter.clone());
        let mut manager = rslock(&server);
        manager.set_retry(u32::MAX, Duration::from_millis(10));
        tasks.push(tokio::spawn(async move {
            for _ in 0..100 {
                if nth % 2 == 0 {
                    let guard = keeper.lock("counter").wait(Duration::from_secs(60)).acquire().await.unwrap();
                    counter.increment_async().await.unwrap();
                    guard.release().await.unwrap();
                } else {
                    let guard = manager.acquire(KEY, Duration::from_secs(10)).await.unwrap();
                    counter.increment_async().await.unwrap();
                    guard.release().await;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }));
    }
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(120), task).await.expect("all are served").unwrap();
    }
    assert_eq!(counter.get().unwrap(), 400, "updates were lost");
    is_free(&client_of(&server).await, "counter").await;
}

/// No client tells us of it, so it is looked for; and it need not wait for the end of their ttl.
#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_release_or_expiry_lets_our_waiter_in() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (store, manager) = (client_of(&server).await, rslock(&server));
    let theirs = manager.lock(KEY, LONG).await.unwrap();
    let busy = refused(&store, &request("counter")).await;
    assert!(busy.held[0].holder.label.is_some(), "it is said that it is another client's: {busy:?}");
    let waiter = join_queue(&store, &request("counter"), 1).await;
    theirs.release().await;
    let first = granted(waiter).await;
    give_back(&store, &first.key).await;

    let _forgotten = manager.lock(KEY, Duration::from_secs(1)).await.unwrap();
    let second = granted(join_queue(&store, &request("counter"), 1).await).await;
    grow(&[first.fence, second.fence]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_client_can_neither_take_nor_delete_nor_extend_what_is_ours() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (store, manager) = (client_of(&server).await, rslock(&server));
    let held = take(&store, &ask_for("counter", Duration::from_secs(60))).await;
    assert!(matches!(manager.lock(KEY, LONG).await, Err(LockError::Unavailable)));
    let val = manager.get_unique_lock_id().unwrap();
    let guess = Lock { resource: KEY.into(), val, validity_time: 1, lock_manager: manager.clone() };
    manager.unlock(&guess).await;
    assert!(manager.extend(&guess, LONG).await.is_err());
    assert!(common::pttl(server.addr(), KEY) <= 60_000);
    assert_eq!(renew(&store, &held).await, RenewOutcome::Renewed);
    assert_eq!(give_back(&store, &held.key).await, ReleaseOutcome::Released);
    manager.lock(KEY, LONG).await.unwrap();
}

/// The key says "taken" for as long as any client of ours has it, the client that came first, and also while it is only held back.
#[tokio::test(flavor = "multi_thread")]
async fn readers_and_minimum_holds_keep_foreign_clients_out_as_well() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (store, manager) = (client_of(&server).await, rslock(&server));
    let taken = async || matches!(manager.lock(KEY, LONG).await, Err(LockError::Unavailable));
    let reader = || with(request("counter"), |request| request.mode = Mode::Shared);
    let (first, second) = (take(&store, &reader()).await, take(&store, &reader()).await);
    assert!(taken().await);
    give_back(&store, &first.key).await;
    assert!(taken().await, "the second reader is still there");
    give_back(&store, &second.key).await;
    let brief =
        take(&store, &with(request("counter"), |request| request.min_hold = Duration::from_secs(600))).await;
    give_back(&store, &brief.key).await;
    assert!(taken().await, "it lingers");
    store.break_lock(&name("counter"), "enough").await.unwrap();
    manager.lock(KEY, LONG).await.unwrap();
}

/// A foreign client renews without our scripts: it would not learn of a revoke.
#[tokio::test(flavor = "multi_thread")]
async fn a_revoke_of_a_foreign_lock_says_that_it_cannot_and_changes_nothing() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (store, manager) = (client_of(&server).await, rslock(&server));
    let theirs = manager.lock(KEY, LONG).await.unwrap();
    let before = common::tell(server.addr(), &["GET", KEY]);
    let refused = store.revoke(&name("counter"), "the host is drained").await.unwrap_err();
    common::says(&refused, Outcome::Unsupported, &["another Redis client", "counter"]);
    assert_eq!(common::tell(server.addr(), &["GET", KEY]), before);
    manager.extend(&theirs, LONG).await.expect("it is still theirs");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_break_frees_a_foreign_lock_and_its_late_release_harms_no_holder() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (store, manager) = (client_of(&server).await, rslock(&server));
    let theirs = manager.lock(KEY, LONG).await.unwrap();
    let fence = store.break_lock(&name("counter"), "its host is gone").await.unwrap();
    let ours = take(&store, &request("counter")).await;
    grow(&[fence, ours.fence]);
    theirs.release().await;
    assert_eq!(renew(&store, &ours).await, RenewOutcome::Renewed);
}
