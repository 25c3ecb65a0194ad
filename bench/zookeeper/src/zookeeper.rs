//! Against the lock recipe of the client crate that we use ourselves.

use std::sync::Arc;

use lockkeeper_core::Store;
use lockkeeper_testkit::ratio::{Comparison, CycleCounter, acquire_and_release, measure};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};
use lockkeeper_zookeeper::{Options, ZooKeeperStore};
use zookeeper_client::{Acls, Client, CreateMode, LockOptions, LockPrefix, MultiWriteResult};

/// Its lock, in Curator's layout, given back with an answer.
async fn recipe(client: Client, task: u64, run: CycleCounter) {
    let dir = format!("/recipe-{task}");
    let open = CreateMode::Container.with_acls(Acls::anyone_all());
    while run.goes_on() {
        let prefix = LockPrefix::new_curator(&dir, "lock-").expect("a path");
        let options =
            LockOptions::new(Acls::anyone_all()).with_ancestor_options(open.clone()).expect("options");
        let lock = client.lock(prefix, b"bench", options).await.expect("a lock");
        client.delete(lock.lock_path(), None).await.expect("an answer");
        // Dropping it would delete it once more.
        std::mem::forget(lock);
        run.one_more();
    }
}

/// The least that a lock with a fence could be: make the node and count what is there, and delete it. One round trip each.
async fn bare(client: Client, task: u64, run: CycleCounter) {
    let dir = format!("/bare-{task}");
    let open = CreateMode::Container.with_acls(Acls::anyone_all());
    client.mkdir(&dir, &open).await.expect("a node");
    let place = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    while run.goes_on() {
        let mut take = client.new_multi_writer();
        take.add_create(&format!("{dir}/_c_bench-lock-"), b"bench", &place).expect("a step");
        take.add_set_data(&dir, b"", None).expect("a step");
        let done = take.commit().await.expect("an answer");
        let Some(MultiWriteResult::Create { path, .. }) = done.first() else { panic!("{done:?}") };
        client.delete(path, None).await.expect("an answer");
        run.one_more();
    }
}

pub async fn run(rounds: usize) {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    println!("ZooKeeper 3.8, {rounds} rounds, medians");
    let client = Client::connect(&server.addr().to_string()).await.expect("a connection");
    let options = Options::from_url(&format!("zk://{}", server.addr())).expect("an address");
    let store: Arc<dyn Store> = Arc::new(ZooKeeperStore::open(options).await.expect("a store"));
    let mut many = Comparison::new("  64 tasks, the recipe of zookeeper-client");
    let mut some = Comparison::new("  8 tasks, the recipe of zookeeper-client");
    let mut one = Comparison::new("  1 task, the recipe of zookeeper-client");
    let mut least = Comparison::new("  1 task, a bare create and delete");
    for _ in 0..rounds {
        let peer = measure(64, |task, run| recipe(client.clone(), task, run)).await;
        many.add(peer, measure(64, |task, run| acquire_and_release(store.clone(), task, run)).await);
        let peer = measure(8, |task, run| recipe(client.clone(), task, run)).await;
        some.add(peer, measure(8, |task, run| acquire_and_release(store.clone(), task, run)).await);
        let peer = measure(1, |task, run| recipe(client.clone(), task, run)).await;
        let ours = measure(1, |task, run| acquire_and_release(store.clone(), task, run)).await;
        one.add(peer, ours);
        least.add(measure(1, |task, run| bare(client.clone(), task, run)).await, ours);
    }
    many.print("goal: at least 1.5");
    some.print("goal: at least 1.5");
    one.print("two writes and no read against two writes and a read");
    least.print("two writes against two: 1 at best");
}
