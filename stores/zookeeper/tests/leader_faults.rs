//! The contention laws on three servers, while the leader is killed, hangs, or is cut off from the others.

use std::sync::Arc;

use lockkeeper_core::{Result, Store};
use lockkeeper_testkit::servers::{self, Cluster, ZooKeeperOptions};
use lockkeeper_zookeeper::{Options, ZooKeeperStore};

fn start() -> Option<Cluster> {
    // Sessions that outlast an election.
    let extra = vec!["maxSessionTimeout=60000".into()];
    servers::zookeeper_islands(3, ZooKeeperOptions { extra, ..ZooKeeperOptions::default() }).ok()
}

async fn open(hosts: String, prefix: String) -> Result<Arc<dyn Store>> {
    let url = format!("zk://{hosts}/{prefix}?timeout=1s&session=60s&create=yes");
    Ok(Arc::new(ZooKeeperStore::open(Options::from_url(&url).unwrap()).await?))
}

lockkeeper_testkit::conformance_in_every_storm!(start, open);
