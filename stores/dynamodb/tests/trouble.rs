//! What goes wrong, and what is said about it.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue::{N, S};
use common::front::Front;
use common::{moto, open, table, try_open, url};
use lockkeeper_core::{Error, LockName, Mode, Renewal, Store};
use lockkeeper_dynamodb::{Options, init};
use lockkeeper_testkit::laws::{ask, ask_all, give_back, name, owner, refused, take, with};
use lockkeeper_testkit::proxy::{Framing, Proxy};
use lockkeeper_testkit::servers::Port;

/// Says no to the first `times` operations of one kind.
fn first(times: usize, kind: &'static str, code: &'static str) -> Arc<common::front::No> {
    let left = AtomicUsize::new(times);
    Arc::new(move |operation| {
        let ours = operation.eq_ignore_ascii_case(kind);
        let some_left =
            || left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
        (ours && some_left()).then_some(code)
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_throttled_is_asked_again_more_slowly() {
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
        let grant = take(&store, &ask_all(&[&one, &two])).await;
        let single = take(&store, &ask(&format!("{i}/c"))).await;
        assert_eq!(
            store.renew(&[grant.clone(), single.clone()]).await.unwrap(),
            [Renewal::Renewed, Renewal::Renewed]
        );
        give_back(&store, &grant.claim).await;
        give_back(&store, &single.claim).await;
        assert_eq!(front.refused.load(Ordering::SeqCst), 3, "{kind} {code}");
    }
}

/// A renewal that is throttled says nothing about the lock, also when others of the same process are renewed meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_is_throttled_is_not_a_loss() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let throttled = Arc::new(AtomicBool::new(false));
    let says = {
        let throttled = throttled.clone();
        move |operation: &str| {
            let ours = operation.eq_ignore_ascii_case("transactwriteitems");
            (ours && throttled.load(Ordering::SeqCst)).then_some("ThrottlingException")
        }
    };
    let front = Front::start(server.addr(), Arc::new(says)).await;
    let store = open(&url(front.addr, &table)).await;
    let long = |ask| with(ask, |ask| ask.ttl = Duration::from_secs(20));
    let (both, one) = (take(&store, &long(ask_all(&["a", "b"]))).await, take(&store, &long(ask("c"))).await);
    throttled.store(true, Ordering::SeqCst);
    let answers = store.renew(&[both.clone(), one.clone()]).await.unwrap();
    assert_eq!(answers, [Renewal::Unknown, Renewal::Renewed]);
    throttled.store(false, Ordering::SeqCst);
    assert_eq!(store.renew(&[both, one]).await.unwrap(), [Renewal::Renewed, Renewal::Renewed]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_throttle_without_an_end_is_told_as_a_limit_and_nothing_happened() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let front = Front::start(server.addr(), first(usize::MAX, "putitem", "ThrottlingException")).await;
    let address = format!(
        "dynamodb://test:secret@eu-central-1/{table}?endpoint=http://{}&timeout=400ms&poll=100ms",
        front.addr
    );
    let store = open(&address).await;
    let answer = store.acquire(&ask("x")).await;
    assert!(matches!(&answer, Err(Error::Limited(text)) if text.contains("throttles")), "{answer:?}");
    // Slower each time: not hundreds in 400 ms.
    let asked = front.refused.load(Ordering::SeqCst);
    assert!((2..=12).contains(&asked), "{asked} tries");
    let direct = open(&url(server.addr(), &table)).await;
    take(&direct, &ask("x")).await;
}

/// An answer that says that something inside went wrong may come after the deed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_internal_error_may_have_happened() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let front = Front::start(server.addr(), first(1, "putitem", "InternalServerError")).await;
    let store = open(&url(front.addr, &table)).await;
    let once = ask("x");
    let answer = store.acquire(&once).await;
    assert!(matches!(answer, Err(Error::Unknown(_))), "{answer:?}");
    take(&store, &once).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_not_allowed_is_told_so() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    for code in ["AccessDeniedException", "UnrecognizedClientException", "ExpiredTokenException"] {
        let front = Front::start(server.addr(), first(1, "describetable", code)).await;
        let answer = try_open(&url(front.addr, &table)).await.map(|_| ());
        assert!(matches!(&answer, Err(Error::Denied(text)) if text.contains(code)), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_is_missing_or_not_for_locks_is_told() {
    let Some(server) = moto().await else { return };
    let answer = try_open(&url(server.addr(), "nowhere")).await.map(|_| ());
    assert!(
        matches!(&answer, Err(Error::Invalid(text)) if text.contains("lockkeeper store init")),
        "{answer:?}"
    );
    // Somebody else's table: another key.
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
async fn a_table_that_is_deleted_meanwhile_is_told() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let store = open(&url(server.addr(), &table)).await;
    let grant = take(&store, &ask("x")).await;
    common::sdk(server.addr()).await.delete_table().table_name(&table).send().await.unwrap();
    let answer = store.acquire(&ask("y")).await;
    assert!(matches!(answer, Err(Error::Invalid(_))), "{answer:?}");
    assert!(store.renew(&[grant]).await.is_err(), "nobody knows whether it is lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_at_the_endpoint_is_unavailable() {
    let port = Port::claim();
    let answer = try_open(&url(([127, 0, 0, 1], port.number()).into(), "locks")).await.map(|_| ());
    assert!(matches!(answer, Err(Error::Unavailable(_))), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_item_that_is_full_is_a_limit_and_hurts_nobody() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let store = open(&url(server.addr(), &table)).await;
    let shared = || with(ask("x"), |ask| ask.mode = Mode::Shared);
    let held = take(&store, &shared()).await;
    // A thousand holders take long to come: one with a very long name fills the item as well.
    let client = common::sdk(server.addr()).await;
    let get = client.get_item().table_name(&table).key("k", S("lock/x".into()));
    let item = get.send().await.unwrap().item.unwrap();
    let mut length = 409_600;
    loop {
        let book = item["book"].as_s().unwrap().replace("a law", &"n".repeat(length));
        let fat = item.clone().into_iter().chain([("book".to_owned(), S(book))]).collect();
        if client.put_item().table_name(&table).set_item(Some(fat)).send().await.is_ok() {
            break;
        }
        // Less than another holder needs.
        length -= 100;
    }
    let late = open(&url(server.addr(), &table)).await;
    let full = late.acquire(&shared()).await;
    assert!(matches!(&full, Err(Error::Limited(text)) if text.contains("400 KB")), "{full:?}");
    assert_eq!(late.renew(std::slice::from_ref(&held)).await.unwrap(), [Renewal::Renewed]);
    give_back(&late, &held.claim).await;
    take(&late, &shared()).await;
}

/// What somebody else wrote under our key, or a later version of us, is not touched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_item_of_another_kind_is_left_alone() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let client = common::sdk(server.addr()).await;
    let put =
        client.put_item().table_name(&table).item("k", S("lock/x".into())).item("format", N("2".into()));
    put.item("rev", N("7".into())).send().await.unwrap();
    let store = open(&url(server.addr(), &table)).await;
    for answer in [
        store.acquire(&ask("x")).await.map(|_| ()),
        store.break_lock(&name("x"), "to see").await.map(|_| ()),
        store.inspect(&name("x")).await.map(|_| ()),
    ] {
        assert!(matches!(answer, Err(Error::Unsupported(_))), "{answer:?}");
    }
    let item = client.get_item().table_name(&table).key("k", S("lock/x".into())).send().await.unwrap().item;
    assert_eq!(item.unwrap()["rev"], N("7".into()));
}

/// Many who want the same lock, in several processes: nobody is let in twice, and everybody in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_is_served_one_by_one() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let inside = Arc::new(AtomicUsize::new(0));
    let mut all = Vec::new();
    for _ in 0..3 {
        let store: Arc<dyn Store> = open(&url(server.addr(), &table)).await;
        for _ in 0..4 {
            let (store, inside) = (store.clone(), inside.clone());
            all.push(tokio::spawn(async move {
                let patient = with(ask("x"), |ask| ask.wait = lockkeeper_core::Wait::Forever);
                let grant = take(&store, &patient).await;
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
                tokio::time::sleep(Duration::from_millis(5)).await;
                inside.fetch_sub(1, Ordering::SeqCst);
                give_back(&store, &grant.claim).await;
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

/// A grant of several names that is broken at one of them is lost as a whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_name_frees_the_others_too() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let (a, b) = (open(&url(server.addr(), &table)).await, open(&url(server.addr(), &table)).await);
    let held = take(&a, &with(ask_all(&["m", "n", "o"]), |ask| ask.owner = Some(owner()))).await;
    refused(&b, &ask("o")).await;
    b.break_lock(&LockName::new("n").unwrap(), "to see").await.unwrap();
    take(&b, &ask_all(&["m", "n", "o"])).await;
    assert_eq!(a.renew(&[held]).await.unwrap(), [Renewal::Lost]);
}

/// What is paid for: a lock that we have seen before costs one write to take, one to renew, one to give back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_was_seen_costs_one_request_a_step() {
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
        let grant = take(&store, &ask("x")).await;
        cost();
        store.renew(std::slice::from_ref(&grant)).await.unwrap();
        cost();
        give_back(&store, &grant.claim).await;
        cost();
    }
    // The first time it is read before.
    assert_eq!(costs, [2, 1, 1, 1, 1, 1]);
}
