//! Servers that say nothing.

mod common;

use common::try_open;
use futures_util::future::join_all;
use lockkeeper_core::Error;
use lockkeeper_testkit::laws::{ask, soon};
use lockkeeper_testkit::proxy::{Direction, Framing, Proxy};
use lockkeeper_testkit::servers::{self, EtcdOptions};

/// All of them need the same lease. If each asked for it when the one before had given up, the last would hear after minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_asks_fail_together() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Bytes);
    let store = try_open(&format!("etcd://{}?timeout=2s", proxy.addr())).await.unwrap();
    proxy.hold(Direction::Replies);
    let asks: Vec<_> = (0..100).map(|i| ask(&format!("x/{i}"))).collect();
    let told = soon("all are told", join_all(asks.iter().map(|ask| store.acquire(ask)))).await;
    for told in told {
        assert!(matches!(told, Err(Error::Unknown(_) | Error::Unavailable(_))), "{told:?}");
    }
    proxy.heal();
}
