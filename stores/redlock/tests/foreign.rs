//! Another Redlock client, node-redlock, on the same locks: theirs keep ours out and ours keep theirs out.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use common::*;
use lockkeeper_core::{AcquireOutcome, LockRequest, Locks, Wait};
use lockkeeper_testkit::servers::{self, TempDir};

const TTL: Duration = Duration::from_secs(20);
const ROUNDS: u32 = 25;

/// A process with node-redlock in it, which is killed when dropped.
struct Node(Child, BufReader<ChildStdout>);

/// Installs it into a directory of its own. It is big, so this is for `--full` alone; there it is demanded.
fn install() -> Option<TempDir> {
    std::env::var_os("LOCKKEEPER_FULL")?;
    for (program, package) in [("node", "nodejs"), ("npm", "npm")] {
        servers::require("node", program, package).ok()?;
    }
    let dir = TempDir::new("node");
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign");
    for file in ["package.json", "count.mjs"] {
        std::fs::copy(here.join(file), dir.join(file)).unwrap();
    }
    let mut npm = Command::new("npm");
    npm.args([
        "install",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--fetch-timeout=20000",
        "--fetch-retries=1",
    ]);
    let done = npm.current_dir(dir.path()).stdout(Stdio::null()).status().expect("npm can be run");
    assert!(done.success(), "npm could not install node-redlock");
    Some(dir)
}

impl Node {
    fn start(dir: &TempDir, file: &Path, fleet: &Fleet) -> Node {
        let ports = fleet.servers.iter().map(|server| server.addr().port().to_string());
        let mut command = Command::new("node");
        command.current_dir(dir.path()).arg("count.mjs").arg(file).arg(ROUNDS.to_string()).args(ports);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("node can be run");
        let out = BufReader::new(child.stdout.take().expect("it has one"));
        let mut node = Node(child, out);
        node.says("ready");
        node
    }

    fn go(&mut self) {
        self.0.stdin.as_mut().expect("it has one").write_all(b"go\n").expect("it listens");
    }

    fn says(&mut self, word: &str) {
        let mut line = String::new();
        tokio::task::block_in_place(|| self.1.read_line(&mut line)).expect("it speaks");
        assert_eq!(line.trim_end(), word);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_redlock_and_we_exclude_each_other() {
    let Some(dir) = tokio::task::block_in_place(install) else { return };
    let Some(fleet) = tokio::task::block_in_place(Fleet::start) else { return };
    let store = fleet.open("young_node=0s&node_timeout=1s&timeout=2s").await;
    let file = dir.join("count");
    std::fs::write(&file, "0").unwrap();
    let mut node = Node::start(&dir, &file, &fleet);
    node.go();
    for _ in 0..ROUNDS {
        let patient = LockRequest { wait: Wait::Forever, ..request("counter", TTL) };
        let grant = tokio::time::timeout(TTL * 2, take(&store, &patient)).await.expect("we get our turns");
        let count: u32 = std::fs::read_to_string(&file).unwrap().parse().unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
        std::fs::write(&file, (count + 1).to_string()).unwrap();
        store.release(&grant.key).await.unwrap();
    }
    node.says("counted");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), (2 * ROUNDS).to_string());

    let ours = take(&store, &request("ours", TTL)).await;
    node.go();
    node.says("refused");
    node.says("holds");
    match store.acquire(&request("theirs", TTL)).await {
        Ok(AcquireOutcome::Busy(busy)) => assert_eq!(busy.held[0].holder.host, "unknown"),
        other => panic!("node-redlock has it: {other:?}"),
    }
    // The foreign client publishes no release, so the waiter polls.
    let waiting = store.clone();
    let waiter = tokio::spawn(async move {
        waiting.acquire(&LockRequest { wait: Wait::For(TTL), ..request("theirs", TTL) }).await
    });
    node.go();
    node.says("released");
    assert!(granted(&waiter.await.unwrap()));
    store.release(&ours.key).await.unwrap();
}
