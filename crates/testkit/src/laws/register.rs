//! Values that many change without a lock.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use std::collections::BTreeSet;

use futures_util::StreamExt;
use lockkeeper::register::{Register, Swap, VALUE_BYTES};
use lockkeeper::{Error, Fence, Page};

use super::lossy::{self, LossyStore};
use super::*;

/// Whether the store has records; if not, a register must be refused.
pub(super) async fn has_records(keeper: &Lockkeeper) -> bool {
    if keeper.profile().records {
        return true;
    }
    let refused = keeper.register::<u64>("r").read().await;
    assert!(matches!(refused, Err(Error::Unsupported(_))), "undeclared and not refused: {refused:?}");
    false
}

/// Adds `times` to a counter, each time by one; returns the fences of its writes.
async fn count(register: Register<u64>, times: u64) -> Vec<Fence> {
    let mut fences = Vec::new();
    for _ in 0..times {
        let slowly = |old: Option<u64>| {
            // Others get their turn between the reading and the writing.
            std::thread::sleep(Duration::from_millis(1));
            old.unwrap_or(0) + 1
        };
        let updated = register.update(slowly).await;
        fences.push(updated.unwrap_or_else(|told| panic!("it is not known whether it counts: {told}")).fence);
    }
    fences
}

async fn count_together<H: Harness>(h: &H, registers: Vec<Register<u64>>, times: u64) {
    let workers = registers.len() as u64;
    let last = registers[0].clone();
    let counting: Vec<_> = registers.into_iter().map(|r| tokio::spawn(count(r, times))).collect();
    let mut fences = BTreeSet::new();
    for worker in counting {
        let done = soon("the counting ends", while_time_passes(h, worker)).await.unwrap();
        assert!(done.is_sorted(), "the fences of one writer went back: {done:?}");
        fences.extend(done);
    }
    let entry = last.read().await.unwrap().unwrap();
    assert_eq!(entry.value, workers * times, "increments were lost, or counted twice");
    assert_eq!(fences.len() as u64, workers * times, "two writes have one fence");
    assert_eq!(fences.last(), Some(&entry.fence));
}

pub async fn updates_of_many_lose_nothing<H: Harness>(h: H) {
    let first = h.keeper().await;
    if !has_records(&first).await {
        return;
    }
    let mut registers = vec![first.register("visits")];
    for _ in 0..3 {
        registers.push(h.keeper().await.register("visits"));
    }
    count_together(&h, registers, 15).await;
}

pub async fn an_update_whose_answer_is_lost_counts_once<H: Harness>(h: H) {
    let first = h.keeper().await;
    if !has_records(&first).await {
        return;
    }
    let (mut delivered_late, seeds) = (0, lossy::seeds());
    for seed in seeds {
        let name = format!("visits/{seed}");
        first.register(&name).update(|_| 0).await.unwrap();
        let (mut registers, mut networks) = (vec![first.register(&name)], Vec::new());
        for client in 0..2 {
            let network = LossyStore::new(h.client().await, seed + 1000 * client);
            registers.push(Lockkeeper::with_store(network.clone(), h.clock()).register(&name));
            networks.push(network);
        }
        let last = registers[0].clone();
        count_together(&h, registers, 8).await;
        let value = last.read().await.unwrap();
        for network in networks {
            network.deliver().await;
            delivered_late += network.delivered_late();
        }
        assert_eq!(last.read().await.unwrap(), value, "a request that came late changed the value");
    }
    assert!(delivered_late > 0, "no request came late: the law shows nothing");
}

pub async fn a_value_is_set_only_over_the_one_that_was_seen<H: Harness>(h: H) {
    let (keeper, other) = (h.keeper().await, h.keeper().await);
    if !has_records(&keeper).await {
        return;
    }
    let (ours, theirs) = (keeper.register::<String>("owner"), other.register::<String>("owner"));
    let Swap::Swapped(one) = ours.compare_and_set(None, &"us".into()).await.unwrap() else {
        panic!("nothing was there")
    };
    let Swap::Conflict(Some(found)) = theirs.compare_and_set(None, &"them".into()).await.unwrap() else {
        panic!("something is there")
    };
    assert_eq!((found.value.as_str(), found.fence), ("us", one));
    let Swap::Swapped(two) = theirs.compare_and_set(Some(one), &"them".into()).await.unwrap() else {
        panic!("no client changed it")
    };
    // The write is sent by one who does not read first: it must be the store that refuses it.
    let stale = lockkeeper_core::Expect::Version(lockkeeper_core::Version(one.get()));
    let late = keeper.store().write(&name("owner"), b"\"late\"", stale, None).await.unwrap();
    let refused = matches!(late, lockkeeper_core::WriteOutcome::Conflict(Some(_)));
    assert!(refused, "written over a value that was not seen: {late:?}");
    assert!(matches!(ours.compare_and_set(Some(one), &"us".into()).await.unwrap(), Swap::Conflict(_)));
    assert!(matches!(ours.remove(Some(one)).await.unwrap(), Swap::Conflict(Some(_))));
    assert_eq!(ours.remove(Some(two)).await.unwrap(), Swap::Swapped(two));
    assert_eq!(ours.remove(None).await.unwrap(), Swap::Conflict(None));
    assert_eq!(theirs.read().await.unwrap(), None);
    // A change that refuses changes nothing.
    let refused = ours.try_update(|_| Err(Error::invalid("not today"))).await;
    assert!(matches!(refused, Err(Error::Invalid(_))));
    assert_eq!(theirs.read().await.unwrap(), None);
}

pub async fn every_write_has_a_newer_fence<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has_records(&keeper).await {
        return;
    }
    let register = keeper.register::<u64>("visits");
    let mut last = None;
    for round in 0..6 {
        let done = register.update(|old| old.unwrap_or(0) + 1).await.unwrap();
        assert!(Some(done.fence) > last, "a write is not newer: {} after {last:?}", done.fence);
        last = Some(done.fence);
        if round == 2 {
            // A value that is made again does not begin again.
            register.remove(None).await.unwrap();
        }
    }
    assert_eq!(register.read().await.unwrap().map(|entry| entry.fence), last);
}

pub async fn who_loses_too_often_is_told_so<H: Harness>(h: H) {
    let (keeper, other) = (h.keeper().await, h.client().await);
    if !has_records(&keeper).await {
        return;
    }
    let register = keeper.register::<u64>("visits").conflicts(2);
    let mut calls = 0;
    let update = register.update(|old| {
        calls += 1;
        // Another client is quicker, each time.
        let (other, n) = (other.clone(), calls);
        let rival = async move {
            let any = lockkeeper_core::Expect::Any;
            other.write(&name("visits"), format!("{}", n * 100).as_bytes(), any, None).await
        };
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(rival)).unwrap();
        old.unwrap_or(0) + 1
    });
    let told = soon("the update ends", while_time_passes(&h, update)).await;
    assert!(matches!(told, Err(Error::Limited(_))), "who loses too often is not told: {told:?}");
    assert_eq!(calls, 3, "two conflicts are allowed, so it is tried three times");
    assert_eq!(register.read().await.unwrap().unwrap().value, 300);
}

pub async fn a_watcher_sees_the_truth_and_nothing_twice<H: Harness>(h: H) {
    let (keeper, other) = (h.keeper().await, h.keeper().await);
    if !has_records(&keeper).await {
        return;
    }
    let poll = Duration::from_millis(20);
    let mut seen = keeper.register::<u64>("visits").poll(poll).watch();
    let next = soon("what is there is told", seen.next()).await.unwrap().unwrap();
    assert_eq!(next, None, "nothing is there");
    let register = other.register::<u64>("visits");
    let writer = async {
        for n in 1..=30 {
            register.update(|_| n).await.unwrap();
        }
    };
    let reader = async {
        let (mut last, mut value) = (None, 0);
        while value < 30 {
            let entry = seen.next().await.unwrap().unwrap().expect("it is never deleted");
            assert!(Some(entry.fence) > last && entry.value > value, "{entry:?} after {last:?}");
            (last, value) = (Some(entry.fence), entry.value);
        }
    };
    let both = async { tokio::join!(writer, reader) };
    soon("the watcher sees the last value", while_time_passes(&h, both)).await;
    register.remove(None).await.unwrap();
    let gone = soon("the end is told", while_time_passes(&h, seen.next())).await.unwrap().unwrap();
    assert_eq!(gone, None);
}

pub async fn a_value_with_a_ttl_goes<H: Harness>(h: H) {
    let (keeper, other) = (h.keeper().await, h.keeper().await);
    if !has_records(&keeper).await {
        return;
    }
    keeper.register::<u64>("visits").ttl(SHORT).update(|_| 7).await.unwrap();
    assert_eq!(other.register::<u64>("visits").read().await.unwrap().map(|entry| entry.value), Some(7));
    h.pass(SHORT * 2).await;
    assert_eq!(other.register::<u64>("visits").read().await.unwrap(), None, "a value outlived its ttl");
}

pub async fn bad_input_is_refused_and_leaves_nothing<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has_records(&keeper).await {
        return;
    }
    for key in ["", "a\nb", &"x".repeat(513)] {
        let refused = keeper.register::<u64>(key).update(|_| 1).await;
        assert!(matches!(refused, Err(Error::Invalid(_))), "{key:?}: {refused:?}");
    }
    let short = Duration::from_millis(1);
    let refused = keeper.register::<u64>("r").ttl(short).update(|_| 1).await;
    assert!(matches!(refused, Err(Error::Invalid(_))), "bad input was taken: {refused:?}");
    let huge = keeper.register_bytes("r").update(|_| vec![0; VALUE_BYTES + 1]).await;
    assert!(matches!(huge, Err(Error::Limited(_))));
    let (left, next) = keeper.registers("", &Page::FIRST).await.unwrap();
    assert!(left.is_empty() && next.is_none(), "{left:?}");
    // The largest is fine, and so are bytes that are no text.
    keeper.register_bytes("r").update(|_| vec![0xff; VALUE_BYTES]).await.unwrap();
    let found = keeper.register_bytes("r").read().await.unwrap().unwrap();
    assert!(found.value.len() == VALUE_BYTES && found.value.iter().all(|b| *b == 0xff));
    // A value of another type is reported, and not overwritten.
    keeper.register::<String>("text").update(|_| "seven".into()).await.unwrap();
    let other = keeper.register::<u64>("text").update(|_| 7).await;
    assert!(matches!(other, Err(Error::Invalid(_))), "{other:?}");
    assert_eq!(keeper.register_bytes("text").read().await.unwrap().unwrap().value, b"\"seven\"");
}
