//! An administrator deletes everything, the fence base included, while open clients go on. And the servers remove
//! empty queue nodes.

mod common;

use std::time::Duration;

use common::{admin, open, tree, wipe};
use lockkeeper_core::{AcquireOutcome, Expect, RenewOutcome, Wait, WriteOutcome};
use lockkeeper_testkit::laws::{eventually, give_back, name, queue_reaches, request, soon, take, with};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};
use zookeeper_client::{Acls, CreateMode};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_grow_after_everything_is_deleted() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let admin = admin(server.addr()).await;
    let stores = [open(server.addr()).await, open(server.addr()).await, open(server.addr()).await];
    let mut highest = None;
    for round in 0..5 {
        let held = take(&stores[round % 3], &request("x")).await;
        assert!(Some(held.fence) > highest, "{:?} after {highest:?}", held.fence);
        highest = Some(held.fence);
        let (store, patient) =
            (stores[(round + 1) % 3].clone(), with(request("x"), |request| request.wait = Wait::Forever));
        let waiter = tokio::spawn(async move { (store.acquire(&patient).await, patient) });
        queue_reaches(&stores[0], &name("x"), 1).await;
        // A waiter enqueues again during the deletion: it is enough that the holder's node is gone.
        for node in tree(&admin, "/lock").await.iter().rev() {
            _ = admin.delete(node, None).await;
        }
        assert_eq!(stores[round % 3].renew(&[held]).await.unwrap(), [RenewOutcome::Lost]);
        let (served, patient) = soon("the waiter is granted", waiter).await.unwrap();
        let Ok(AcquireOutcome::Granted(served)) = served else { panic!("{served:?}") };
        assert!(Some(served.fence) > highest, "{:?} after {highest:?}", served.fence);
        highest = Some(served.fence);
        give_back(&stores[0], &patient.key).await;
    }
    // The base is replaced by a lower one: a client that has seen higher fences does not accept it.
    let record = stores[0].write(&name("r"), b"x", Expect::Any, None).await.unwrap();
    let WriteOutcome::Written(version) = record else { panic!("{record:?}") };
    wipe(&admin, "/lock/=fence-base").await;
    let plain = CreateMode::Persistent.with_acls(Acls::anyone_all());
    admin.mkdir("/lock/=fence-base/7", &plain).await.unwrap();
    let held = take(&stores[1], &request("x")).await;
    assert!(Some(held.fence) > highest, "{:?} after {highest:?}", held.fence);
    assert!(version.0 > 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_grow_after_servers_remove_queue_nodes() {
    // The servers look for empty containers every 100 ms here, not every minute.
    let properties = vec!["znode.container.checkIntervalMs=100".to_owned()];
    let Ok(server) = servers::zookeeper(ZooKeeperOptions { properties, ..ZooKeeperOptions::default() })
    else {
        return;
    };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    let mut highest = None;
    for _ in 0..4 {
        let held = take(&store, &request("x")).await;
        assert!(Some(held.fence) > highest, "{:?} after {highest:?}", held.fence);
        highest = Some(held.fence);
        give_back(&store, &held.key).await;
        eventually("the empty line is taken away", || async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            admin.check_stat("/lock/x").await.unwrap().is_none()
        })
        .await;
    }
    // Also while many requests come and go.
    for _ in 0..100 {
        let held = take(&store, &request("y")).await;
        assert!(Some(held.fence) > highest);
        highest = Some(held.fence);
        give_back(&store, &held.key).await;
        tokio::time::sleep(Duration::from_millis(7)).await;
    }
}
