//! Things that are done once, however often they are asked for.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use std::collections::BTreeMap;
use std::result::Result;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockkeeper::once::{Done, OnFailure, Once, OnceStart, RunPermit, Stored};

use lockkeeper::{Error, Fence};

use super::lossy::{self, LossyStore};
use super::outage::{self, FirstLoss, OutageStart, OutageStore};
use super::register::has_records;
use super::*;

/// Whether the store has records; if not, `once` must be refused.
async fn has(keeper: &Lockkeeper) -> bool {
    if has_records(keeper).await {
        return true;
    }
    let refused = keeper.once("k").claim().await;
    assert!(matches!(refused, Err(Error::Unsupported(_))), "undeclared and not refused: {refused:?}");
    false
}

fn stored(bytes: &[u8]) -> Stored {
    Stored { ok: true, bytes: bytes.to_vec() }
}

/// It must be our turn.
async fn turn(once: Once) -> Box<RunPermit> {
    match soon("a claim is answered", once.claim()).await.unwrap() {
        OnceStart::Run(turn) => turn,
        OnceStart::Done(done) => panic!("it was to be our turn, but is done: {:?}", done.fence),
    }
}

/// It must be done.
async fn done(once: Once) -> Done<Stored> {
    match soon("a claim is answered", once.claim()).await.unwrap() {
        OnceStart::Done(done) => done,
        OnceStart::Run(turn) => panic!("it was to be done, but it is our turn: {turn:?}"),
    }
}

async fn works(fence: Fence) -> Result<u64, String> {
    Ok(fence.get())
}

pub async fn it_is_run_once_and_then_replayed<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let first = a.once("k").run(works).await.unwrap();
    assert_eq!((first.result.clone(), first.replayed), (Ok(first.fence.get()), false));
    for keeper in [&a, &b, &a] {
        let again = keeper.once("k").run(works).await.unwrap();
        let told = (&again.result, again.fence, again.replayed);
        assert_eq!(told, (&first.result, first.fence, true), "it was run again");
    }
    let other = b.once("other").run(works).await.unwrap();
    assert!(!other.replayed && other.fence > first.fence, "another key is another thing");
    is_free(&h.client().await, "once/k").await;
}

pub async fn all_who_ask_at_once_share_one_run<H: Harness>(h: H) {
    let first = h.keeper().await;
    if !has(&first).await {
        return;
    }
    let runs = Arc::new(AtomicUsize::new(0));
    let mut callers = Vec::new();
    for _ in 0..6 {
        let (keeper, runs) = (h.keeper().await, runs.clone());
        let work = move |fence: Fence| async move {
            runs.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(100)).await;
            Ok::<u64, String>(fence.get())
        };
        callers.push(tokio::spawn(async move { keeper.once("k").ttl(LONG).run(work).await }));
    }
    let mut results = Vec::new();
    for caller in callers {
        results.push(soon("every caller is answered", while_time_passes(&h, caller)).await.unwrap());
    }
    assert_eq!(runs.load(Ordering::SeqCst), 1, "it was run more than once");
    let results: Vec<_> = results.into_iter().map(|answer| answer.unwrap()).collect();
    assert!(results.iter().all(|done| done.result == results[0].result && done.fence == results[0].fence));
    assert_eq!(results.iter().filter(|done| !done.replayed).count(), 1);
}

pub async fn who_does_not_wait_is_told_who_runs<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let running = turn(a.once("k").ttl(LONG)).await;
    match b.once("k").wait(Duration::ZERO).claim().await {
        Err(Error::Busy(busy)) => assert_eq!(busy.held[0].fence, running.fence()),
        other => panic!("another caller runs: {other:?}"),
    }
    let patience = b.once("k").wait(Duration::from_millis(300)).claim();
    let told = soon("patience ends", while_time_passes(&h, patience)).await;
    assert!(matches!(told, Err(Error::Busy(_))), "{told:?}");
    running.finish(stored(b"x")).await.unwrap();
    assert_eq!(done(b.once("k").wait(Duration::ZERO)).await.result, stored(b"x"));
}

/// A runner that has begun and is never heard of again: its page is there, and a lease that ends.
async fn crash<H: Harness>(h: &H, key: &str) -> Fence {
    let store = h.client().await;
    let taken = take(&store, &with(request(&format!("once/{key}")), |request| request.ttl = SHORT)).await;
    let (page, key) = (format!("{{\"fence\":{}}}\n", taken.fence), name(&format!("once/{key}")));
    let written = store.write(&key, page.as_bytes(), lockkeeper_core::Expect::Absent, None).await.unwrap();
    assert!(matches!(written, lockkeeper_core::WriteOutcome::Written(_)));
    taken.fence
}

pub async fn a_silent_runner_is_taken_over<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let dead = crash(&h, "k").await;
    let takes_over = async { keeper.once("k").ttl(LONG).run(works).await };
    let after = soon("it is taken over", while_time_passes(&h, takes_over)).await.unwrap();
    assert!(after.fence > dead, "the runner after it has a newer fence");
    assert_eq!((after.result, after.replayed), (Ok(after.fence.get()), false));
}

/// A turn whose lease is over, and who does not know it.
async fn late_turn<H: Harness>(h: &H, keeper: &Lockkeeper) -> Box<RunPermit> {
    let late = while_time_passes(h, turn(keeper.once("k").ttl(LONG))).await;
    h.client().await.break_lock(&name("once/k"), "a law").await.unwrap();
    late
}

pub async fn a_late_result_is_refused<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let late = late_turn(&h, &a).await;
    let (old, newer) = (late.fence(), turn(b.once("k").ttl(LONG)).await);
    assert!(newer.fence() > old);
    // Between the two: the newer one runs, and is not disturbed.
    match late.finish(stored(b"late")).await {
        Err(Error::Stale { presented, seen }) => assert_eq!((presented, seen), (old, newer.fence())),
        other => panic!("a late result was to be refused: {other:?}"),
    }
    let fence = newer.fence();
    newer.finish(stored(b"right")).await.unwrap();
    let kept = done(a.once("k")).await;
    assert_eq!((kept.result, kept.fence), (stored(b"right"), fence));
}

pub async fn a_late_result_counts_if_nobody_took_over<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    // The work is done, and no other runner has begun: to discard the result would mean to do the work twice.
    let late = late_turn(&h, &a).await;
    let fence = late.fence();
    late.finish(stored(b"late")).await.unwrap();
    let kept = done(b.once("k")).await;
    assert_eq!((kept.result, kept.fence), (stored(b"late"), fence));
}

pub async fn another_request_under_the_same_key_is_refused<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let ten = || a.once("k").fingerprint("pay 10").ttl(LONG);
    let running = turn(ten()).await;
    // While it runs, and when it is done.
    let wrong = soon("it is refused at once", b.once("k").fingerprint("pay 99").claim()).await;
    assert!(matches!(wrong, Err(Error::Invalid(_))), "{wrong:?}");
    running.finish(stored(b"paid 10")).await.unwrap();
    let wrong = b.once("k").fingerprint("pay 99").run(works).await;
    assert!(matches!(wrong, Err(Error::Invalid(_))), "{wrong:?}");
    assert_eq!(done(ten()).await.result, stored(b"paid 10"));
}

pub async fn a_failure_is_retried_or_kept<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let fails = |_| async { Err::<u64, String>("no".into()) };
    let failed = a.once("retried").run(fails).await.unwrap();
    assert_eq!((failed.result, failed.replayed), (Err("no".into()), false));
    let again = b.once("retried").run(works).await.unwrap();
    assert!(!again.replayed && again.result.is_ok(), "a failed run is tried again");
    let kept = |keeper: &Lockkeeper| keeper.once("kept").on_failure(OnFailure::Keep);
    let failed = kept(&a).run(fails).await.unwrap();
    let again = kept(&b).run(works).await.unwrap();
    let told = (again.result, again.fence, again.replayed);
    assert_eq!(told, (Err("no".into()), failed.fence, true), "a failure was not kept");
}

pub async fn a_result_goes_when_its_time_is_over<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let first = a.once("k").keep(SHORT).run(works).await.unwrap();
    h.pass(SHORT * 2).await;
    let second = b.once("k").run(works).await.unwrap();
    assert!(!second.replayed && second.fence > first.fence, "{second:?} after {first:?}");
}

pub async fn large_results_come_back_byte_for_byte<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    // Beside the page, in one part, and in three; two keys of which one begins like the other.
    for (key, size) in [("k", 1000), ("key", 70_000), ("k2", 2_100_000)] {
        let bytes: Vec<u8> = (0..size).map(|i| (i * 31 + i / 251) as u8).collect();
        turn(a.once(key).ttl(LONG)).await.finish(stored(&bytes)).await.unwrap();
        match soon("a claim is answered", b.once(key).claim()).await {
            Ok(OnceStart::Done(found)) => {
                assert!(found.result.bytes == bytes, "{size} bytes came back as others")
            }
            other => panic!("{size} bytes did not come back: {other:?}"),
        }
    }
}

pub async fn a_dropped_run_leaves_the_turn_to_the_next<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let running = turn(a.once("k").ttl(LONG)).await;
    let old = running.fence();
    let waits = tokio::spawn(async move { b.once("k").ttl(LONG).run(works).await });
    drop(running);
    let next = soon("the next one runs", while_time_passes(&h, waits)).await.unwrap().unwrap();
    assert!(!next.replayed && next.fence > old);
}

pub async fn a_result_whose_answer_is_lost_is_kept_once<H: Harness>(h: H) {
    let calm = h.keeper().await;
    if !has(&calm).await {
        return;
    }
    let mut delivered_late = 0;
    for seed in lossy::seeds() {
        let network = LossyStore::new(h.client().await, seed);
        let client = Lockkeeper::with_store(network.clone(), h.clock());
        for round in 0..4 {
            let key = format!("{seed}/{round}");
            let first = soon("it ends", while_time_passes(&h, client.once(&key).run(works))).await.unwrap();
            for late in [false, true] {
                let again = calm.once(&key).run(works).await.unwrap();
                assert_eq!(
                    (again.result, again.fence, again.replayed),
                    (first.result.clone(), first.fence, true),
                    "the result changed (after the late requests came: {late})"
                );
                network.deliver().await;
            }
        }
        delivered_late += network.delivered_late();
    }
    assert!(delivered_late > 0, "no request came late: the law shows nothing");
    // A write of another runner in between is not taken for our own.
    let lossy = Lockkeeper::with_store(LossyStore::new(h.client().await, 1), h.clock());
    let late = late_turn(&h, &lossy).await;
    let newer = turn(calm.once("k").ttl(LONG)).await;
    let told = soon("it ends", while_time_passes(&h, late.finish(stored(b"late")))).await;
    assert!(matches!(told, Err(Error::Stale { .. } | Error::Unknown(_))), "a late result was kept: {told:?}");
    newer.finish(stored(b"right")).await.unwrap();
    assert_eq!(done(calm.once("k")).await.result, stored(b"right"));
}

/// The record of a failed run is removed: once, and no later run's.
pub async fn a_failed_run_over_a_lossy_network_is_removed_once<H: Harness>(h: H) {
    let calm = h.keeper().await;
    if !has(&calm).await {
        return;
    }
    let mut delivered_late = 0;
    for seed in lossy::seeds() {
        let network = LossyStore::new(h.client().await, seed);
        let client = Lockkeeper::with_store(network.clone(), h.clock());
        for round in 0..4 {
            let key = format!("{seed}/{round}");
            let fails = |_| async { Err::<u64, String>("no".into()) };
            let failed = soon("it ends", while_time_passes(&h, client.once(&key).run(fails))).await.unwrap();
            assert!(failed.result.is_err() && !failed.replayed, "{failed:?}");
            let first = calm.once(&key).run(works).await.unwrap();
            assert!(!first.replayed && first.result.is_ok(), "a failed run is tried again: {first:?}");
            network.deliver().await;
            let again = calm.once(&key).run(works).await.unwrap();
            let told = (again.fence, again.replayed);
            assert_eq!(told, (first.fence, true), "a removal that came late took the result of the next run");
        }
        delivered_late += network.delivered_late();
    }
    assert!(delivered_late > 0, "no removal came late: the law shows nothing");
}

/// The work is done when the connection fails for some seconds: its result is kept, and no caller does the work again.
pub async fn a_result_outlives_an_outage_of_the_store<H: Harness>(h: H) {
    let calm = h.keeper().await;
    if !has(&calm).await {
        return;
    }
    // Beside the page, and in parts, which are written before it.
    for (start, first, size) in [
        (OutageStart::Done, FirstLoss::Applied, 10),
        (OutageStart::Done, FirstLoss::NotSent, 10),
        (OutageStart::Done, FirstLoss::Applied, 100_000),
        (OutageStart::Part, FirstLoss::NotSent, 100_000),
    ] {
        let outage = Arc::new(OutageStore::new(h.client().await, h.clock(), start, first));
        let keeper = Lockkeeper::with_store(outage.clone(), h.clock());
        let key = format!("{start:?}/{first:?}/{size}");
        let running = turn(keeper.once(&key).ttl(outage::TTL)).await;
        let (fence, result) = (running.fence(), stored(&vec![7; size]));
        let told = soon("it ends", while_time_passes(&h, running.finish(result.clone()))).await;
        assert!(told.is_ok(), "a finished result was thrown away after an outage ({key}): {told:?}");
        assert!(outage.refused() > 1, "the outage refused nothing: the law shows nothing");
        let kept = done(calm.once(&key)).await;
        assert_eq!((kept.result, kept.fence), (result, fence));
    }
}

/// The work was done, and the store cannot keep its result: every caller gets that report, and no runner does the work again.
pub async fn what_cannot_be_kept_is_not_done_again<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let runs = AtomicUsize::new(0);
    let counted = |value: f64| {
        runs.fetch_add(1, Ordering::SeqCst);
        async move { Ok::<f64, String>(value) }
    };
    for keeper in [&a, &b, &a] {
        let told = keeper.once("nan").run(|_| counted(f64::NAN)).await;
        assert_eq!(
            runs.load(Ordering::SeqCst),
            1,
            "what was done is done again, because its result is no JSON"
        );
        assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    }
    // JSON has no keys that are not text.
    let runs = AtomicUsize::new(0);
    for keeper in [&a, &b] {
        let work = async |_| {
            runs.fetch_add(1, Ordering::SeqCst);
            Ok::<_, String>(BTreeMap::from([((1_u8, 2_u8), 3_u8)]))
        };
        let told = keeper.once("map").run(work).await;
        assert!(matches!(&told, Err(Error::Unknown(why)) if why.contains("JSON")), "{told:?}");
        assert_eq!(
            runs.load(Ordering::SeqCst),
            1,
            "what was done is done again, because it cannot be written"
        );
    }
    let running = turn(a.once("huge")).await;
    let fence = running.fence().to_string();
    let huge = running.finish(stored(&vec![0; (64 << 20) + 1])).await;
    assert!(matches!(&huge, Err(Error::Unknown(why)) if why.contains(&fence)), "{huge:?}");
    let again = b.once("huge").claim().await;
    assert!(matches!(&again, Err(Error::Unknown(why)) if why.contains(&fence)), "{again:?}");
    // For ever is a time like any other.
    let kept = a.once("long").keep(Duration::MAX).run(|_| counted(1.5)).await.unwrap();
    assert_eq!(b.once("long").run(|_| counted(2.5)).await.unwrap().result, kept.result);
    // A failure that is to be retried leaves nothing, whatever its result is.
    let fails = |_| async { Err::<String, f64>(f64::NAN) };
    assert!(a.once("fails").run(fails).await.unwrap().result.is_err());
    assert!(!b.once("fails").run(works).await.unwrap().replayed);
}

pub async fn bad_input_to_once_leaves_nothing<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    for key in ["", "a\nb", &"x".repeat(lockkeeper::KEY_BYTES + 1)] {
        let refused = keeper.once(key).claim().await;
        assert!(matches!(refused, Err(Error::Invalid(_))), "{key:?}: {refused:?}");
    }
    let short = Duration::from_millis(1);
    for bad in [keeper.once("k").ttl(short), keeper.once("k").keep(short)] {
        let refused = bad.claim().await;
        assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    }
    is_free(&h.client().await, "once/k").await;
    assert!(keeper.registers("", &lockkeeper::Page::FIRST).await.unwrap().0.is_empty());
    // A record of another program under that name is reported, and not overwritten.
    keeper.register::<u64>("once/k").update(|_| 7).await.unwrap();
    let refused = keeper.once("k").claim().await;
    assert!(matches!(refused, Err(Error::Invalid(_))), "another's record was written over: {refused:?}");
    assert_eq!(keeper.register::<u64>("once/k").read().await.unwrap().unwrap().value, 7);
    let longest = "x".repeat(lockkeeper::KEY_BYTES);
    turn(keeper.once(&longest)).await.finish(stored(&vec![0; 100_000])).await.unwrap();
}
