//! Curator's `InterProcessMutex`, kazoo's `Lock` and this store exclude each other.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::{Counter, keeper, open};
use lockkeeper_core::Error;
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, is_free, join_queue, name, owner, queue_reaches, refused, request, take,
    with,
};
use lockkeeper_testkit::servers::{self, TempDir, ZooKeeperOptions, require};

const JARS: [&str; 8] = [
    "curator-recipes",
    "curator-framework",
    "curator-client",
    "zookeeper",
    "zookeeper-jute",
    "guava",
    "slf4j-api",
    "slf4j-nop",
];

/// A client of another library, which reads commands from its standard input.
struct Foreign {
    child: Child,
    say: ChildStdin,
    hear: BufReader<ChildStdout>,
}

impl Foreign {
    fn start(command: &mut Command) -> Foreign {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it runs");
        let (say, hear) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Foreign { child, say, hear }
    }

    fn tell(&mut self, order: &str) {
        writeln!(self.say, "{order}").expect("it listens");
    }

    fn wait_for(&mut self, wanted: &str) {
        let mut line = String::new();
        self.hear.read_line(&mut line).expect("it answers");
        assert_eq!(line.trim(), wanted);
    }

    fn order(&mut self, order: &str, answer: &str) {
        self.tell(order);
        self.wait_for(answer);
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// Curator, in the long suites only: it needs a JDK, for `java Source.java`.
fn curator(addr: SocketAddr, path: &str, counter: &Path) -> Option<Foreign> {
    std::env::var_os("LOCKKEEPER_FULL")?;
    require("curator", "/usr/share/java/curator-recipes.jar", "libcurator-recipes-java").ok()?;
    require("curator", "/usr/share/java/slf4j-nop.jar", "libslf4j-java").ok()?;
    require("curator", "javac", "default-jdk-headless").ok()?;
    let jars: Vec<String> = JARS.iter().map(|jar| format!("/usr/share/java/{jar}.jar")).collect();
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/foreign/Contender.java");
    let mut java = Command::new("java");
    java.args(["-cp", &jars.join(":")]).arg(source).args([&addr.to_string(), path]).arg(counter);
    Some(Foreign::start(&mut java))
}

fn kazoo(addr: SocketAddr, path: &str, counter: &Path) -> Option<Foreign> {
    require("kazoo", "/usr/lib/python3/dist-packages/kazoo/__init__.py", "python3-kazoo").ok()?;
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/foreign/contender.py");
    let mut python = Command::new("/usr/bin/python3");
    python.arg(source).args([&addr.to_string(), path]).arg(counter);
    Some(Foreign::start(&mut python))
}

/// Three foreign clients and three of this store count under one lock.
async fn lose_no_count(start: fn(SocketAddr, &str, &Path) -> Option<Foreign>) {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let dir = TempDir::new("foreign");
    let counter = Arc::new(Counter::new(dir.path()));
    let (addr, rounds) = (server.addr(), 20);
    // It counts in three threads with a session each.
    let Some(mut theirs) = start(addr, "/lock/shared", counter.path()) else { return };
    let mut theirs = tokio::task::spawn_blocking(move || {
        theirs.wait_for("ready");
        theirs.tell(&format!("count {rounds}"));
        theirs
    })
    .await
    .unwrap();
    let mut ours = Vec::new();
    for _ in 0..3 {
        let (keeper, counter) = (keeper(&open(addr).await), counter.clone());
        ours.push(tokio::spawn(async move {
            for _ in 0..rounds {
                let guard = keeper.lock("shared").ttl(Duration::from_secs(10)).acquire().await.unwrap();
                counter.add_one().await;
                guard.release().await.unwrap();
            }
        }));
    }
    for one in ours {
        one.await.unwrap();
    }
    tokio::task::spawn_blocking(move || theirs.wait_for("counted")).await.unwrap();
    assert_eq!(counter.get(), 6 * rounds, "two clients held the lock at once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curator_and_ours_lose_no_count() {
    lose_no_count(curator).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kazoo_and_ours_lose_no_count() {
    lose_no_count(kazoo).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curator_is_seen_waited_for_and_broken() {
    seen_waited_for_and_broken(curator).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kazoo_is_seen_waited_for_and_broken() {
    seen_waited_for_and_broken(kazoo).await;
}

async fn seen_waited_for_and_broken(start: fn(SocketAddr, &str, &Path) -> Option<Foreign>) {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let dir = TempDir::new("foreign");
    let counter = Counter::new(dir.path());
    let store = open(server.addr()).await;
    let Some(mut theirs) = start(server.addr(), "/lock/x", counter.path()) else { return };
    tokio::task::block_in_place(|| {
        theirs.wait_for("ready");
        theirs.order("acquire", "acquired");
    });
    let busy = refused(&store, &request("x")).await;
    assert_eq!(busy.held.len(), 1);
    let waiter = join_queue(&store, &request("x"), 1).await;
    let broken = store.break_lock(&name("x"), "it hangs").await.unwrap();
    let next = granted(waiter).await;
    assert!(next.fence > broken);
    // The foreign client does not know that its lock was broken.
    tokio::task::block_in_place(|| theirs.order("release", "released"));
    // This store keeps the foreign client out, which acquires the lock after the release.
    theirs.tell("acquire");
    queue_reaches(&store, &name("x"), 1).await;
    give_back(&store, &next.key).await;
    tokio::task::block_in_place(|| theirs.wait_for("acquired"));
    refused(&store, &request("x")).await;
    tokio::task::block_in_place(|| theirs.order("release", "released"));
    // A waiting foreign client acquires the lock when the first hold ends, so a re-entry past it would be a second
    // holder.
    let me = owner();
    let mine = || with(request("x"), |request| request.owner = Some(me));
    let held = take(&store, &mine()).await;
    theirs.tell("acquire");
    queue_reaches(&store, &name("x"), 1).await;
    assert!(matches!(store.acquire(&mine()).await, Err(Error::Deadlock(_))));
    give_back(&store, &held.key).await;
    tokio::task::block_in_place(|| {
        theirs.wait_for("acquired");
        theirs.order("release", "released");
    });
    eventually("the queue is empty", || async { store.inspect(&name("x")).await.unwrap().is_none() }).await;
    is_free(&store, "x").await;
}
