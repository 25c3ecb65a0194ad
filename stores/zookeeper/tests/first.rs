//! Two clients open a store on a new path. One of them is held at each of its requests in turn, while the other one
//! creates what is missing and acquires a lock. In every order both use one fence base.

mod common;

use common::{admin, tree, try_open};
use lockkeeper_testkit::laws::{request, soon, take};
use lockkeeper_testkit::proxy::{Fault, Framing, Proxy, every_point};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_first_clients_share_one_base() {
    // A session that outlasts the pause.
    let options = ZooKeeperOptions { extra: vec!["maxSessionTimeout=60000".into()], ..Default::default() };
    let Ok(server) = servers::zookeeper(options) else { return };
    let admin = admin(server.addr()).await;
    let points = every_point(60, async |n| {
        let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
        let held = proxy.inject(Fault::at_request(n).hold());
        let url = |addr| format!("zk://{addr}/first{n}?create=yes&timeout=20s&session=60s");
        let slow = url(proxy.addr());
        let mut slow = tokio::spawn(async move { try_open(&slow).await });
        tokio::select! {
            () = held.until_fired() => {}
            opened = &mut slow => { slow = tokio::spawn(async move { opened.unwrap() }) }
        }
        let quick = try_open(&url(server.addr())).await.unwrap();
        let first = take(&quick, &request("x")).await;
        held.release();
        let slow = soon("the slow one opens", slow).await.unwrap().unwrap();
        let (second, third) = (take(&slow, &request("y")).await, take(&quick, &request("z")).await);
        assert!(first.fence < second.fence && second.fence < third.fence, "{first:?} {second:?} {third:?}");
        let bases = tree(&admin, &format!("/first{n}/=fence-base")).await;
        assert_eq!(bases.len(), 2, "more than one base at point {n}: {bases:?}");
        held.fired()
    })
    .await;
    println!("{points} points");
    assert!(points > 5, "to open is more than {points} requests");
}
