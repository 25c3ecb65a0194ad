//! Many requests for one lock at once.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use futures_util::future::join_all;
use lockkeeper_core::{AcquireOutcome, Mode, Profile, RenewOutcome, Wait};

use super::modes::has;
use super::*;

/// How many requests: fewer where each of them polls.
fn many(store: &Arc<dyn Store>, queued: usize, polling: usize) -> usize {
    if polls(store) { polling } else { queued }
}

/// An owner enters its lock once more while a long queue waits, and releases its first hold first. A store that looks only at the
/// beginning of a long queue does not see the second hold, and grants the lock to two.
pub async fn a_reentry_behind_a_long_queue_keeps_others_out<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let me = owner();
    let mine = || with(request("orders/42"), |request| request.owner = Some(me));
    if !has(&a, |profile| profile.reentry, mine()).await {
        return;
    }
    let first = take(&a, &mine()).await;
    let count = many(&a, 100, 5);
    let patient = || with(request("orders/42"), |request| request.wait = Wait::Forever);
    let mut waiters: Vec<_> = (0..count)
        .map(|_| {
            let (b, request) = (b.clone(), patient());
            tokio::spawn(async move { b.acquire(&request).await })
        })
        .collect();
    queue_reaches(&a, &name("orders/42"), count).await;
    let again = take(&a, &mine()).await;
    assert_eq!(again.fence, first.fence, "a re-entry keeps the fence");
    give_back(&a, &first.key).await;
    let view = b.inspect(&name("orders/42")).await.unwrap().expect("it is held");
    // Long enough for a waiter to be let in, if a store does that.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!waiters.iter().any(|waiter| waiter.is_finished()), "a waiter was let in beside the second hold");
    let waiting = if polls(&b) { 0 } else { count };
    assert_eq!((view.held.len(), view.waiting), (1, waiting), "a waiter is shown as a holder: {view:?}");
    assert_eq!(a.renew(std::slice::from_ref(&again)).await.unwrap(), [RenewOutcome::Renewed]);
    give_back(&a, &again.key).await;
    eventually("a waiter is let in", || async { waiters.iter().any(|waiter| waiter.is_finished()) }).await;
    let served = waiters.iter().position(|waiter| waiter.is_finished()).expect("a waiter was let in");
    assert!(granted(waiters.swap_remove(served)).await.fence > first.fence);
    waiters.iter().for_each(|waiter| waiter.abort());
}

/// The same where the second hold has ended, and its min-hold or its lock-delay holds the lock back. Breaking that lets a waiter in.
pub async fn what_a_reentry_behind_a_long_queue_holds_back_stays_so<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let count = many(&a, 40, 5);
    let kinds: [(&str, Declared); 2] =
        [("min-hold", |profile| profile.min_hold), ("lock-delay", |profile| profile.lock_delay)];
    for (text, declared) in kinds {
        let me = owner();
        let mine = || with(request(text), |request| request.owner = Some(me));
        let kept = with(mine(), |request| match text {
            "min-hold" => request.min_hold = LONG,
            _ => (request.ttl, request.lock_delay) = (SHORT, LONG),
        });
        if !a.profile().reentry || !has(&a, declared, kept.clone()).await {
            continue;
        }
        let first = take(&a, &mine()).await;
        let patient = || with(request(text), |request| request.wait = Wait::Forever);
        let waiters: Vec<_> = (0..count)
            .map(|_| {
                let (b, request) = (b.clone(), patient());
                tokio::spawn(async move { b.acquire(&request).await })
            })
            .collect();
        queue_reaches(&a, &name(text), count).await;
        let again = take(&a, &kept).await;
        give_back(&a, &first.key).await;
        match text {
            "min-hold" => _ = give_back(&a, &again.key).await,
            _ => h.pass(SHORT * 2).await,
        }
        // Long enough for a waiter to be let in, if a store does that.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let let_in = waiters.iter().any(|waiter| waiter.is_finished());
        assert!(!let_in, "a waiter was let in though the {text} of the second hold holds the lock back");
        let view = b.inspect(&name(text)).await.unwrap().expect("it is held back");
        let held_back = view.delayed_ms.is_some() || view.held.iter().all(|held| held.lingering);
        assert!(held_back, "the {text} of the second hold is not shown: {view:?}");
        b.break_lock(&name(text), "the old holder is known to be dead").await.unwrap();
        eventually("a waiter is let in", || async { waiters.iter().any(|waiter| waiter.is_finished()) })
            .await;
        waiters.iter().for_each(|waiter| waiter.abort());
    }
}

/// How long each request waits: for longer than [`soon`] does, and less than the poll of a harness whose store may poll seldom. A request that missed the grant
/// of the one in front looks again when its wait or its poll is over, and not before.
const WAIT: Duration = Duration::from_secs(50);

/// Whether a store declares a mode.
type Declared = fn(&Profile) -> bool;

/// Requests that no holder excludes are all granted, though they come at once: none of them waits for a poll, or for the end of its wait.
pub async fn requests_that_no_holder_excludes_are_all_granted<H: Harness>(h: H) {
    let clients = [h.client().await, h.client().await, h.client().await];
    let count = many(&clients[0], 30, 6);
    let permits = Mode::Permit(count as u32);
    let modes: [(&str, Mode, Declared); 2] = [
        ("readers", Mode::Shared, |profile| profile.shared),
        ("permits", permits, |profile| profile.permits),
    ];
    for (text, mode, declared) in modes {
        let patient = || {
            with(request(text), |request| {
                request.mode = mode;
                request.wait = Wait::For(WAIT);
            })
        };
        if !has(&clients[0], declared, patient()).await {
            continue;
        }
        let requests: Vec<_> = (0..count).map(|_| patient()).collect();
        let asked = requests.iter().enumerate().map(|(i, request)| clients[i % 3].acquire(request));
        for answer in soon("all requests that no holder excludes are granted", join_all(asked)).await {
            assert!(
                matches!(answer, Ok(AcquireOutcome::Granted(_))),
                "no holder excludes it, and the answer is: {answer:?}"
            );
        }
    }
}
