//! One register that many processes count in, while some are killed.

use std::time::{Duration, Instant};

use lockkeeper::Lockkeeper;
use lockkeeper_testkit::servers::{
    self, EtcdOptions, PostgresOptions, RedisOptions, TempDir, ZooKeeperOptions,
};

use super::crowd::{Crowd, below, times};

/// Sixteen processes count together in one register, and are killed at random meanwhile. A killed process goes on after the
/// addition that it was at: whether that one was done is unknown. All others count, each once.
async fn sixteen_count(store: &str) {
    let (each, kills) = (times(1000, 50), times(100, 10));
    let (dir, started) = (TempDir::new("register"), Instant::now());
    let files: Vec<_> = (0..16).map(|i| dir.join(&format!("{i}"))).collect();
    let args = files.iter().map(|file| {
        let file = format!("file={}", file.display());
        vec![format!("store={store}"), "name=visits".into(), format!("times={each}"), file]
    });
    let mut crowd = Crowd::new("add", args.collect());
    for _ in 0..kills {
        std::thread::sleep(Duration::from_millis(20 + below(60) as u64));
        crowd.kill_one(None);
    }
    let kills = crowd.killed.len() as u64;
    let mut conflicts = 0;
    for (status, said) in crowd.finish() {
        assert!(status.success(), "{said}");
        conflicts += said.trim().strip_prefix("conflicts ").unwrap().parse::<u64>().unwrap();
    }
    let (mut tried, mut done) = (0, 0);
    for file in &files {
        let story = std::fs::read(file).unwrap();
        tried += story.iter().filter(|c| **c == b't').count() as u64;
        done += story.iter().filter(|c| **c == b'd').count() as u64;
    }
    let keeper = Lockkeeper::open(store).await.unwrap();
    let counted = keeper.register::<u64>("visits").read().await.unwrap().unwrap().value;
    assert_eq!(tried, 16 * each);
    assert!(tried - done <= kills, "{} additions have no answer, and {kills} were killed", tried - done);
    assert!((done..=tried).contains(&counted), "{counted} are counted: {done} were done, {tried} tried");
    assert!(conflicts > 0, "they never met: the test shows nothing");
    println!(
        "{store}: {counted} counted, {done} told as done, {tried} tried, {kills} kills, {conflicts} conflicts, {:?}",
        started.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_processes_count_in_a_file_and_lose_none() {
    let dir = TempDir::new("register-store");
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_processes_count_in_postgres_and_lose_none() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    sixteen_count(&format!("postgres://postgres@{}/postgres?timeout=20s", server.addr())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_processes_count_in_zookeeper_and_lose_none() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    sixteen_count(&format!("zk://{}?timeout=20s", server.addr())).await;
}
