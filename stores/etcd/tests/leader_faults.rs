//! The contending laws on three members while the leader is killed, hangs, or is partitioned from the others.

use std::sync::Arc;

use lockkeeper_core::{Result, Store};
use lockkeeper_etcd::{EtcdStore, Options};
use lockkeeper_testkit::servers::{self, Cluster, EtcdOptions};

fn start() -> Option<Cluster> {
    servers::etcd_islands(3, EtcdOptions::default()).ok()
}

async fn open(hosts: String, prefix: String) -> Result<Arc<dyn Store>> {
    let options = Options::from_url(&format!("etcd://{hosts}/{prefix}?timeout=1s")).unwrap();
    Ok(Arc::new(EtcdStore::open(options).await?))
}

lockkeeper_testkit::conformance_in_every_storm!(start, open);
