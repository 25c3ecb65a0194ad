//! Semaphores, read-write locks and several names, as types.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use std::sync::atomic::{AtomicUsize, Ordering};

use lockkeeper::shapes::{RwLock, Semaphore, SemaphorePermit};
use lockkeeper::{Error, Page};

use super::*;

/// Whether the store has permits; if not, a semaphore must be refused.
async fn has_permits(keeper: &Lockkeeper) -> bool {
    if keeper.profile().permits {
        return true;
    }
    let refused = keeper.semaphore("pool", 3).acquire().await.map(drop);
    assert!(matches!(&refused, Err(Error::Unsupported(why)) if why.contains("use ")), "{refused:?}");
    false
}

/// Whether the store has shared locks; if not, a read-write lock must be refused.
async fn has_shared(keeper: &Lockkeeper) -> bool {
    if keeper.profile().shared {
        return true;
    }
    for refused in [keeper.rw_lock("r").read().await.map(drop), keeper.rw_lock("r").write().await.map(drop)] {
        assert!(matches!(&refused, Err(Error::Unsupported(why)) if why.contains("use ")), "{refused:?}");
    }
    false
}

fn pool(keeper: &Lockkeeper, permits: u32) -> Semaphore {
    keeper.semaphore("pool", permits).ttl(LONG).poll(Duration::from_millis(50))
}

fn catalogue(keeper: &Lockkeeper) -> RwLock {
    keeper.rw_lock("catalogue").ttl(LONG)
}

async fn permit(semaphore: &Semaphore) -> SemaphorePermit {
    soon("a free permit is granted", semaphore.acquire()).await.unwrap()
}

pub async fn a_semaphore_has_as_many_permits_as_it_says<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has_permits(&a).await {
        return;
    }
    let (ours, theirs) = (pool(&a, 3), pool(&b, 3));
    let held = [permit(&ours).await, permit(&theirs).await, permit(&ours).await];
    assert!(held[0].fence() < held[1].fence() && held[1].fence() < held[2].fence());
    let more = theirs.try_acquire().await.unwrap();
    assert!(more.is_none(), "a fourth of three permits was granted");
    let waits = theirs.clone().wait(Duration::from_millis(200));
    let told = soon("the wait is over", while_time_passes(&h, waits.acquire())).await.map(drop);
    assert!(matches!(told, Err(Error::Busy(_))), "{told:?}");
    let waiter = tokio::spawn(async move { theirs.acquire().await });
    let [first, ..] = held;
    first.release().await.unwrap();
    let next = soon("the waiter gets the permit", while_time_passes(&h, waiter)).await.unwrap();
    assert!(next.unwrap().is_held());
}

pub async fn a_smaller_limit_stops_no_holder_and_admits_no_more<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has_permits(&a).await || !a.profile().records {
        return;
    }
    let (ours, theirs) = (pool(&a, 3), pool(&b, 3));
    let mut held = vec![permit(&ours).await, permit(&ours).await, permit(&theirs).await];
    // It waits for one of three, and must not get one of three when there is one of one.
    let patient = theirs.clone();
    let waiter = tokio::spawn(async move { patient.acquire().await });
    waits_or_ends(&h.client().await, &name("pool"), &waiter).await;
    ours.resize(1).await.unwrap();
    assert!(held.iter().all(|permit| permit.is_held()), "a holder was stopped");
    for _ in 0..2 {
        held.pop().expect("a holder").release().await.unwrap();
        let pause = tokio::time::sleep(Duration::from_millis(100));
        while_time_passes(&h, pause).await;
        assert!(!waiter.is_finished(), "a permit above the new limit was granted to a waiter");
        let more = theirs.try_acquire().await.unwrap();
        assert!(more.is_none(), "a permit above the new limit was granted");
    }
    held.pop().expect("the last holder").release().await.unwrap();
    let last = soon("the waiter gets its permit", while_time_passes(&h, waiter)).await.unwrap().unwrap();
    assert_eq!((last.limit(), theirs.limit().await.unwrap()), (1, 1));
}

pub async fn a_larger_limit_lets_waiters_in<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has_permits(&a).await || !a.profile().records {
        return;
    }
    let (ours, theirs) = (pool(&a, 1), pool(&b, 1));
    let mut held = permit(&ours).await;
    let fence = held.fence();
    let waiter = tokio::spawn(async move { theirs.acquire().await });
    waits_or_ends(&h.client().await, &name("pool"), &waiter).await;
    ours.resize(2).await.unwrap();
    if !a.profile().reentry {
        assert!(matches!(held.adopt_limit().await, Err(Error::Unsupported(_))));
        return;
    }
    assert_eq!(held.adopt_limit().await.unwrap(), 2, "the larger limit is not seen");
    assert_eq!((held.fence(), held.limit(), held.is_held()), (fence, 2, true));
    let second = soon("the waiter is let in", while_time_passes(&h, waiter)).await.unwrap().unwrap();
    assert!(ours.try_acquire().await.unwrap().is_none(), "a third of two permits was granted");
    held.release().await.unwrap();
    second.release().await.unwrap();
    is_free(&h.client().await, "pool").await;
    ours.reset_limit().await.unwrap();
    assert_eq!(ours.limit().await.unwrap(), 1);
}

pub async fn readers_share_and_a_writer_is_alone<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has_shared(&a).await {
        return;
    }
    let (ours, theirs) = (catalogue(&a), catalogue(&b));
    let readers = [ours.read().await.unwrap(), theirs.read().await.unwrap()];
    assert!(theirs.try_write().await.unwrap().is_none(), "a writer was let in beside readers");
    for reader in readers {
        reader.release().await.unwrap();
    }
    let writer = soon("the lock is free", ours.write()).await.unwrap();
    assert!(theirs.try_write().await.unwrap().is_none(), "a writer was let in beside a writer");
    assert!(theirs.try_read().await.unwrap().is_none(), "a reader was let in beside a writer");
    let waits = theirs.clone().wait(Duration::from_millis(200));
    let told = soon("the wait is over", while_time_passes(&h, waits.read())).await.map(drop);
    assert!(matches!(told, Err(Error::Busy(_))), "{told:?}");
    writer.release().await.unwrap();
    soon("the lock is free", theirs.read()).await.unwrap().release().await.unwrap();
}

pub async fn a_writer_in_the_queue_keeps_new_readers_out<H: Harness>(h: H) {
    let (a, b, client) = (h.keeper().await, h.keeper().await, h.client().await);
    if !has_shared(&a).await || polls(&client) {
        return;
    }
    let (ours, theirs) = (catalogue(&a), catalogue(&b));
    let reader = ours.read().await.unwrap();
    let waiting = theirs.clone();
    let writer = tokio::spawn(async move { waiting.write().await });
    queue_reaches(&client, &name("catalogue"), 1).await;
    let barged = ours.try_read().await;
    assert!(matches!(barged, Ok(None)), "a reader overtook a writer that waits: {barged:?}");
    reader.release().await.unwrap();
    let writer = soon("the writer is let in", while_time_passes(&h, writer)).await.unwrap();
    assert!(writer.unwrap().is_held());
}

pub async fn a_downgrade_keeps_other_writers_out<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has_shared(&a).await {
        return;
    }
    let (ours, theirs) = (catalogue(&a), catalogue(&b));
    let writer = ours.write().await.unwrap();
    let fence = writer.fence();
    let waiting = theirs.clone();
    let next = tokio::spawn(async move { waiting.write().await });
    waits_or_ends(&h.client().await, &name("catalogue"), &next).await;
    let reader = match writer.downgrade().await {
        Ok(reader) => reader,
        Err(refused) if !a.profile().reentry => {
            assert!(matches!(&refused.error, Error::Unsupported(_)), "{refused}");
            return assert!(refused.lock.is_held(), "the write lock is gone");
        }
        Err(refused) => panic!("a downgrade was to be possible: {refused}"),
    };
    assert_eq!(reader.fence(), fence, "the fence of a downgraded lock is another one");
    let pause = tokio::time::sleep(Duration::from_millis(100));
    while_time_passes(&h, pause).await;
    assert!(!next.is_finished(), "another writer was let in by a downgrade");
    reader.release().await.unwrap();
    let next = soon("the next writer is let in", while_time_passes(&h, next)).await.unwrap().unwrap();
    assert!(next.fence() > fence);
    // Without a writer in the queue other readers join a downgraded lock.
    let reader = next.downgrade().await.expect("a downgrade is possible");
    let joined = soon("readers join", ours.try_read()).await.unwrap();
    assert!(joined.is_some() && reader.is_held(), "readers do not join a downgraded lock");
}

pub async fn an_upgrade_is_refused_with_the_reason<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has_shared(&a).await {
        return;
    }
    let reader = catalogue(&a).read().await.unwrap();
    match reader.upgrade() {
        Err(Error::Unsupported(why)) => assert!(why.contains("wait for each other"), "{why}"),
        other => panic!("an upgrade was to be refused: {other:?}"),
    }
    assert!(reader.is_held());
    let writer = catalogue(&b).try_write().await.unwrap();
    assert!(writer.is_none(), "the read lock is gone after an upgrade that was refused");
}

pub async fn requests_for_several_names_in_any_order_end<H: Harness>(h: H) {
    let first = h.keeper().await;
    if !first.profile().multi_name {
        let refused = first.lock_all(["a", "b"]).acquire().await.map(drop);
        return assert!(matches!(refused, Err(Error::Unsupported(_))), "{refused:?}");
    }
    let inside = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0)]);
    let mut clients = Vec::new();
    let (released, mut releases) = tokio::sync::mpsc::unbounded_channel();
    // Each takes two of three names, each in another order: taken one by one, they would block each other.
    for pair in [[0, 1], [1, 2], [2, 0], [1, 0]] {
        let (keeper, inside, released) = (h.keeper().await, inside.clone(), released.clone());
        clients.push(tokio::spawn(async move {
            for _ in 0..5 {
                let names = pair.map(|n| ["a", "b", "c"][n]);
                let guard = keeper.lock_all(names).ttl(LONG).acquire().await.unwrap();
                let others = pair.map(|n| inside[n].fetch_add(1, Ordering::SeqCst));
                tokio::time::sleep(Duration::from_millis(2)).await;
                pair.iter().for_each(|n| _ = inside[*n].fetch_sub(1, Ordering::SeqCst));
                assert_eq!(others, [0, 0], "two held one of several names at once");
                guard.release().await.unwrap();
                _ = released.send(());
            }
        }));
    }
    drop(released);
    // Each release must be followed by another one. How long all of them take depends on the store: where waiters poll, a
    // client may be overtaken many times.
    while soon("the clients block each other", while_time_passes(&h, releases.recv())).await.is_some() {}
    for client in clients {
        let ended = soon("a client ends after its last release", client).await;
        ended.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
    }
}

pub async fn several_names_have_one_deadline<H: Harness>(h: H) {
    let (keeper, client) = (h.keeper().await, h.client().await);
    if !keeper.profile().multi_name {
        return;
    }
    let both = with(request_all(&["a", "b"]), |request| request.ttl = SHORT);
    let late = take(&client, &both).await;
    h.pass(SHORT * 2).await;
    for text in ["a", "b"] {
        let next = soon("it expires", keeper.lock(text).ttl(LONG).try_acquire()).await.unwrap();
        let next = next.unwrap_or_else(|| panic!("{text} outlived the deadline that it shares"));
        assert!(next.fence() > late.fence);
    }
}

pub async fn bad_input_to_a_shape_leaves_nothing<H: Harness>(h: H) {
    let (keeper, client) = (h.keeper().await, h.client().await);
    if !has_permits(&keeper).await || !keeper.profile().records {
        return;
    }
    let short = Duration::from_millis(1);
    let refusals = [
        keeper.semaphore("pool", 0).acquire().await.map(drop),
        keeper.semaphore("pool", 0).limit().await.map(drop),
        keeper.semaphore("pool", 1_000_001).try_acquire().await.map(drop),
        keeper.semaphore("pool", 3).ttl(short).acquire().await.map(drop),
        keeper.semaphore("pool", 3).resize(0).await,
        keeper.semaphore("pool", 3).resize(1_000_001).await,
        keeper.semaphore("", 3).acquire().await.map(drop),
        keeper.semaphore("", 3).resize(3).await,
        keeper.rw_lock("pool").ttl(short).read().await.map(drop),
        keeper.rw_lock("a\nb").write().await.map(drop),
        keeper.lock_all(Vec::<String>::new()).acquire().await.map(drop),
    ];
    for (n, refused) in refusals.into_iter().enumerate() {
        assert!(matches!(refused, Err(Error::Invalid(_))), "bad input {n} was taken: {refused:?}");
    }
    is_free(&client, "pool").await;
    assert!(keeper.registers("", &Page::FIRST).await.unwrap().0.is_empty());
    permit(&pool(&keeper, 3)).await.release().await.unwrap();
    is_free(&client, "pool").await;
}
