//! Small versioned values.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use lockkeeper_core::{DeleteOutcome, Error, Expect, Page, Version, WriteOutcome, limits};
use tokio::sync::Barrier;

use super::*;

async fn has(store: &Arc<dyn Store>) -> bool {
    if store.profile().records {
        return true;
    }
    assert!(matches!(store.read(&name("r")).await, Err(Error::Unsupported(_))), "undeclared and not refused");
    false
}

fn version(write: WriteOutcome) -> Version {
    match write {
        WriteOutcome::Written(version) => version,
        WriteOutcome::Conflict(found) => panic!("it was to be written, but there is {found:?}"),
    }
}

pub async fn a_record_is_written_only_as_expected<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    if !has(&a).await {
        return;
    }
    let key = name("r/'; --");
    assert_eq!(a.read(&key).await.unwrap(), None);
    let unmet = a.write(&key, b"x", Expect::Version(Version(1)), None).await.unwrap();
    assert_eq!(unmet, WriteOutcome::Conflict(None), "written, and not as expected");
    let one = version(a.write(&key, b"one\0\xff", Expect::Absent, None).await.unwrap());
    let found = b.read(&key).await.unwrap().unwrap();
    assert_eq!((&found.value[..], found.version), (&b"one\0\xff"[..], one));
    assert_eq!(
        b.write(&key, b"two", Expect::Absent, None).await.unwrap(),
        WriteOutcome::Conflict(Some(found))
    );
    let two = version(b.write(&key, b"two", Expect::Version(one), None).await.unwrap());
    assert!(two > one);
    assert!(matches!(
        a.write(&key, b"x", Expect::Version(one), None).await.unwrap(),
        WriteOutcome::Conflict(Some(_))
    ));
    assert!(matches!(a.delete(&key, Expect::Version(one)).await.unwrap(), DeleteOutcome::Conflict(_)));
    let three = version(a.write(&key, b"", Expect::Any, None).await.unwrap());
    assert!(three > two);
    assert_eq!(a.delete(&key, Expect::Version(three)).await.unwrap(), DeleteOutcome::Deleted);
    assert_eq!(a.delete(&key, Expect::Any).await.unwrap(), DeleteOutcome::Absent);
    assert_eq!(b.read(&key).await.unwrap(), None);
    let huge = vec![0; limits::VALUE_BYTES + 1];
    assert!(matches!(a.write(&key, &huge, Expect::Any, None).await, Err(Error::Limited(_))));
    version(a.write(&key, &huge[1..], Expect::Any, None).await.unwrap());
    assert_eq!(b.read(&key).await.unwrap().unwrap().value.len(), limits::VALUE_BYTES);
}

pub async fn a_record_made_again_has_a_new_version<H: Harness>(h: H) {
    let a = h.client().await;
    if !has(&a).await {
        return;
    }
    let first = version(a.write(&name("r"), b"x", Expect::Absent, None).await.unwrap());
    a.delete(&name("r"), Expect::Any).await.unwrap();
    let second = version(a.write(&name("r"), b"x", Expect::Absent, None).await.unwrap());
    assert!(second > first, "a client that saw the first would take the second for it");
}

pub async fn a_record_with_a_ttl_goes<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    if !has(&a).await {
        return;
    }
    let first = version(a.write(&name("r"), b"x", Expect::Absent, Some(SHORT)).await.unwrap());
    version(a.write(&name("stays"), b"x", Expect::Absent, None).await.unwrap());
    h.pass(SHORT * 2).await;
    assert_eq!(b.read(&name("r")).await.unwrap(), None, "a record outlived its ttl");
    assert!(b.read(&name("stays")).await.unwrap().is_some());
    assert_eq!(
        b.write(&name("r"), b"y", Expect::Version(first), None).await.unwrap(),
        WriteOutcome::Conflict(None)
    );
    version(b.write(&name("r"), b"y", Expect::Absent, None).await.unwrap());
    // Written anew without a ttl, it stays.
    h.pass(SHORT * 2).await;
    assert!(a.read(&name("r")).await.unwrap().is_some());
    let refused = a.write(&name("r"), b"y", Expect::Any, Some(Duration::from_millis(1))).await;
    assert!(matches!(refused, Err(Error::Invalid(_))));
}

pub async fn concurrent_updates_lose_nothing<H: Harness>(h: H) {
    let first = h.client().await;
    if !has(&first).await {
        return;
    }
    let key = name("counter");
    version(first.write(&key, b"0", Expect::Absent, None).await.unwrap());
    // All of them read the same first value, so that at least the first updates meet.
    let all_have_read = Arc::new(Barrier::new(4));
    let mut workers = Vec::new();
    for _ in 0..4 {
        let (store, key, all_have_read) = (h.client().await, key.clone(), all_have_read.clone());
        workers.push(tokio::spawn(async move {
            let mut first = true;
            for _ in 0..25 {
                loop {
                    let old = store.read(&key).await.unwrap().unwrap();
                    let n: u64 = String::from_utf8(old.value).unwrap().parse().unwrap();
                    if std::mem::take(&mut first) {
                        all_have_read.wait().await;
                    }
                    let new = (n + 1).to_string();
                    let written =
                        store.write(&key, new.as_bytes(), Expect::Version(old.version), None).await.unwrap();
                    if matches!(written, WriteOutcome::Written(_)) {
                        break;
                    }
                }
            }
        }));
    }
    for worker in workers {
        soon("the updates are done", worker).await.unwrap();
    }
    assert_eq!(first.read(&key).await.unwrap().unwrap().value, b"100", "updates were lost");
}

pub async fn a_scan_pages_through_all_in_order<H: Harness>(h: H) {
    let a = h.client().await;
    if !has(&a).await {
        return;
    }
    let wanted: Vec<String> = (0..10).map(|i| format!("scan/{i}")).collect();
    for text in wanted.iter().rev().map(String::as_str).chain(["scan", "scar/1"]) {
        version(a.write(&name(text), text.as_bytes(), Expect::Absent, None).await.unwrap());
    }
    let mut found = Vec::new();
    let mut page = Page { after: None, limit: 3 };
    for _ in 0..6 {
        let got = a.scan("scan/", &page).await.unwrap();
        assert!(got.records.len() <= 3);
        assert!(got.records.iter().all(|record| record.value == record.key.as_str().as_bytes()));
        found.extend(got.records.into_iter().map(|record| record.key.to_string()));
        match got.next {
            Some(after) => page.after = Some(after),
            None => break,
        }
    }
    assert_eq!(found, wanted, "the pages are not the whole");
}
