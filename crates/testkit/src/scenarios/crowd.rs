//! Many waiters for the lock `popular`, each of which releases its grant at once; and many who share a lock.

use std::sync::Arc;

use futures_util::future::join_all;
use lockkeeper_core::{AcquireOutcome, Error, Fence, Grant, LockRequest, Mode, Store, Wait};
use tokio::task::JoinHandle;

use crate::laws::{give_back, join_queue, owner, request, take, with};

/// Adds this many waiters. Each returns its fence.
pub fn join(store: &Arc<dyn Store>, waiters: usize) -> Vec<JoinHandle<Fence>> {
    let wait = |store: Arc<dyn Store>| async move {
        let patient = with(request("popular"), |request| request.wait = Wait::Forever);
        let grant = match store.acquire(&patient).await {
            Ok(AcquireOutcome::Granted(grant)) => grant,
            other => panic!("not granted: {other:?}"),
        };
        give_back(&store, &grant.key).await;
        grant.fence
    };
    (0..waiters).map(|_| tokio::spawn(wait(store.clone()))).collect()
}

/// Waits until all of them have had the lock.
///
/// # Panics
/// If two grants had one fence.
pub async fn all_granted(crowd: Vec<JoinHandle<Fence>>) {
    let (count, mut fences) = (crowd.len(), Vec::new());
    for waiter in crowd {
        fences.push(waiter.await.expect("a waiter ends well"));
    }
    fences.sort_unstable();
    fences.dedup();
    assert_eq!(fences.len(), count, "each grant has a fence of its own");
}

/// Takes this many of these requests, ten at a time.
pub async fn take_many(
    store: &Arc<dyn Store>,
    count: usize,
    request: impl Fn() -> LockRequest,
) -> Vec<Grant> {
    let (requests, mut grants): (Vec<_>, Vec<_>) = ((0..count).map(|_| request()).collect(), Vec::new());
    for each in requests.chunks(10) {
        grants.extend(join_all(each.iter().map(|request| take(store, request))).await);
    }
    grants
}

/// One owner among many sharers, who may re-enter its hold wherever that is in the queue. A store that reads only a part of a long queue has to
/// know the owner's entries all the same.
///
/// # Panics
/// If the owner's hold is overlooked, or another owner is taken for it.
pub async fn an_owner_among_sharers(store: &Arc<dyn Store>) {
    let shared = || with(request("shared by many"), |request| request.mode = Mode::Shared);
    let exclusive = || request("shared by many");
    let (mine, other) = (owner(), owner());
    let of = |owner, request| with(request, |request| request.owner = Some(owner));
    // A request that does not wait may be refused behind one that is just being granted.
    let patient = || with(shared(), |request| request.wait = Wait::Forever);
    let before = take_many(store, 40, patient).await;
    let held = take(store, &of(mine, shared())).await;
    let after = take_many(store, 40, patient).await;

    let again = take(store, &of(mine, shared())).await;
    assert_eq!(again.fence, held.fence, "the owner re-enters its hold");
    let beside = take(store, &of(other, shared())).await;
    assert!(beside.fence > held.fence, "another owner has a grant of its own");
    let upgrade = store.acquire(&of(mine, exclusive())).await;
    assert!(matches!(upgrade, Err(Error::Deadlock(_))), "it would wait for itself: {upgrade:?}");
    let blocked = store.acquire(&of(owner(), exclusive())).await;
    assert!(matches!(blocked, Ok(AcquireOutcome::Busy(_))), "others share it: {blocked:?}");

    // An owner waits in the queue. Its second request may come after the first, and no other request may pass.
    let waiter = of(owner(), with(exclusive(), |request| request.wait = Wait::Forever));
    let waiting = join_queue(store, &waiter, 1).await;
    let passing = store.acquire(&shared()).await;
    assert!(matches!(passing, Ok(AcquireOutcome::Busy(_))), "a sharer passed a waiter: {passing:?}");
    let passing = store.acquire(&of(owner(), shared())).await;
    assert!(matches!(passing, Ok(AcquireOutcome::Busy(_))), "an owner passed a waiter: {passing:?}");
    let once_more = take(store, &of(mine, shared())).await;
    assert_eq!(once_more.fence, held.fence, "a re-entry passes waiters");
    for grant in before.iter().chain(&after).chain([&held, &again, &beside, &once_more]) {
        give_back(store, &grant.key).await;
    }
    let Ok(Ok(AcquireOutcome::Granted(granted))) = waiting.await else {
        panic!("the waiter is granted the lock")
    };
    assert!(granted.fence > beside.fence);
    give_back(store, &granted.key).await;
}
