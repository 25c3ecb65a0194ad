//! TLS: only servers with a trusted certificate are accepted.
#![cfg(feature = "tls")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::{Counter, keeper, try_open};
use lockkeeper_core::{AcquireOutcome, Error, Store};
use lockkeeper_testkit::laws::{eventually, give_back, refused, request, soon, take};
use lockkeeper_testkit::proxy::{Framing, Pick, Proxy};
use lockkeeper_testkit::servers::{
    self, Server, TempDir, TlsFiles, ZooKeeperOptions, zookeeper_cluster, zookeeper_tls_addr,
};
use lockkeeper_zookeeper::{Options, Tls, ZooKeeperStore};

/// A server with these certificates, and these lines in its configuration.
fn start(tls: &TlsFiles, extra: &[&str]) -> Option<Server> {
    let extra = extra.iter().map(|line| (*line).to_owned()).collect();
    servers::zookeeper(ZooKeeperOptions { tls: Some(tls.clone()), extra, ..Default::default() }).ok()
}

/// An address that trusts the CA in the file `ca`.
fn url(hosts: impl std::fmt::Display, ca: &Path) -> String {
    format!("zks://{hosts}?ca={}&timeout=20s", ca.display())
}

async fn open(url: &str) -> Arc<dyn Store> {
    try_open(url).await.unwrap_or_else(|error| panic!("{url}: {error}"))
}

async fn denied(url: &str) -> String {
    match try_open(url).await.err() {
        Some(Error::Denied(why)) => why,
        other => panic!("{url}: {other:?}"),
    }
}

async fn works(store: &Arc<dyn Store>) {
    let held = take(store, &request("x")).await;
    give_back(store, &held.key).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_trusted_servers_are_accepted() {
    let (tls, others) = (TlsFiles::new(), TlsFiles::new());
    let Some(server) = start(&tls, &[]) else { return };
    let addr = zookeeper_tls_addr(&server);
    let store = open(&url(addr, &tls.ca_path())).await;
    works(&store).await;
    // The version is read through TLS too: this store is good enough for correctness.
    drop(keeper(&store).lock("x").for_correctness().acquire().await.unwrap());
    let why = denied(&url(addr, &others.ca_path())).await;
    assert!(why.contains("?ca=FILE"), "{why}");
    let why = denied(&url(addr, &tls.revoked_path())).await;
    assert!(why.to_lowercase().contains("revoked"), "{why}");
    // The CAs of the machine, if it has any, did not issue this certificate.
    let error = try_open(&format!("zks://{addr}?timeout=20s")).await.err();
    assert!(matches!(error, Some(Error::Denied(_) | Error::Invalid(_))), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_host_must_be_in_the_certificate() {
    let tls = TlsFiles::by_name();
    let Some(server) = start(&tls, &[]) else { return };
    let addr = zookeeper_tls_addr(&server);
    works(&open(&url(format!("localhost:{}", addr.port()), &tls.ca_path())).await).await;
    let why = denied(&url(addr, &tls.ca_path())).await;
    assert!(why.contains("localhost") && why.contains("name from the certificate"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_presents_its_certificate_on_request() {
    let (tls, others) = (TlsFiles::new(), TlsFiles::new());
    // With TLS 1.3 the server rejects the certificate after the client has finished its handshake.
    for (protocol, suite) in
        [("TLSv1.2", "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"), ("TLSv1.3", "TLS_AES_128_GCM_SHA256")]
    {
        let lines = [
            "ssl.clientAuth=need".to_owned(),
            format!("ssl.protocol={protocol}"),
            format!("ssl.enabledProtocols={protocol}"),
            format!("ssl.ciphersuites={suite}"),
        ];
        let Some(server) = start(&tls, &lines.each_ref().map(String::as_str)) else { return };
        let anonymous = url(zookeeper_tls_addr(&server), &tls.ca_path());
        let why = denied(&anonymous).await;
        assert!(why.contains("?cert=FILE"), "{protocol}: {why}");
        let shown = |who: &TlsFiles| {
            format!("{anonymous}&cert={}&key={}", who.cert_path().display(), who.key_path().display())
        };
        let why = denied(&shown(&others)).await;
        assert!(why.contains("our certificate"), "{protocol}: {why}");
        works(&open(&shown(&tls)).await).await;
        // Nodes belong to the user, and to the certificate that the user presented.
        let user = |who: &str| {
            shown(&tls).replace("zks://", &format!("zks://{who}@")).replace('?', "/mine?create=yes&")
        };
        works(&open(&user("me:secret")).await).await;
        works(&open(&user("me:guess")).await).await;
        let plain = format!("zk://me:guess@{}/mine", server.addr());
        denied(&plain).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tls_client_is_told_that_a_port_is_plain() {
    let tls = TlsFiles::new();
    // Plain servers and TLS servers use different network layers (NIO and Netty).
    let Ok(plain) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let Some(both) = start(&tls, &[]) else { return };
    for server in [plain, both] {
        match try_open(&url(server.addr(), &tls.ca_path())).await.err() {
            Some(Error::Unavailable(why)) => assert!(why.contains("use zk://"), "{why}"),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_server_ends_in_a_timeout() {
    let tls = TlsFiles::new();
    let Some(server) = start(&tls, &[]) else { return };
    let addr = zookeeper_tls_addr(&server);
    server.pause();
    let address = url(addr, &tls.ca_path()).replace("20s", "300ms");
    let error = soon("it gives up", try_open(&address)).await.err();
    assert!(matches!(error, Some(Error::Unavailable(_))), "{error:?}");
    server.resume();
    works(&open(&url(addr, &tls.ca_path())).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_count_is_lost_over_tls() {
    let tls = TlsFiles::new();
    let Some(server) = start(&tls, &[]) else { return };
    let dir = TempDir::new("tls-count");
    let counter = Arc::new(Counter::new(dir.path()));
    let mut workers = Vec::new();
    for _ in 0..3 {
        let keeper = keeper(&open(&url(zookeeper_tls_addr(&server), &tls.ca_path())).await);
        for _ in 0..4 {
            let (keeper, counter) = (keeper.clone(), counter.clone());
            workers.push(tokio::spawn(async move {
                for _ in 0..10 {
                    let guard = keeper.lock("popular").ttl(Duration::from_secs(15)).acquire().await.unwrap();
                    counter.add_one().await;
                    guard.release().await.unwrap();
                }
            }));
        }
    }
    for worker in workers {
        soon("a worker ends", worker).await.unwrap();
    }
    assert_eq!(counter.get(), 120);
}

/// Also over a broken connection: the client reconnects with TLS, and the session goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_is_renewed_over_reconnects() {
    let tls = TlsFiles::new();
    let Some(server) = start(&tls, &[]) else { return };
    let proxy = Proxy::start(zookeeper_tls_addr(&server), Framing::Bytes);
    let (store, other) = (
        open(&url(proxy.addr(), &tls.ca_path())).await,
        open(&url(zookeeper_tls_addr(&server), &tls.ca_path())).await,
    );
    let guard = keeper(&store).lock("x").ttl(Duration::from_secs(2)).acquire().await.unwrap();
    for _ in 0..4 {
        proxy.cut(Pick::Any);
        let before = guard.deadline();
        eventually("it is renewed", || async { guard.deadline() > before }).await;
        refused(&other, &request("x")).await;
    }
    assert!(guard.is_held());
    guard.release().await.unwrap();
    works(&other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_server_is_found_when_one_is_gone() {
    let tls = TlsFiles::new();
    let options = ZooKeeperOptions { tls: Some(tls.clone()), ..Default::default() };
    let Ok(mut cluster) = zookeeper_cluster(3, options) else { return };
    let hosts: Vec<String> =
        cluster.nodes().iter().map(|node| zookeeper_tls_addr(node).to_string()).collect();
    let store = open(&url(hosts.join(","), &tls.ca_path()).replace("20s", "2s")).await;
    let first = take(&store, &request("x")).await;
    give_back(&store, &first.key).await;
    let leader = cluster.leader();
    tokio::task::block_in_place(|| cluster.node_mut(leader).kill9());
    eventually("the others go on", || async {
        match store.acquire(&request("x")).await {
            Ok(AcquireOutcome::Granted(grant)) => grant.fence > first.fence,
            _ => false,
        }
    })
    .await;
}

#[tokio::test]
async fn unusable_files_and_hosts_are_refused() {
    let (tls, others) = (TlsFiles::new(), TlsFiles::new());
    let [ca, cert, key, foreign] = [tls.ca_path(), tls.cert_path(), tls.key_path(), others.key_path()]
        .map(|path| path.display().to_string());
    for bad in [
        "zks://h?ca=/nowhere".to_owned(),
        format!("zks://h?ca={key}"),
        format!("zks://h?ca={ca}&cert={cert}"),
        format!("zks://h?ca={ca}&cert={cert}&key=/nowhere"),
        format!("zks://h?ca={ca}&cert={cert}&key={cert}"),
        format!("zks://h?ca={ca}&cert={key}&key={key}"),
        format!("zks://h?ca={ca}&cert={cert}&key={foreign}"),
        format!("zks://no%20name?ca={ca}"),
    ] {
        let error = Options::from_url(&bad);
        assert!(matches!(error, Err(Error::Invalid(_))), "{bad}: {error:?}");
    }
    // The client library would take this as a request not to encrypt.
    let mut options = Options::new(vec!["tcp://127.0.0.1:2181".into()]);
    options.tls = Some(Tls::new(Some(&ca), None).unwrap());
    assert!(matches!(ZooKeeperStore::open(options).await, Err(Error::Invalid(_))));
}
