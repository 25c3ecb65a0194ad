//! What records leave behind in etcd.

mod common;

use std::time::Duration;

use common::{bytes_sent, ctl, open};
use lockkeeper_core::{DeleteOutcome, Expect, Page, WriteOutcome};
use lockkeeper_testkit::laws::{eventually, name, request, take};
use lockkeeper_testkit::servers::{self, EtcdOptions};

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

/// A page of records reads the values of its own records. It used to read those of all records: some hundred large ones exceeded what a client
/// accepts, and no page could be read at all. A page of large records is short.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_of_records_reads_no_value_of_another_page() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = open(server.addr()).await;
    let keys: Vec<String> = (10..34).map(|i| format!("large/{i}")).collect();
    let large = vec![7; 1 << 20];
    for key in &keys {
        let written = store.write(&name(key), &large, Expect::Absent, None).await;
        assert!(matches!(written, Ok(WriteOutcome::Written(_))), "{written:?}");
    }
    let before = bytes_sent(&server);
    let page = store.scan("large/", &Page { after: None, limit: 2 }).await.unwrap();
    let read = bytes_sent(&server) - before;
    assert_eq!((page.records.len(), page.next), (2, Some(name(&keys[1]))));
    assert!(read < 4e6, "{read} bytes were read for two records of a megabyte");
    let (mut found, mut page, mut most) = (Vec::new(), Page::FIRST, 0);
    loop {
        let got = store.scan("large/", &page).await.unwrap();
        assert!(got.records.iter().all(|record| record.value == large));
        most = most.max(got.records.len());
        found.extend(got.records.into_iter().map(|record| record.key.to_string()));
        match got.next {
            Some(after) => page = Page::after(after),
            None => break,
        }
    }
    assert_eq!(found, keys);
    assert!(most < keys.len(), "one page has all {most} megabytes");
}

/// The keys of locks lie among the records, so a list passes all records. It does not read their values: many large
/// ones would make a list impossible.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_of_locks_reads_no_record() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = open(server.addr()).await;
    let sent = || bytes_sent(&server);
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
