//! Items that many workers share without a lock per item.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use std::collections::{BTreeMap, BTreeSet};

use lockkeeper::Error;
use lockkeeper::claim::{AfterFailure, ClaimGroup, ClaimSource, ClaimedItem};

use super::interposed::{Fate, Interposed};
use super::lossy::{self, LossyStore};
use super::register::has_records;
use super::*;

/// Whether the store has records; if not, a claim must be refused.
async fn has(keeper: &Lockkeeper) -> bool {
    if has_records(keeper).await {
        return true;
    }
    let refused = group(keeper, LONG).from(["a"]);
    assert!(matches!(refused, Err(Error::Unsupported(_))), "undeclared and not refused: {refused:?}");
    false
}

fn group(keeper: &Lockkeeper, lease: Duration) -> ClaimGroup {
    let soon = Duration::from_millis(50);
    keeper.claim("work").unwrap().lease(lease).poll(soon).backoff(Duration::ZERO, Duration::ZERO)
}

fn ids(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("item/{n}")).collect()
}

/// Claims the next item, which must come.
async fn next<H: Harness>(h: &H, what: &str, source: &mut ClaimSource) -> ClaimedItem {
    let next = soon(what, while_time_passes(h, source.next())).await;
    next.unwrap().unwrap_or_else(|| panic!("{what}: everything is settled"))
}

/// Claims an item that no worker has. On a machine that is so slow that the lease ends meanwhile, it is claimed again.
async fn free<H: Harness>(h: &H, group: &ClaimGroup, id: &str) -> ClaimedItem {
    next(h, "a free item is claimed", &mut group.from([id]).unwrap()).await
}

fn names(items: &[ClaimedItem]) -> Vec<String> {
    items.iter().map(|item| item.id().to_owned()).collect()
}

pub async fn an_item_is_claimed_by_one_at_a_time<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let (mut ours, mut theirs) =
        (group(&a, LONG).from(ids(5)).unwrap(), group(&b, LONG).from(ids(5)).unwrap());
    // The second worker has looked at all items before the first one takes some of them.
    let mut second = theirs.try_take(1).await.unwrap();
    let first = ours.try_take(3).await.unwrap();
    second.extend(theirs.try_take(5).await.unwrap());
    let all: BTreeSet<String> = names(&first).into_iter().chain(names(&second)).collect();
    assert_eq!(all.len(), first.len() + second.len(), "two workers have one item: {first:?} {second:?}");
    assert_eq!((first.len(), all.len()), (3, 5), "a free item was not claimed");
    assert!(ours.try_take(1).await.unwrap().is_empty(), "all items are taken");
    for item in first.into_iter().chain(second) {
        item.complete().await.unwrap();
    }
    let last = soon("the end is reached", while_time_passes(&h, theirs.next())).await.unwrap();
    assert!(last.is_none(), "a done item was claimed again: {last:?}");
    let counts = group(&a, LONG).counts().await.unwrap();
    assert_eq!((counts.done, counts.taken, counts.waiting, counts.failed), (5, 0, 0, 0));
}

pub async fn a_dead_workers_items_return_with_a_higher_fence<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let dead = free(&h, &group(&a, SHORT), "a").await;
    assert_eq!(dead.attempt_number(), 1);
    let mut source = group(&b, SHORT).from(["a"]).unwrap();
    let item = next(&h, "a dead worker's item returns", &mut source).await;
    assert!(!dead.is_held().await, "the item went to another worker while the first one believed to have it");
    assert!(item.fence() > dead.fence(), "{item:?} is not newer than {dead:?}");
    assert_eq!(item.attempt_number(), 2, "the attempt of a dead worker counts");
    item.complete().await.unwrap();
}

pub async fn a_late_completion_is_refused<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    // One is late with its completion, one with its failure, one in giving its item back.
    let mut late = Vec::new();
    for id in ids(3) {
        late.push(free(&h, &group(&a, SHORT), &id).await);
    }
    let mut source = group(&b, LONG).from(ids(3)).unwrap();
    let mut newer = BTreeMap::new();
    for _ in 0..3 {
        let item = next(&h, "it returns after the lease", &mut source).await;
        newer.insert(item.id().to_owned(), item);
    }
    let (third, second, first) = (late.pop().unwrap(), late.pop().unwrap(), late.pop().unwrap());
    let (presented, seen) = (first.fence(), newer[first.id()].fence());
    match first.complete().await {
        Err(Error::Stale { presented: p, seen: s }) => assert_eq!((p, s), (presented, seen)),
        other => panic!("a late completion was to be refused: {other:?}"),
    }
    assert!(matches!(second.extend().await, Err(Error::Lost(_))), "a lease that was over came back");
    assert!(matches!(second.fail("late").await, Err(Error::Stale { .. })));
    assert!(matches!(third.give_back().await, Err(Error::Stale { .. })));
    for item in newer.into_values() {
        item.complete().await.unwrap();
    }
    assert_eq!(group(&a, LONG).counts().await.unwrap().done, 3);
}

/// A worker is paused while it claims, until its lease is over and another worker has the item: once after its lease was written, and once
/// while its attempt is on its way. Its attempt is not written over that of the other worker, which still holds its lease.
pub async fn a_claimer_that_was_paused_spares_the_next_worker<H: Harness>(h: H) {
    let h = Arc::new(h);
    if !has(&h.keeper().await).await {
        return;
    }
    for (id, fate, writes_before) in [("a", Fate::AnsweredLate, 0), ("b", Fate::Late, 1)] {
        let (next_worker, (claimed, mut taken_over)) = (h.keeper().await, tokio::sync::mpsc::channel(1));
        let others = {
            let h = h.clone();
            async move {
                h.pass(SHORT * 2).await;
                claimed.send(free(&*h, &group(&next_worker, LONG), id).await).await.unwrap();
            }
        };
        let store = Interposed::new(h.client().await, fate, others).after(writes_before);
        let paused = Lockkeeper::with_store(Arc::new(store), h.clock());
        let mut source = group(&paused, SHORT).from([id]).unwrap();
        let late = soon("the paused worker goes on", source.try_take(1)).await.unwrap();
        let item = taken_over.recv().await.expect("the next worker has claimed it");
        assert!(late.is_empty(), "two workers have one item: {late:?} {item:?}");
        let done = item.complete().await;
        assert!(done.is_ok(), "a paused claimer wrote over the attempt of the next worker: {done:?}");
    }
    let counts = group(&h.keeper().await, LONG).counts().await.unwrap();
    assert_eq!((counts.done, counts.waiting), (2, 0), "an item was lost: {counts:?}");
}

/// The record decides: what was done in time is not done again because its completion came late.
pub async fn a_late_completion_counts_if_no_worker_took_over<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let mut source = group(&keeper, SHORT).from(["a"]).unwrap();
    let item = free(&h, &group(&keeper, SHORT), "a").await;
    h.pass(SHORT * 2).await;
    item.complete().await.unwrap();
    let again = source.try_take(1).await.unwrap();
    assert!(again.is_empty(), "what is done was claimed again: {again:?}");
    assert_eq!(source.open(), 0, "it is settled");
}

pub async fn what_failed_too_often_is_kept_apart<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let limited = group(&keeper, SHORT).max_attempts(3);
    let mut source = limited.from(["bad", "deadly"]).unwrap();
    let (mut attempts, mut ends) = (BTreeMap::<String, u32>::new(), Vec::new());
    while let Some(item) = soon("it ends", while_time_passes(&h, source.next())).await.unwrap() {
        let count = attempts.entry(item.id().to_owned()).or_default();
        *count += 1;
        assert!(*count <= 3, "it was tried more often than it may");
        if item.id() == "bad" {
            ends.push(item.fail("it is bad").await.unwrap());
        }
        // No worker reports an item that kills its worker; the attempts of that item end as well.
    }
    assert_eq!(attempts.into_values().collect::<Vec<_>>(), [3, 3], "it was given up too soon");
    assert_eq!(ends.last(), Some(&AfterFailure::FailedForGood));
    let failed = limited.failed().await.unwrap();
    let told: Vec<_> =
        failed.iter().map(|item| (&*item.id, item.attempts, item.error.contains("bad"))).collect();
    assert_eq!(told, [("bad", 3, true), ("deadly", 3, false)], "what failed for good is not kept");
    // An operator gives one another chance, and lets the other one go.
    assert!(limited.retry("bad").await.unwrap() && !limited.retry("bad").await.unwrap());
    assert!(limited.forget("deadly").await.unwrap() && !limited.forget("deadly").await.unwrap());
    let item = next(&h, "it is tried again", &mut limited.from(["bad"]).unwrap()).await;
    assert_eq!(item.attempt_number(), 1);
    item.complete().await.unwrap();
    assert_eq!(limited.failed().await.unwrap(), []);
}

pub async fn what_failed_is_not_tried_again_at_once<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let mut source = group(&a, LONG).backoff(LONG, LONG).from(["a"]).unwrap();
    let item = source.try_take(1).await.unwrap().pop().expect("it is free");
    let AfterFailure::RetryAfter(pause) = item.fail("not yet").await.unwrap() else {
        panic!("it has more attempts")
    };
    assert!(pause >= LONG / 2 && pause <= LONG, "{pause:?}");
    let early = group(&b, LONG).from(["a"]).unwrap().try_take(1).await.unwrap();
    assert!(early.is_empty(), "it was tried again before its back-off was over: {early:?}");
    assert_eq!(group(&a, LONG).counts().await.unwrap().waiting, 1);
    // A short one is over soon.
    let mut source = group(&a, LONG).backoff(SHORT, SHORT).from(["b"]).unwrap();
    source.try_take(1).await.unwrap().pop().expect("it is free").fail("not yet").await.unwrap();
    let again = next(&h, "it is tried again after its back-off", &mut source).await;
    assert_eq!(again.attempt_number(), 2);
}

/// Batches of workers that claim at the same moment.
pub async fn batches_are_disjoint<H: Harness>(h: H) {
    let first = h.keeper().await;
    if !has(&first).await {
        return;
    }
    let (mut workers, mut count, mut all) = (Vec::new(), 0, BTreeSet::new());
    let mut sources = Vec::new();
    for _ in 0..3 {
        // Each has looked at all items before the others take theirs.
        let mut source = group(&h.keeper().await, LONG).from(ids(24)).unwrap();
        let batch = source.try_take(1).await.unwrap();
        count += batch.len();
        all.extend(names(&batch));
        sources.push(source);
    }
    for mut source in sources {
        workers.push(tokio::spawn(async move { source.try_take(10).await }));
    }
    for worker in workers {
        let batch = soon("a batch is claimed", while_time_passes(&h, worker)).await.unwrap().unwrap();
        assert!(batch.len() <= 10, "a batch has {} items", batch.len());
        count += batch.len();
        all.extend(names(&batch));
    }
    assert_eq!(all.len(), count, "one item is in two batches");
}

pub async fn an_extended_item_stays_with_its_worker<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    // On a machine that was too slow to extend in time, the item is lost, which is another law's.
    for round in 0..20 {
        let id = format!("a/{round}");
        let item = free(&h, &group(&a, SHORT * 3), &id).await;
        let mut lost = false;
        for _ in 0..4 {
            h.pass(SHORT).await;
            lost |= item.extend().await.is_err();
        }
        let rival = group(&b, LONG).from([&id]).unwrap().try_take(1).await.unwrap();
        if lost || !item.is_held().await {
            continue;
        }
        assert!(rival.is_empty(), "an extended item went to another worker: {rival:?}");
        let worked = item.run(async { 7 }).await;
        assert!(matches!(worked, Ok(7)), "{worked:?}");
        return item.complete().await.unwrap();
    }
    panic!("no lease could be extended in time");
}

pub async fn work_is_dropped_when_its_lease_is_lost<H: Harness>(h: H) {
    let (keeper, store) = (h.keeper().await, h.client().await);
    if !has(&keeper).await {
        return;
    }
    let item = free(&h, &group(&keeper, SHORT * 5), "a").await;
    // Another client removes the lease, as an operator might.
    let leases = store.scan("claim-lease/", &lockkeeper::Page::FIRST).await.unwrap().records;
    assert_eq!(leases.len(), 1, "one item has a lease");
    store.delete(&leases[0].key, lockkeeper_core::Expect::Any).await.unwrap();
    let work = std::future::pending::<()>();
    let told = soon("the work is dropped", while_time_passes(&h, item.run(work))).await;
    assert!(matches!(told, Err(Error::Lost(_))), "{told:?}");
}

pub async fn what_is_given_back_is_free_at_once<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let item = group(&a, LONG).from(["a"]).unwrap().try_take(1).await.unwrap().pop().expect("it is free");
    let given_back = item.give_back().await;
    let next = group(&b, LONG).from(["a"]).unwrap().try_take(1).await.unwrap().pop();
    assert!(given_back.is_ok() && next.is_some(), "what was given back is not free: {given_back:?}");
    assert_eq!(next.map(|item| item.attempt_number()), Some(1), "the attempt counts");
}

/// The first write of a lease has no reply, its retry is applied, and the item is given back or fails. Then the first write arrives, twice. It used
/// to find no record, and every worker was kept away for a whole lease.
pub async fn a_first_write_that_comes_late_holds_no_item<H: Harness>(h: H) {
    let (calm, other) = (h.keeper().await, h.client().await);
    if !has(&calm).await {
        return;
    }
    for (id, fails, attempts) in [("given back", false, 1), ("failed", true, 2)] {
        let network = Interposed::new(h.client().await, Fate::LostUnheard, async {});
        let unlucky = Lockkeeper::with_store(Arc::new(network), h.clock());
        let group = group(&unlucky, LONG).backoff(SHORT, SHORT);
        let item = group.from([id]).unwrap().try_take(1).await.unwrap().pop().expect("it is free");
        let key = name(&format!("claim-lease/004/work/{id}"));
        let first = other.read(&key).await.unwrap().expect("the item has a lease").value;
        match fails {
            true => assert!(matches!(item.fail("not yet").await, Ok(AfterFailure::RetryAfter(_)))),
            false => item.give_back().await.unwrap(),
        }
        h.pass(SHORT * 2).await;
        for _ in 0..2 {
            let expect = lockkeeper_core::Expect::Absent;
            let _ = other.write(&key, &first, expect, Some(LONG)).await.unwrap();
            let next = self::group(&calm, LONG).from([id]).unwrap().try_take(1).await.unwrap().pop();
            let next = next
                .unwrap_or_else(|| panic!("what was {id} is held for no worker by a request that came late"));
            assert_eq!(next.attempt_number(), attempts, "what came late is no attempt");
            assert_eq!(self::group(&calm, LONG).counts().await.unwrap().taken, 1, "its lease counts");
            next.give_back().await.unwrap();
        }
    }
    // The pause after a failure lasts for as long as without the late request.
    let network = Interposed::new(h.client().await, Fate::LostUnheard, async {});
    let unlucky = Lockkeeper::with_store(Arc::new(network), h.clock());
    let item =
        group(&unlucky, LONG).backoff(LONG, LONG).from(["a"]).unwrap().try_take(1).await.unwrap().pop();
    item.expect("it is free").fail("not yet").await.unwrap();
    let early = group(&calm, LONG).from(["a"]).unwrap().try_take(1).await.unwrap();
    assert!(early.is_empty(), "it was tried again before its back-off was over: {early:?}");
}

/// Takes and completes items until none is left, over a network that loses and delays. Returns what was confirmed.
async fn work_through(mut source: ClaimSource) -> Vec<String> {
    let mut confirmed = Vec::new();
    loop {
        match source.next().await {
            Ok(None) => return confirmed,
            Ok(Some(item)) => {
                let id = item.id().to_owned();
                // A completion without a confirmation may count, and the item is claimed again if it does not.
                if item.complete().await.is_ok() {
                    confirmed.push(id);
                }
            }
            Err(Error::Unknown(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

pub async fn a_lost_reply_neither_loses_nor_doubles_an_item<H: Harness>(h: H) {
    let calm = h.keeper().await;
    if !has(&calm).await {
        return;
    }
    let mut delivered_late = 0;
    for seed in lossy::seeds() {
        let name = format!("work/{seed}");
        let (mut workers, mut networks) = (Vec::new(), Vec::new());
        for client in 0..2 {
            let network = LossyStore::new(h.client().await, seed + 1000 * client);
            let keeper = Lockkeeper::with_store(network.clone(), h.clock());
            let group = keeper.claim(&name).unwrap().lease(SHORT).max_attempts(1000).poll(SHORT / 20);
            workers.push(tokio::spawn(work_through(group.from(ids(6)).unwrap())));
            networks.push(network);
        }
        let mut confirmed = Vec::new();
        for worker in workers {
            confirmed.extend(soon("every item is done", while_time_passes(&h, worker)).await.unwrap());
        }
        let count = confirmed.len();
        let once: BTreeSet<String> = confirmed.into_iter().collect();
        assert_eq!(once.len(), count, "an item was completed twice");
        for network in networks {
            network.deliver().await;
            delivered_late += network.delivered_late();
        }
        let counts = calm.claim(&name).unwrap().counts().await.unwrap();
        assert_eq!((counts.done, counts.waiting), (6, 0), "an item was lost: {counts:?}");
    }
    assert!(delivered_late > 0, "no request came late: the law shows nothing");
}

pub async fn bad_input_to_a_claim_leaves_nothing<H: Harness>(h: H) {
    let (keeper, store) = (h.keeper().await, h.client().await);
    if !has(&keeper).await {
        return;
    }
    for name in ["", "a\nb", &"x".repeat(129)] {
        assert!(matches!(keeper.claim(name), Err(Error::Invalid(_))), "{name:?}");
    }
    let good = group(&keeper, LONG);
    for id in ["", "a\0b", &"x".repeat(321)] {
        assert!(matches!(good.from(["fine", id]), Err(Error::Invalid(_))), "{id:?}");
    }
    let ms = Duration::from_millis;
    for bad in [
        good.clone().lease(ms(99)),
        good.clone().lease(Duration::from_secs(24 * 60 * 60 + 1)),
        good.clone().max_attempts(0),
        good.clone().backoff(ms(2), ms(1)),
        good.clone().keep(ms(1)),
    ] {
        assert!(matches!(bad.from(["a"]), Err(Error::Invalid(_))), "{bad:?}");
    }
    for most in [0, 1001] {
        let told = good.from(["a"]).unwrap().try_take(most).await;
        assert!(matches!(told, Err(Error::Invalid(_))), "{most}: {told:?}");
    }
    let none: [&str; 0] = [];
    assert!(good.from(none).unwrap().next().await.unwrap().is_none(), "no item is no work");
    let left = store.scan("claim", &lockkeeper::Page::FIRST).await.unwrap();
    assert!(left.records.is_empty(), "{left:?}");
    // A record that another program has written under an item's name is not overwritten.
    let foreign = name("claim/004/work/a");
    store.write(&foreign, b"of another program", lockkeeper_core::Expect::Absent, None).await.unwrap();
    let told = good.from(["a"]).unwrap().try_take(1).await;
    assert!(matches!(told, Err(Error::Invalid(_))), "another's record was written over: {told:?}");
    let leases = store.scan("claim-lease/", &lockkeeper::Page::FIRST).await.unwrap();
    assert!(leases.records.is_empty(), "a refused claim leaves a lease: {leases:?}");
}

/// When everything is settled and all times are over, the store has only what failed for good.
pub async fn nothing_is_left_of_what_was_done<H: Harness>(h: H) {
    let (keeper, store) = (h.keeper().await, h.client().await);
    if !has(&keeper).await {
        return;
    }
    let group = group(&keeper, SHORT).max_attempts(1).keep(SHORT);
    let (good, bad) = (free(&h, &group, "good").await, free(&h, &group, "bad").await);
    good.complete().await.unwrap();
    bad.fail("for good").await.unwrap();
    h.pass(SHORT * 3).await;
    let left = store.scan("claim", &lockkeeper::Page::FIRST).await.unwrap();
    let left: Vec<&str> = left.records.iter().map(|record| record.key.as_str()).collect();
    assert_eq!(left, ["claim/004/work/bad"], "something is left");
}
