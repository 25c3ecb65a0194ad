//! Errors of DynamoDB, and the answers that callers get for them.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue::{N, S};
use common::front::Front;
use common::{moto, open, table, try_open, url};
use lockkeeper_core::{Error, LockName, Mode, RenewOutcome, Store};
use lockkeeper_dynamodb::{Options, init};
use lockkeeper_testkit::laws::{give_back, name, owner, refused, request, request_all, take, with};
use lockkeeper_testkit::proxy::{Framing, Proxy};
use lockkeeper_testkit::servers::Port;

/// Rejects the first `times` operations of one kind.
fn first(times: usize, kind: &'static str, code: &'static str) -> Arc<common::front::Rejection> {
    let left = AtomicUsize::new(times);
    Arc::new(move |operation| {
        let ours = operation.eq_ignore_ascii_case(kind);
        let some_left =
            || left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
        (ours && some_left()).then_some(code)
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn throttled_calls_are_retried_with_back_off() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let kinds = [
        ("putitem", "ProvisionedThroughputExceededException"),
        ("getitem", "ThrottlingException"),
        ("transactwriteitems", "ThrottlingException"),
        ("putitem", "RequestLimitExceeded"),
    ];
    for (i, (kind, code)) in kinds.into_iter().enumerate() {
        let front = Front::start(server.addr(), first(3, kind, code)).await;
        let store = open(&url(front.addr, &table)).await;
        let (one, two) = (format!("{i}/a"), format!("{i}/b"));
        let grant = take(&store, &request_all(&[&one, &two])).await;
        let single = take(&store, &request(&format!("{i}/c"))).await;
        assert_eq!(
            store.renew(&[grant.clone(), single.clone()]).await.unwrap(),
            [RenewOutcome::Renewed, RenewOutcome::Renewed]
        );
        give_back(&store, &grant.key).await;
        give_back(&store, &single.key).await;
        assert_eq!(front.refused.load(Ordering::SeqCst), 3, "{kind} {code}");
    }
}

/// A throttled renewal is no loss of the lock, also when other locks of the same process are renewed meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_throttled_renewal_is_unknown_and_not_lost() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let throttled = Arc::new(AtomicBool::new(false));
    let reject = {
        let throttled = throttled.clone();
        move |operation: &str| {
            let ours = operation.eq_ignore_ascii_case("transactwriteitems");
            (ours && throttled.load(Ordering::SeqCst)).then_some("ThrottlingException")
        }
    };
    let front = Front::start(server.addr(), Arc::new(reject)).await;
    let store = open(&url(front.addr, &table)).await;
    let long = |request| with(request, |request| request.ttl = Duration::from_secs(20));
    let (both, one) =
        (take(&store, &long(request_all(&["a", "b"]))).await, take(&store, &long(request("c"))).await);
    throttled.store(true, Ordering::SeqCst);
    let answers = store.renew(&[both.clone(), one.clone()]).await.unwrap();
    assert_eq!(answers, [RenewOutcome::Unknown, RenewOutcome::Renewed]);
    throttled.store(false, Ordering::SeqCst);
    assert_eq!(store.renew(&[both, one]).await.unwrap(), [RenewOutcome::Renewed, RenewOutcome::Renewed]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_throttling_is_reported_as_a_limit_and_writes_nothing() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let front = Front::start(server.addr(), first(usize::MAX, "putitem", "ThrottlingException")).await;
    let address = format!(
        "dynamodb://test:secret@eu-central-1/{table}?endpoint=http://{}&timeout=400ms&poll=100ms",
        front.addr
    );
    let store = open(&address).await;
    let answer = store.acquire(&request("x")).await;
    assert!(matches!(&answer, Err(Error::Limited(text)) if text.contains("throttles")), "{answer:?}");
    // With back-off there are not hundreds of tries in 400 ms.
    let tries = front.refused.load(Ordering::SeqCst);
    assert!((2..=12).contains(&tries), "{tries} tries");
    let direct = open(&url(server.addr(), &table)).await;
    take(&direct, &request("x")).await;
}

/// DynamoDB may reply with an internal error after it has executed the write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_internal_error_leaves_the_outcome_unknown() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let front = Front::start(server.addr(), first(1, "putitem", "InternalServerError")).await;
    let store = open(&url(front.addr, &table)).await;
    let once = request("x");
    let answer = store.acquire(&once).await;
    assert!(matches!(answer, Err(Error::Unknown(_))), "{answer:?}");
    take(&store, &once).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_permissions_are_reported_as_denied() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    for code in ["AccessDeniedException", "UnrecognizedClientException", "ExpiredTokenException"] {
        let front = Front::start(server.addr(), first(1, "describetable", code)).await;
        let answer = try_open(&url(front.addr, &table)).await.map(|_| ());
        assert!(matches!(&answer, Err(Error::Denied(text)) if text.contains(code)), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_table_and_a_table_with_another_key_are_refused() {
    let Some(server) = moto().await else { return };
    let answer = try_open(&url(server.addr(), "nowhere")).await.map(|_| ());
    assert!(
        matches!(&answer, Err(Error::Invalid(text)) if text.contains("lockkeeper store init")),
        "{answer:?}"
    );
    // Another program's table, with another key.
    let client = common::sdk(server.addr()).await;
    common::foreign_table(&client, "people").await;
    let address = url(server.addr(), "people");
    for answer in
        [try_open(&address).await.map(|_| ()), init(Options::from_url(&address).unwrap()).await.map(|_| ())]
    {
        assert!(matches!(&answer, Err(Error::Invalid(text)) if text.contains("only key")), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_is_deleted_meanwhile_is_reported() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let store = open(&url(server.addr(), &table)).await;
    let grant = take(&store, &request("x")).await;
    common::sdk(server.addr()).await.delete_table().table_name(&table).send().await.unwrap();
    let answer = store.acquire(&request("y")).await;
    assert!(matches!(answer, Err(Error::Invalid(_))), "{answer:?}");
    assert!(store.renew(&[grant]).await.is_err(), "the grant may or may not be lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endpoint_without_a_server_is_unavailable() {
    let port = Port::claim();
    let answer = try_open(&url(([127, 0, 0, 1], port.number()).into(), "locks")).await.map(|_| ());
    assert!(matches!(answer, Err(Error::Unavailable(_))), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_item_is_a_limit_and_does_not_harm_its_holders() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let store = open(&url(server.addr(), &table)).await;
    let shared = || with(request("x"), |request| request.mode = Mode::Shared);
    let held = take(&store, &shared()).await;
    // One holder with a very long label fills the item faster than a thousand holders.
    let client = common::sdk(server.addr()).await;
    let get = client.get_item().table_name(&table).key("k", S("lock/x".into()));
    let item = get.send().await.unwrap().item.unwrap();
    let mut length = 409_600;
    loop {
        let state = item["lock_state"].as_s().unwrap().replace("a law", &"n".repeat(length));
        let fat = item.clone().into_iter().chain([("lock_state".to_owned(), S(state))]).collect();
        if client.put_item().table_name(&table).set_item(Some(fat)).send().await.is_ok() {
            break;
        }
        // A step is smaller than the entry of another holder.
        length -= 100;
    }
    let late = open(&url(server.addr(), &table)).await;
    let full = late.acquire(&shared()).await;
    assert!(matches!(&full, Err(Error::Limited(text)) if text.contains("400 KB")), "{full:?}");
    assert_eq!(late.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
    give_back(&late, &held.key).await;
    take(&late, &shared()).await;
}

/// A client does not touch an item that another program or another version of the format wrote.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_item_of_another_format_is_not_touched() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let client = common::sdk(server.addr()).await;
    let put =
        client.put_item().table_name(&table).item("k", S("lock/x".into())).item("format", N("99".into()));
    put.item("rev", N("7".into())).send().await.unwrap();
    let store = open(&url(server.addr(), &table)).await;
    for answer in [
        store.acquire(&request("x")).await.map(|_| ()),
        store.break_lock(&name("x"), "to see").await.map(|_| ()),
        store.inspect(&name("x")).await.map(|_| ()),
    ] {
        assert!(matches!(answer, Err(Error::Unsupported(_))), "{answer:?}");
    }
    let item = client.get_item().table_name(&table).key("k", S("lock/x".into())).send().await.unwrap().item;
    assert_eq!(item.unwrap()["rev"], N("7".into()));
}

/// Many waiters for one lock, in several stores: one holds at a time, and each is granted the lock in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_waiters_are_granted_the_lock_one_by_one() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let inside = Arc::new(AtomicUsize::new(0));
    let mut all = Vec::new();
    for _ in 0..3 {
        let store: Arc<dyn Store> = open(&url(server.addr(), &table)).await;
        for _ in 0..4 {
            let (store, inside) = (store.clone(), inside.clone());
            all.push(tokio::spawn(async move {
                let patient = with(request("x"), |request| request.wait = lockkeeper_core::Wait::Forever);
                let grant = take(&store, &patient).await;
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two waiters hold the lock");
                tokio::time::sleep(Duration::from_millis(5)).await;
                inside.fetch_sub(1, Ordering::SeqCst);
                give_back(&store, &grant.key).await;
                grant.fence
            }));
        }
    }
    let mut fences = Vec::new();
    for one in all {
        fences.push(one.await.unwrap());
    }
    fences.sort_unstable();
    fences.dedup();
    assert_eq!(fences.len(), 12, "two grants have one fence");
}

/// A grant of several names that is broken under one of them is lost as a whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_name_frees_the_others_too() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let (a, b) = (open(&url(server.addr(), &table)).await, open(&url(server.addr(), &table)).await);
    let held = take(&a, &with(request_all(&["m", "n", "o"]), |request| request.owner = Some(owner()))).await;
    refused(&b, &request("o")).await;
    b.break_lock(&LockName::new("n").unwrap(), "to see").await.unwrap();
    take(&b, &request_all(&["m", "n", "o"])).await;
    assert_eq!(a.renew(&[held]).await.unwrap(), [RenewOutcome::Lost]);
}

/// A lock that this process has seen before costs one write to acquire, one to renew and one to release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_operation_on_a_cached_lock_costs_one_request() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let proxy = Proxy::start(server.addr(), Framing::Http1);
    let store = open(&url(proxy.addr(), &table)).await;
    let mut costs = Vec::new();
    let mut before = proxy.count().requests;
    let mut cost = || {
        let now = proxy.count().requests;
        costs.push(now - std::mem::replace(&mut before, now));
    };
    for _ in 0..2 {
        let grant = take(&store, &request("x")).await;
        cost();
        store.renew(std::slice::from_ref(&grant)).await.unwrap();
        cost();
        give_back(&store, &grant.key).await;
        cost();
    }
    // The first operation reads the item.
    assert_eq!(costs, [2, 1, 1, 1, 1, 1]);
}

/// Renewals of one item by itself would contend with each other: a process with many shared guards of one lock lost them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_renewal_of_many_shared_grants_costs_one_request() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let proxy = Proxy::start(server.addr(), Framing::Http1);
    let store = open(&url(proxy.addr(), &table)).await;
    let mut grants = Vec::new();
    for _ in 0..20 {
        grants.push(take(&store, &with(request("x"), |request| request.mode = Mode::Shared)).await);
    }
    let before = proxy.count().requests;
    assert_eq!(store.renew(&grants).await.unwrap(), vec![RenewOutcome::Renewed; grants.len()]);
    assert_eq!(proxy.count().requests - before, 1, "one request renews all");
}
