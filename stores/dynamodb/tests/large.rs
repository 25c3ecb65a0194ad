//! Records of several items, when one of the items is throttled or missing.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use aws_sdk_dynamodb::types::AttributeValue::S;
use common::front::Front;
use common::{moto, open, table, url};
use lockkeeper::{Lockkeeper, SystemClock};
use lockkeeper_core::{Error, Expect, WriteOutcome};
use lockkeeper_testkit::laws::{name, soon};

/// A value of three items.
fn large() -> Vec<u8> {
    vec![7; 700_000]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_throttled_read_of_a_large_record_is_retried_and_then_reported_as_a_limit() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    for (code, reason) in [
        ("TransactionCanceledException:ThrottlingError", "throttled"),
        ("TransactionCanceledException:ProvisionedThroughputExceeded", "too little capacity"),
        ("TransactionCanceledException:TransactionConflict", "written just now"),
    ] {
        let left = Arc::new(AtomicUsize::new(usize::MAX));
        let reject = {
            let left = left.clone();
            move |operation: &str| {
                let ours = operation.eq_ignore_ascii_case("transactgetitems");
                let one_less = |n: usize| n.checked_sub(1);
                (ours && left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok())
                    .then_some(code)
            }
        };
        let front = Front::start(server.addr(), Arc::new(reject)).await;
        let store = open(&url(front.addr, &table).replace("timeout=10s", "timeout=2s")).await;
        store.write(&name("r"), &large(), Expect::Any, None).await.unwrap();
        if !code.ends_with("Conflict") {
            let answer = soon("the read ends", store.read(&name("r"))).await;
            assert!(matches!(&answer, Err(Error::Limited(_))), "{reason}: {answer:?}");
        }
        left.store(2, Ordering::SeqCst);
        let found =
            soon("the read ends", store.read(&name("r"))).await.unwrap().expect("the record was written");
        assert_eq!((found.value.len(), left.load(Ordering::SeqCst)), (700_000, 0), "{reason}");
    }
}

/// A record with a missing item is damaged: it is neither reported as absent nor replaced by a writer that expects no record.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_with_an_item_missing_is_damaged_and_not_absent() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let store = open(&url(server.addr(), &table)).await;
    let client = common::sdk(server.addr()).await;
    store.write(&name("once/k"), &large(), Expect::Absent, None).await.unwrap();
    let missing = client.delete_item().table_name(&table).key("k", S("chunk/2/once/k".into()));
    missing.send().await.unwrap();
    let damaged = |answer: &Result<(), Error>| matches!(answer, Err(Error::Unsupported(text)) if text.contains("chunk/2/once/k"));
    for answer in [
        store.read(&name("once/k")).await.map(drop),
        store.write(&name("once/k"), b"new", Expect::Absent, None).await.map(drop),
    ] {
        assert!(damaged(&answer), "{answer:?}");
    }
    let keeper = Lockkeeper::with_store(store.clone(), Arc::new(SystemClock));
    let once = keeper.once("k").run(async |_| Ok::<_, String>(7));
    let answer = soon("the damage is reported", once).await.map(drop);
    assert!(damaged(&answer), "{answer:?}");
    // A write without a condition repairs it.
    let written = store.write(&name("once/k"), b"new", Expect::Any, None).await.unwrap();
    assert!(matches!(written, WriteOutcome::Written(_)), "{written:?}");
    assert_eq!(store.read(&name("once/k")).await.unwrap().unwrap().value, b"new");
}
