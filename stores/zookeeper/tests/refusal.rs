//! The error of a failed open names each server, the cause and a remedy.

mod common;

use common::{open, try_open};
use lockkeeper_core::Error;
use lockkeeper_testkit::servers::{self, Port, TlsFiles, ZooKeeperOptions, zookeeper_tls_addr};

async fn away(url: &str) -> String {
    match try_open(url).await.err() {
        Some(Error::Unavailable(why)) => why,
        other => panic!("{url}: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_client_is_told_that_a_port_is_for_tls() {
    let tls = Some(TlsFiles::new());
    let Ok(server) = servers::zookeeper(ZooKeeperOptions { tls, ..ZooKeeperOptions::default() }) else {
        return;
    };
    let why = away(&format!("zk://{}?timeout=20s", zookeeper_tls_addr(&server))).await;
    assert!(why.contains("zks://"), "{why}");
    // The same server accepts plain connections on its other port.
    open(server.addr()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_error_names_each_server() {
    let (one, two) = (Port::claim(), Port::claim());
    let hosts = [&one, &two].map(|port| format!("127.0.0.1:{}", port.number()));
    let why = away(&format!("zk://{}", hosts.join(","))).await;
    assert!(hosts.iter().all(|host| why.contains(host)) && why.contains("refused"), "{why}");
}
