//! What records leave behind in etcd.

mod common;

use std::time::Duration;

use common::{ctl, open};
use lockkeeper_core::{Delete, Expect, Write};
use lockkeeper_testkit::laws::{eventually, name};
use lockkeeper_testkit::servers::{self, EtcdOptions};

const MONTH: Duration = Duration::from_secs(30 * 24 * 3600);

/// A record that lasts for a month has a lease of its own. One that was not written after all, or is gone, has none: etcd would keep
/// each of them for the rest of the month.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_ends_with_its_record() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (store, key) = (open(server.addr()).await, name("k"));
    let write = |value: &'static [u8], expect| store.write(&key, value, expect, Some(MONTH));
    let are_there = async |count: usize| {
        eventually(&format!("{count} leases are there"), || async {
            ctl(server.addr(), &["lease", "list", "-w", "fields"]).matches("\"ID\"").count() == count
        })
        .await;
    };
    assert!(matches!(write(b"one", Expect::Absent).await.unwrap(), Write::Written(_)));
    are_there(1).await;
    assert!(matches!(write(b"two", Expect::Absent).await.unwrap(), Write::Conflict(Some(_))));
    are_there(1).await;
    assert!(matches!(write(b"three", Expect::Any).await.unwrap(), Write::Written(_)));
    are_there(1).await;
    assert_eq!(store.read(&key).await.unwrap().unwrap().value, b"three");
    assert_eq!(store.delete(&key, Expect::Any).await.unwrap(), Delete::Deleted);
    are_there(0).await;
}
