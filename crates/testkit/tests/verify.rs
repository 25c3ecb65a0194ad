//! A verification tells a good store from a bad one, touches no name but its own, and leaves nothing.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper::Store;
use lockkeeper_core::{Expect, LockName, Page};
use lockkeeper_host::SystemClock;
use lockkeeper_memory::MemoryStore;
use lockkeeper_testkit::bugs::{Bug, Bugged};
use lockkeeper_testkit::laws::{give_back, request, set_patience, take};
use lockkeeper_testkit::verify::{
    self, LawOutcome, LawResult, Verdict, Verification, VerifiedPromise, judge,
};

fn good_store() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(Arc::new(SystemClock)))
}

fn clients(store: &Arc<dyn Store>) -> Vec<Arc<dyn Store>> {
    vec![store.clone(); 3]
}

fn verdict_on(store: &Arc<dyn Store>, results: &[LawResult], promise: VerifiedPromise) -> Verdict {
    let judged = judge(&store.profile(), results);
    judged.iter().find(|judged| judged.promise == promise).expect("it was judged").verdict
}

async fn names(store: &Arc<dyn Store>) -> Vec<String> {
    let locks = store.list("", &Page::FIRST).await.unwrap().locks;
    let records = store.scan("", &Page::FIRST).await.unwrap().records;
    let locks = locks.iter().map(|view| view.name.to_string());
    locks.chain(records.iter().map(|record| record.key.to_string())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_good_store_keeps_every_promise_and_is_left_as_it_was() {
    let store = good_store();
    let bystander = take(&store, &request("orders/42")).await;
    let key = LockName::new("settings").unwrap();
    store.write(&key, b"mine", Expect::Absent, None).await.unwrap();

    let verification = Verification::new(clients(&store));
    let mut results = verification.laws(|_| ()).await;
    results.extend(verification.durability(async || Ok(store.clone())).await);
    for judged in judge(&store.profile(), &results) {
        let failed: Vec<_> = results.iter().filter(|one| !matches!(one.outcome, LawOutcome::Kept)).collect();
        assert_eq!(judged.verdict, Verdict::Kept, "{judged:?}: {failed:?}");
    }
    assert_eq!(results.len(), Verification::law_count() + 3);
    let left_out = results.iter().filter(|one| matches!(one.outcome, LawOutcome::LeftOut(_))).count();
    assert_eq!(left_out, 2);

    assert_eq!(names(&store).await, ["orders/42", "settings"]);
    let view = store.inspect(&LockName::new("orders/42").unwrap()).await.unwrap().expect("it is held");
    assert_eq!(view.held[0].fence, bystander.fence, "the lock of another user was touched");
    give_back(&store, &bystander.key).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_breaks_a_promise_is_found_and_the_law_is_named() {
    // The laws that a bug breaks lose patience sooner; those that are kept need none.
    set_patience(Duration::from_secs(20));
    let bugs = [
        (Bug::GrantsEveryRequest, VerifiedPromise::Exclusion, "one_name_has_one_holder"),
        (Bug::FenceStandsStill, VerifiedPromise::Fence, "fences_grow_from_grant_to_grant"),
        (Bug::NoQueue, VerifiedPromise::Waiting, "no_request_overtakes_the_queue"),
        (Bug::ExpectIgnored, VerifiedPromise::Records, "a_record_is_written_only_as_expected"),
        (Bug::InspectIsBlind, VerifiedPromise::Views, "inspect_tells_who_holds_and_who_waits"),
    ];
    let verifications = bugs.map(|(bug, promise, law)| async move {
        let bugged = Bugged::new(good_store(), bug).with_clock(Arc::new(SystemClock));
        let clients: Vec<Arc<dyn Store>> =
            (0..3).map(|_| Arc::new(bugged.client()) as Arc<dyn Store>).collect();
        let store = clients[0].clone();
        let verification = Verification::new(clients);
        let results = verification.only(law, |_| ()).await;
        assert_eq!(verdict_on(&store, &results, promise), Verdict::Broken, "{bug:?}: {results:?}");
        let found = results.iter().find(|one| one.law == law).expect("the law was run");
        assert!(matches!(found.outcome, LawOutcome::Broken(_)), "{bug:?}: {found:?}");
    });
    futures_util::future::join_all(verifications).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_that_only_one_client_sees_are_no_grants() {
    let (store, another) = (good_store(), good_store());
    let verification = Verification::new(clients(&store));
    let results = verification.durability(async || Ok(another)).await;
    assert_eq!(verdict_on(&store, &results, VerifiedPromise::Durability), Verdict::Broken, "{results:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_verification_that_is_stopped_leaves_nothing() {
    let store = good_store();
    let verification = Verification::new(clients(&store));
    let (begun, begins) = tokio::sync::oneshot::channel();
    let begun = std::sync::Mutex::new(Some(begun));
    let stopped = async {
        _ = begins.await;
        verification.stop();
    };
    let first = |_: &LawResult| {
        if let Some(begun) = begun.lock().unwrap().take() {
            _ = begun.send(());
        }
    };
    let (results, ()) = tokio::join!(verification.laws(first), stopped);
    assert!(results.iter().any(|one| one.outcome == LawOutcome::Stopped), "{results:?}");
    verification.clean().await.unwrap();
    assert_eq!(names(&store).await, Vec::<String>::new());
    assert!(verification.prefix().starts_with(verify::PREFIX));
}
