use std::process::Child;
use std::time::Instant;

use lockkeeper::Lockkeeper;
use lockkeeper_testkit::servers::{self, EtcdOptions, RedisOptions, TempDir};

use super::crowd::{recipe, times};

/// Sixteen processes count together in one register.
async fn sixteen_count(store: &str) {
    let (processes, times) = (16, times(1000, 100));
    let started = Instant::now();
    let args = [format!("store={store}"), "name=visits".into(), format!("times={times}")];
    let children: Vec<Child> = (0..processes).map(|_| recipe("add", &args)).collect();
    let mut conflicts = 0;
    for child in children {
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success(), "{done:?}");
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        conflicts += said.trim().strip_prefix("conflicts ").unwrap().parse::<u64>().unwrap();
    }
    let keeper = Lockkeeper::open(store).await.unwrap();
    let counted = keeper.register::<u64>("visits").read().await.unwrap().unwrap();
    assert_eq!(counted.value, processes * times, "increments were lost, or counted twice");
    assert!(conflicts > 0, "they never met: the test shows nothing");
    println!("{store}: {} increments, {conflicts} conflicts, {:?}", counted.value, started.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_processes_count_in_a_file_and_lose_none() {
    let dir = TempDir::new("register");
    sixteen_count(&format!("sqlite:{}", dir.join("locks.db").display())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_processes_count_in_redis_and_lose_none() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    sixteen_count(&format!("redis://{}", server.addr())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_processes_count_in_etcd_and_lose_none() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    sixteen_count(&format!("etcd://{}?timeout=20s", server.addr())).await;
}
