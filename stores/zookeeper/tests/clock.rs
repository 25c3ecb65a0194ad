//! The clock of the servers, which is set while a lock is held back.

mod common;

use std::time::Duration;

use common::{admin, tree, try_open};
use lockkeeper_core::Renewal;
use lockkeeper_core::lease::margin;
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_testkit::laws::{ask, eventually, give_back, granted, stand_in_line, take, with};
use lockkeeper_testkit::proxy::{Framing, Proxy};
use lockkeeper_testkit::servers::{self, ClockShim, ZooKeeperOptions};

/// Of a holder whose session has ended a note is left, for the rest of its ttl. By the clock of a leader that is ahead of the one before,
/// that was over before its time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_set_forward_lets_nobody_in_before_the_holder_knows() {
    let Ok(clock) = ClockShim::build() else { return };
    let options = ZooKeeperOptions { clock: Some(clock.clone()), ..ZooKeeperOptions::default() };
    let Ok(server) = servers::zookeeper(options) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let cut_off = try_open(&format!("zk://{}?session=2s", proxy.addr())).await.unwrap();
    let other = try_open(&format!("zk://{}?poll=100ms", server.addr())).await.unwrap();
    let ttl = Duration::from_secs(8);
    let held = take(&cut_off, &with(ask("x"), |ask| ask.ttl = ttl)).await;
    let renewed_at = SystemClock.now();
    assert_eq!(cut_off.renew(&[held]).await.unwrap(), [Renewal::Renewed]);
    proxy.cut_all();
    let waits = stand_in_line(&other, &ask("x"), 1).await;
    let admin = admin(server.addr()).await;
    eventually("its session has ended", || async {
        tree(&admin, "/lock/x").await.iter().filter(|node| node.contains("-lock-")).count() == 1
    })
    .await;
    clock.jump(7 * ClockShim::SECOND);
    // Whoever writes hears of it.
    give_back(&other, &take(&other, &ask("y")).await.claim).await;
    let next = granted(waits).await;
    let believed = renewed_at + (ttl - margin(ttl));
    assert!(SystemClock.now() >= believed, "two held it for {:?}", believed.since(SystemClock.now()));
    give_back(&other, &next.claim).await;
}
