//! An administrator deletes everything, the base of the fences included, while clients that were open before go on. And
//! the servers take away the nodes of empty lines, as they do by themselves.

mod common;

use std::time::Duration;

use common::{admin, open, tree, wipe};
use lockkeeper_core::{Acquired, Expect, Renewal, Wait, Write};
use lockkeeper_testkit::laws::{ask, eventually, give_back, in_line, name, soon, take, with};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};
use zookeeper_client::{Acls, CreateMode};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_deleted_and_no_fence_goes_back() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let admin = admin(server.addr()).await;
    let stores = [open(server.addr()).await, open(server.addr()).await, open(server.addr()).await];
    let mut highest = None;
    for round in 0..5 {
        let held = take(&stores[round % 3], &ask("x")).await;
        assert!(Some(held.fence) > highest, "{:?} after {highest:?}", held.fence);
        highest = Some(held.fence);
        let (store, patient) =
            (stores[(round + 1) % 3].clone(), with(ask("x"), |ask| ask.wait = Wait::Forever));
        let waiter = tokio::spawn(async move { (store.acquire(&patient).await, patient) });
        in_line(&stores[0], &name("x"), 1).await;
        // A waiter comes back while it is deleted: it is done when the holder's node is gone.
        for node in tree(&admin, "/lock").await.iter().rev() {
            _ = admin.delete(node, None).await;
        }
        assert_eq!(stores[round % 3].renew(&[held]).await.unwrap(), [Renewal::Lost]);
        let (served, patient) = soon("whoever waited is served", waiter).await.unwrap();
        let Ok(Acquired::Granted(served)) = served else { panic!("{served:?}") };
        assert!(Some(served.fence) > highest, "{:?} after {highest:?}", served.fence);
        highest = Some(served.fence);
        give_back(&stores[0], &patient.claim).await;
    }
    // Somebody wrote something else there: a client that remembers better does not believe it.
    let record = stores[0].write(&name("r"), b"x", Expect::Any, None).await.unwrap();
    let Write::Written(version) = record else { panic!("{record:?}") };
    wipe(&admin, "/lock/=base").await;
    let plain = CreateMode::Persistent.with_acls(Acls::anyone_all());
    admin.mkdir("/lock/=base/7", &plain).await.unwrap();
    let held = take(&stores[1], &ask("x")).await;
    assert!(Some(held.fence) > highest, "{:?} after {highest:?}", held.fence);
    assert!(version.0 > 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lines_that_the_servers_take_away_do_not_take_the_fence_back() {
    // They look for empty ones every 100 ms here, not every minute.
    let properties = vec!["znode.container.checkIntervalMs=100".to_owned()];
    let Ok(server) = servers::zookeeper(ZooKeeperOptions { properties, ..ZooKeeperOptions::default() })
    else {
        return;
    };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    let mut highest = None;
    for _ in 0..4 {
        let held = take(&store, &ask("x")).await;
        assert!(Some(held.fence) > highest, "{:?} after {highest:?}", held.fence);
        highest = Some(held.fence);
        give_back(&store, &held.claim).await;
        eventually("the empty line is taken away", || async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            admin.check_stat("/lock/x").await.unwrap().is_none()
        })
        .await;
    }
    // Also while many come and go.
    for _ in 0..100 {
        let held = take(&store, &ask("y")).await;
        assert!(Some(held.fence) > highest);
        highest = Some(held.fence);
        give_back(&store, &held.claim).await;
        tokio::time::sleep(Duration::from_millis(7)).await;
    }
}
