//! Writers of the recipes that come late: others have written meanwhile.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use lockkeeper::once::{OnceStart, RunPermit, Stored};

use lockkeeper::register::Swap;

use lockkeeper::windows::Window;

use lockkeeper::{Error, Page};

use super::interposed::{Fate, Interposed};
use super::register::has_records;
use super::*;

/// More writes than a record remembers.
const FORGOTTEN: u64 = 40;

/// A register remembers its last writes. A writer without a reply whose mark is no longer among them cannot know what became of its write.
pub async fn a_write_that_no_record_remembers_is_unknown<H: Harness>(h: H) {
    let calm = h.keeper().await;
    if !has_records(&calm).await {
        return;
    }
    for (key, fate, writes) in [
        ("many/applied", Fate::AppliedUnheard, FORGOTTEN),
        ("many/lost", Fate::LostUnheard, FORGOTTEN),
        ("few/applied", Fate::AppliedUnheard, 5),
        ("few/lost", Fate::LostUnheard, 5),
    ] {
        let first = calm.register::<u64>(key).update(|_| 0).await.unwrap();
        let register = calm.register::<u64>(key);
        let others = async move {
            for _ in 0..writes {
                register.update(|old| old.unwrap_or(0) + 1).await.unwrap();
            }
        };
        let store = Arc::new(Interposed::new(h.client().await, fate, others));
        let late = Lockkeeper::with_store(store, h.clock()).register::<u64>(key);
        let told = soon("it ends", late.compare_and_set(Some(first.fence), &1000)).await;
        let as_it_was = match (fate, writes) {
            (_, FORGOTTEN) => matches!(told, Err(Error::Unknown(_))),
            (Fate::AppliedUnheard, _) => matches!(told, Ok(Swap::Swapped(_))),
            _ => matches!(told, Ok(Swap::Conflict(Some(_)))),
        };
        assert!(as_it_was, "{key}, after {writes} other writes: {told:?}");
    }
    // The same for a first write, when the value of the others was removed: a tombstone remembers as much as a value.
    for (key, fate, writes) in [
        ("many/removed", Fate::AppliedUnheard, FORGOTTEN),
        ("few/removed", Fate::AppliedUnheard, 5),
        ("few/removed and lost", Fate::LostUnheard, 5),
    ] {
        let register = calm.register::<u64>(key);
        let others = async move {
            for _ in 0..writes {
                register.update(|old| old.unwrap_or(0) + 1).await.unwrap();
            }
            assert!(matches!(register.remove(None).await.unwrap(), Swap::Swapped(_)));
        };
        let store = Arc::new(Interposed::new(h.client().await, fate, others));
        let late = Lockkeeper::with_store(store, h.clock()).register::<u64>(key);
        let told = soon("it ends", late.compare_and_set(None, &1000)).await;
        let left = calm.register::<u64>(key).read().await.unwrap().map(|entry| entry.value);
        let as_it_was = match (fate, writes) {
            (_, FORGOTTEN) => matches!(told, Err(Error::Unknown(_))) && left.is_none(),
            (Fate::AppliedUnheard, _) => matches!(told, Ok(Swap::Swapped(_))) && left.is_none(),
            _ => matches!(told, Ok(Swap::Swapped(_))) && left == Some(1000),
        };
        assert!(as_it_was, "{key}, after {writes} other writes and a removal: {told:?}, and it is {left:?}");
    }
}

fn large(byte: u8) -> Stored {
    Stored { ok: true, bytes: vec![byte; 1_600_000] }
}

async fn turn(keeper: &Lockkeeper) -> Box<RunPermit> {
    match soon("a claim is answered", keeper.once("k").ttl(LONG).claim()).await.unwrap() {
        OnceStart::Run(turn) => turn,
        OnceStart::Done(done) => panic!("it was to be a turn, but is done: {:?}", done.fence),
    }
}

/// The records that large results are kept in.
async fn parts(store: &Arc<dyn Store>) -> Vec<lockkeeper_core::LockName> {
    let found = store.scan("once-part/", &Page::FIRST).await.unwrap();
    found.records.into_iter().map(|record| record.key).collect()
}

/// A large result is kept in several records. The records of a late runner are its own, and are deleted when the store refuses its result.
pub async fn a_large_result_that_is_late_spoils_and_leaves_nothing<H: Harness>(h: H) {
    let (a, b, store) = (h.keeper().await, h.keeper().await, h.client().await);
    if !has_records(&a).await {
        return;
    }
    let late = turn(&a).await;
    store.break_lock(&name("once/k"), "a law").await.unwrap();
    turn(&b).await.finish(large(1)).await.unwrap();
    let kept = parts(&store).await;
    assert!(kept.len() > 1, "a large result is in several records: {kept:?}");
    let told = late.finish(large(2)).await;
    let found = b.once("k").result().await.unwrap().expect("it is done");
    assert!(found.result == large(1), "a late runner spoilt the result that counts");
    assert_eq!(parts(&store).await, kept, "a late runner left its parts, or took those of another");
    assert!(matches!(told, Err(Error::Stale { .. })), "{told:?}");
}

/// A result of which a part is missing is damaged: it is neither shortened nor made again.
pub async fn a_large_result_with_a_part_missing_is_not_given_back<H: Harness>(h: H) {
    let (a, store) = (h.keeper().await, h.client().await);
    if !has_records(&a).await {
        return;
    }
    turn(&a).await.finish(large(1)).await.unwrap();
    let last = parts(&store).await.pop().expect("it is in parts");
    store.delete(&last, lockkeeper_core::Expect::Any).await.unwrap();
    let told = a.once("k").result().await.map(|done| done.map(|done| done.result.bytes.len()));
    assert!(
        matches!(&told, Err(Error::Unavailable(why)) if why.contains("once/k")),
        "a damaged result was given back: {told:?}"
    );
    let told = soon("it is told", a.once("k").claim()).await;
    assert!(told.is_err(), "it was to be done again: {told:?}");
}

/// A caller has the lock, and before it says so in the record it is paused: the next holder runs meanwhile.
pub async fn a_caller_that_begins_late_does_not_take_the_turn_back<H: Harness>(h: H) {
    let (b, store) = (h.keeper().await, h.client().await);
    if !has_records(&b).await {
        return;
    }
    let (send, newer) = tokio::sync::oneshot::channel();
    let others = {
        let b = b.clone();
        async move {
            store.break_lock(&name("once/k"), "a law").await.unwrap();
            send.send(turn(&b).await).expect("the law waits for it");
        }
    };
    let late = Arc::new(Interposed::new(h.client().await, Fate::Late, others));
    let late = Lockkeeper::with_store(late, h.clock());
    let told = soon("it is told", late.once("k").ttl(LONG).claim()).await;
    let newer = newer.await.expect("the other one has its turn");
    match told {
        Err(Error::Stale { seen, .. }) => assert_eq!(seen, newer.fence()),
        other => panic!("a late caller was to be refused: {other:?}"),
    }
    newer.finish(Stored { ok: true, bytes: b"right".to_vec() }).await.unwrap();
    assert_eq!(b.once("k").result().await.unwrap().unwrap().result.bytes, b"right");
}

/// The same for a window: the next holder has begun it, and the holder before begins it late.
pub async fn a_holder_that_begins_a_window_late_does_not_take_it_back<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has_records(&a).await {
        return;
    }
    let at = 10_000 * 86_400_000;
    let late = a.lock("nightly").ttl(LONG).acquire().await.unwrap();
    h.client().await.break_lock(&name("nightly"), "a law").await.unwrap();
    let lock = b.lock("nightly").ttl(LONG).acquire();
    let newer = soon("the lock is free", while_time_passes(&h, lock)).await.unwrap();
    let Window::Ours(run) = b.windows("nightly").begin(&newer, at).await.unwrap() else {
        panic!("no runner has run it")
    };
    let told = a.windows("nightly").begin(&late, at).await;
    match told {
        Err(Error::Stale { presented, seen }) => assert_eq!((presented, seen), (late.fence(), newer.fence())),
        other => panic!("a late holder was to be refused: {other:?}"),
    }
    run.finish(&newer, 0).await.unwrap();
}
