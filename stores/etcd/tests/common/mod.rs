//! Helpers for the tests on real servers.
#![allow(dead_code, reason = "every test uses a part of it")]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::task::{Context, Wake};
use std::time::Duration;

use lockkeeper::Lockkeeper;
use lockkeeper_core::{Result, Store};
use lockkeeper_etcd::{EtcdStore, Options};
use lockkeeper_host::SystemClock;
use lockkeeper_testkit::laws::soon;
use lockkeeper_testkit::servers::{Server, etcd_get};
use tokio::sync::Notify;

pub async fn try_open(url: &str) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(EtcdStore::open(Options::from_url(url)?).await?))
}

/// With a long timeout, because slow disks of a busy machine are not the subject of these tests.
pub async fn open(hosts: impl std::fmt::Display) -> Arc<dyn Store> {
    try_open(&format!("etcd://{hosts}?timeout=20s")).await.expect("it opens")
}

pub fn keeper(store: &Arc<dyn Store>) -> Lockkeeper {
    Lockkeeper::with_store(store.clone(), Arc::new(SystemClock))
}

/// The `etcdctl` command with the server's address.
pub fn etcdctl(addr: impl std::fmt::Display) -> Command {
    let mut command = Command::new("etcdctl");
    command.env("ETCDCTL_API", "3").arg(format!("--endpoints={addr}"));
    command
}

/// Runs `etcdctl` and returns its output.
pub fn ctl(addr: SocketAddr, args: &[&str]) -> String {
    let done = etcdctl(addr).args(args).stderr(Stdio::piped()).output().expect("etcdctl runs");
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success(), "etcdctl {args:?}: {said}{}", String::from_utf8_lossy(&done.stderr));
    said
}

/// How many requests of a method the server has handled.
pub fn handled(addr: SocketAddr, method: &str) -> u64 {
    let metrics = etcd_get(addr, "/metrics").expect("metrics");
    let wanted = format!("grpc_method=\"{method}\"");
    let lines = metrics
        .lines()
        .filter(|line| line.starts_with("grpc_server_handled_total") && line.contains(&wanted));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>() as u64
}

/// How many bytes the server has sent to its clients.
pub fn bytes_sent(server: &Server) -> f64 {
    let metrics = etcd_get(server.addr(), "/metrics").expect("metrics");
    let line = metrics.lines().find(|line| line.starts_with("etcd_network_client_grpc_sent_bytes_total "));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).expect("bytes that were sent")
}

/// Polls a future until it waits for a reply, and returns when the reply has arrived: the future has not processed it
/// yet.
pub async fn until_reply<T>(requests: Pin<&mut impl Future<Output = T>>) {
    struct WakeFlag(Notify);
    impl Wake for WakeFlag {
        fn wake(self: Arc<Self>) {
            self.0.notify_one();
        }
    }
    let wake = Arc::new(WakeFlag(Notify::new()));
    assert!(
        requests.poll(&mut Context::from_waker(&wake.clone().into())).is_pending(),
        "it waits for a reply"
    );
    soon("a reply arrives", wake.0.notified()).await;
}

/// A file with a number that is read, and written one higher a moment later: two concurrent holders lose a count.
pub struct Counter(PathBuf);

impl Counter {
    pub fn new(dir: &std::path::Path) -> Counter {
        let path = dir.join("counter");
        std::fs::write(&path, "0").expect("a counter");
        Counter(path)
    }

    pub fn path(&self) -> &std::path::Path {
        &self.0
    }

    pub fn get(&self) -> u64 {
        std::fs::read_to_string(&self.0).unwrap().trim().parse().expect("a number")
    }

    pub async fn add_one(&self) {
        let n = self.get();
        tokio::time::sleep(Duration::from_millis(2)).await;
        std::fs::write(&self.0, (n + 1).to_string()).expect("a counter");
    }
}
