//! The clock of the servers is set forward while a hold-back node keeps a lock.

mod common;

use std::time::Duration;

use common::{admin, tree, try_open};
use lockkeeper_core::RenewOutcome;
use lockkeeper_core::lease::margin;
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_testkit::laws::{eventually, give_back, granted, join_queue, request, take, with};
use lockkeeper_testkit::proxy::{Framing, Proxy};
use lockkeeper_testkit::servers::{self, ClockShim, ZooKeeperOptions};

/// A holder whose session has ended leaves a hold-back node for the rest of its ttl. By the clock of a leader that was
/// ahead of the previous one, that rest was over too early.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_set_forward_does_not_end_a_lease_early() {
    let Ok(clock) = ClockShim::build() else { return };
    let options = ZooKeeperOptions { clock: Some(clock.clone()), ..ZooKeeperOptions::default() };
    let Ok(server) = servers::zookeeper(options) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let cut_off = try_open(&format!("zk://{}?session=6s", proxy.addr())).await.unwrap();
    let other = try_open(&format!("zk://{}?poll=100ms", server.addr())).await.unwrap();
    let ttl = Duration::from_secs(14);
    let held = take(&cut_off, &with(request("x"), |request| request.ttl = ttl)).await;
    let renewed_at = SystemClock.now();
    assert_eq!(cut_off.renew(&[held]).await.unwrap(), [RenewOutcome::Renewed]);
    proxy.cut_all();
    let waits = join_queue(&other, &request("x"), 1).await;
    let admin = admin(server.addr()).await;
    eventually("its session has ended", || async {
        tree(&admin, "/lock/x").await.iter().filter(|node| node.contains("-lock-")).count() == 1
    })
    .await;
    // Servers' clocks may differ by ten seconds.
    clock.jump(9 * ClockShim::SECOND);
    // A client that writes learns the new time.
    give_back(&other, &take(&other, &request("y")).await.key).await;
    let next = granted(waits).await;
    let believed = renewed_at + (ttl - margin(ttl));
    assert!(SystemClock.now() >= believed, "two held it for {:?}", believed.since(SystemClock.now()));
    give_back(&other, &next.key).await;
}
