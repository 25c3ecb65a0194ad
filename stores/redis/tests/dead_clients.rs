//! Clients that fall silent, on one server, behind Sentinel and in a cluster: the next waiter gets the lock within the declared time.

mod common;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use common::{Client, open};
use lockkeeper_testkit::laws::wake;
use lockkeeper_testkit::proxy::{Framing, Proxy};
use lockkeeper_testkit::servers::{self, RedisOptions, Server};

/// A busy machine needs no timeout that is shorter than a pause of its own.
const OPTIONS: &str = "timeout=5s&poll=100ms&claim=2s";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_clients_cost_no_more_than_declared() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let open = async |addr| open(&format!("redis://{addr}?{OPTIONS}")).await;
    wake::dead_clients_cost_no_more_than_declared(server.addr(), Framing::Resp, open).await;
}

/// With the claim of 5 s that is the default: it follows the ttl of 2 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_waiters_of_a_short_ttl_cost_a_ttl_and_a_poll() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let open = async |addr| open(&format!("redis://{addr}")).await;
    let bound = Duration::from_secs(3);
    wake::dead_waiters_of_a_short_ttl_cost_no_more_than(bound, server.addr(), Framing::Resp, open).await;
}

/// The same with a replica that has to have each grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_clients_cost_no_more_than_declared_with_replicas() {
    let Ok(pair) = servers::redis_pair(RedisOptions::default()) else { return };
    let open = async |addr| open(&format!("redis://{addr}?{OPTIONS}&wait_replicas=1")).await;
    pair.wait_synced();
    wake::dead_clients_cost_no_more_than_declared(pair.primary().addr(), Framing::Resp, open).await;
}

/// The nodes announce their ports without a host, as behind a tunnel: a client uses the host by which it has reached them. So a client that
/// begins at another host of this machine finds a proxy of its own in front of each node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_clients_of_a_cluster_cost_no_more_than_declared() {
    let extra = vec![("cluster-preferred-endpoint-type".to_owned(), "unknown-endpoint".to_owned())];
    let options = RedisOptions { extra, ..RedisOptions::default() };
    let Ok(cluster) = servers::redis_cluster_with(3, options) else { return };
    let client_at = async |addr: SocketAddr| open(&format!("redis+cluster://{addr}?{OPTIONS}")).await;
    let mortal = async || {
        let host = next_host();
        let proxies: Vec<Proxy> =
            cluster.addrs().into_iter().map(|node| Proxy::start_on(host, node, Framing::Resp)).collect();
        let store = client_at(proxies[0].addr()).await;
        assert!(proxies.iter().all(|proxy| proxy.count().open > 0), "the client talks past a proxy");
        (proxies, store)
    };
    let live = client_at(cluster.addrs()[0]).await;
    wake::dead_clients_behind_proxies_cost_no_more_than_declared(&live, mortal).await;
}

/// A host of this machine that no other client uses.
fn next_host() -> Ipv4Addr {
    static COUNT: AtomicU16 = AtomicU16::new(1);
    let [high, low] = COUNT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    Ipv4Addr::new(127, 1, high, low)
}

/// Each client has a sentinel of its own, because a sentinel reports one address of the primary: here that of the client's proxy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_clients_behind_sentinel_cost_no_more_than_declared() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let sentinels = std::sync::Mutex::new(Vec::<Server>::new());
    let client_at = async |primary: SocketAddr| -> Client {
        let name = format!("primary-{}", primary.port());
        let sentinel = {
            let name = name.clone();
            let start =
                move || servers::redis_lone_sentinel(&name, primary).expect("the server is there too");
            tokio::task::spawn_blocking(start).await.unwrap()
        };
        let store = open(&format!("redis+sentinel://{}/{name}?{OPTIONS}", sentinel.addr())).await;
        sentinels.lock().unwrap().push(sentinel);
        store
    };
    let mortal = async || {
        let proxy = Proxy::start(server.addr(), Framing::Resp);
        let store = client_at(proxy.addr()).await;
        (vec![proxy], store)
    };
    let live = client_at(server.addr()).await;
    wake::dead_clients_behind_proxies_cost_no_more_than_declared(&live, mortal).await;
}
