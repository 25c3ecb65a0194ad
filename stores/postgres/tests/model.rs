//! The functions of the database beside the lock table of `core`, which is the reference.

use std::sync::Arc;

use lockkeeper_core::Store;
use lockkeeper_postgres::{Options, PostgresStore};
use lockkeeper_testkit::lock_table::compare_with_table;
use lockkeeper_testkit::servers::{self, ClockShim, PostgresOptions};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_functions_do_what_the_table_does() {
    compare(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_clients_do_together_what_the_table_does() {
    compare(3).await;
}

async fn compare(clients: usize) {
    let Ok(clock) = ClockShim::build() else { return };
    let options = PostgresOptions { clock: Some(clock.clone()), ..PostgresOptions::default() };
    let Ok(server) = servers::postgres(options) else { return };
    compare_with_table(clients, &clock, async |seed| {
        let url = format!(
            "postgres://postgres@{}/postgres?schema=seed{seed}&poll=50ms&claim=10m&timeout=20s",
            server.addr()
        );
        let options = Options::from_url(&url).unwrap();
        Arc::new(PostgresStore::open(options).await.unwrap()) as Arc<dyn Store>
    })
    .await;
}
