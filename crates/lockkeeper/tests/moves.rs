//! Fences keep growing when a fleet moves its locks from one store to another.

use lockkeeper::Lockkeeper;
use lockkeeper_testkit::resource::CheckedFile;
use lockkeeper_testkit::servers::{self, EtcdOptions, RedisOptions, TempDir, ZooKeeperOptions};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_moves_from_store_to_store_keeps_growing_fences() {
    let Ok(redis) = servers::redis(RedisOptions::default()) else { return };
    let Ok(etcd) = servers::etcd(EtcdOptions::default()) else { return };
    let Ok(zookeeper) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let dir = TempDir::new("moves");
    let resource = CheckedFile::new(dir.path().join("resource"));
    let stores = [
        format!("redis://{}", redis.addr()),
        format!("zk://{}", zookeeper.addr()),
        format!("etcd://{}", etcd.addr()),
        format!("sqlite:{}", dir.path().join("locks.db").display()),
    ];
    let mut last = None;
    for url in &stores {
        let keeper = Lockkeeper::open(url).await.unwrap();
        for _ in 0..3 {
            let guard = keeper.lock("orders/42").acquire().await.unwrap();
            assert!(Some(guard.fence()) > last, "{url}: {} after {last:?}", guard.fence());
            resource.write(guard.fence(), url.as_str()).expect("the newest fence is taken");
            last = Some(guard.fence());
            guard.release().await.unwrap();
        }
    }
    assert_eq!(resource.accepted().unwrap().len(), 12);
}
