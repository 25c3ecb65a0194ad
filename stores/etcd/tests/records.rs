//! What records leave behind in etcd.

mod common;

use std::time::Duration;

use common::{ctl, open};
use lockkeeper_core::{DeleteOutcome, Expect, Page, WriteOutcome};
use lockkeeper_testkit::laws::{eventually, name, request, take};
use lockkeeper_testkit::servers::{self, EtcdOptions, etcd_get};

const MONTH: Duration = Duration::from_secs(30 * 24 * 3600);

/// A record with a ttl of a month has its own lease. A record that was not written, or was deleted, leaves none: etcd
/// would keep it for the rest of the month.
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
    assert!(matches!(write(b"one", Expect::Absent).await.unwrap(), WriteOutcome::Written(_)));
    are_there(1).await;
    assert!(matches!(write(b"two", Expect::Absent).await.unwrap(), WriteOutcome::Conflict(Some(_))));
    are_there(1).await;
    assert!(matches!(write(b"three", Expect::Any).await.unwrap(), WriteOutcome::Written(_)));
    are_there(1).await;
    assert_eq!(store.read(&key).await.unwrap().unwrap().value, b"three");
    assert_eq!(store.delete(&key, Expect::Any).await.unwrap(), DeleteOutcome::Deleted);
    are_there(0).await;
}

/// The keys of locks lie among the records, so a list passes all records. It does not read their values: many large
/// ones would make a list impossible.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_of_locks_reads_no_record() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = open(server.addr()).await;
    let sent = || {
        let metrics = etcd_get(server.addr(), "/metrics").expect("metrics");
        let line =
            metrics.lines().find(|line| line.starts_with("etcd_network_client_grpc_sent_bytes_total "));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).expect("bytes that were sent")
    };
    let large = vec![7; 500 << 10];
    for key in ["r1", "r2", "r3", "r4"] {
        assert!(matches!(
            store.write(&name(key), &large, Expect::Absent, None).await,
            Ok(WriteOutcome::Written(_))
        ));
    }
    // Also a lock whose key lies between those of the records.
    let locks = ["/record:r2", "/", "a", "z"];
    for lock in locks {
        take(&store, &request(lock)).await;
    }
    let before = sent();
    let page = store.list("", &Page::FIRST).await.unwrap();
    let read = sent() - before;
    let names: Vec<_> = page.locks.iter().map(|lock| lock.name.as_str()).collect();
    assert_eq!(names, ["/", "/record:r2", "a", "z"]);
    assert!(read < 200e3, "{read} bytes were read for {} locks", names.len());
    let page = store.list("/rec", &Page::FIRST).await.unwrap();
    assert_eq!(page.locks.len(), 1);
}
