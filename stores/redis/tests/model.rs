//! The scripts beside the lock table of `core`, which is the reference.

use std::sync::Arc;

use lockkeeper_core::Store;
use lockkeeper_redis::{Options, RedisStore};
use lockkeeper_testkit::lock_table::compare_with_table;
use lockkeeper_testkit::servers::{self, ClockShim, RedisOptions};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_scripts_do_what_the_table_does() {
    compare(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_clients_do_together_what_the_table_does() {
    compare(3).await;
}

async fn compare(clients: usize) {
    let Ok(clock) = ClockShim::build() else { return };
    let options = RedisOptions { clock: Some(clock.clone()), ..RedisOptions::default() };
    let Ok(server) = servers::redis(options) else { return };
    compare_with_table(clients, &clock, async |seed| {
        let url = format!("redis://{}?prefix=seed{seed}:&poll=50ms&claim=10m", server.addr());
        let options = Options::from_url(&url).unwrap();
        Arc::new(RedisStore::open(options).await.unwrap()) as Arc<dyn Store>
    })
    .await;
}
