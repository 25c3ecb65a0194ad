//! Shared, permits, several at once, re-entry, lock-delay and min-hold. A store must refuse what its profile does not declare.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use lockkeeper_core::{AcquireOutcome, Error, Mode, Profile, ReleaseOutcome, RenewOutcome, Wait};

use super::*;

/// Whether the store has a feature; if it says it has not, a request that needs it must be refused.
pub(super) async fn has(
    store: &Arc<dyn Store>,
    feature: fn(&Profile) -> bool,
    needs: lockkeeper_core::LockRequest,
) -> bool {
    if feature(&store.profile()) {
        return true;
    }
    let answer = store.acquire(&needs).await;
    assert!(matches!(answer, Err(Error::Unsupported(_))), "undeclared and not refused: {answer:?}");
    false
}

fn in_mode(text: &str, mode: Mode) -> lockkeeper_core::LockRequest {
    with(request(text), |request| request.mode = mode)
}

pub async fn shared_holders_share_and_keep_writers_out<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let shared = || in_mode("orders/42", Mode::Shared);
    if !has(&a, |p| p.shared, shared()).await {
        return;
    }
    let one = take(&a, &shared()).await;
    refused_with(&b, &request("orders/42"), "a writer beside a reader").await;
    give_back(&a, &one.key).await;
    let writer = take(&b, &request("orders/42")).await;
    refused(&a, &shared()).await;
    give_back(&b, &writer.key).await;
    take(&a, &shared()).await;
}

pub async fn shared_holders_do_share<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let shared = || in_mode("orders/42", Mode::Shared);
    if !has(&a, |p| p.shared, shared()).await {
        return;
    }
    let one = take(&a, &shared()).await;
    let two = take_with(&b, &shared(), "a reader beside a reader").await;
    assert_ne!(one.fence, two.fence);
    give_back(&a, &one.key).await;
    refused(&a, &request("orders/42")).await;
    // A writer waits for the last of them; then readers that came after it are served together.
    let writer = join_queue(&a, &request("orders/42"), 1).await;
    let readers = [join_queue(&b, &shared(), 2).await, join_queue(&b, &shared(), 3).await];
    give_back(&b, &two.key).await;
    let writer = granted(writer).await;
    give_back(&a, &writer.key).await;
    for reader in readers {
        granted(reader).await;
    }
}

pub async fn a_waiting_writer_is_not_starved<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let shared = || in_mode("orders/42", Mode::Shared);
    if !has(&a, |p| p.shared, shared()).await {
        return;
    }
    let reader = take(&a, &shared()).await;
    let writer = join_queue(&b, &request("orders/42"), 1).await;
    refused_with(&a, &shared(), "a reader behind a writer").await;
    give_back(&a, &reader.key).await;
    granted(writer).await;
}

pub async fn permits_are_counted<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let permit = || in_mode("pool", Mode::Permit(3));
    if !has(&a, |p| p.permits, permit()).await {
        return;
    }
    let held = [take(&a, &permit()).await, take(&b, &permit()).await, take(&a, &permit()).await];
    refused_with(&b, &permit(), "a fourth of three permits").await;
    refused(&b, &request("pool")).await;
    let waiter = join_queue(&b, &permit(), 1).await;
    give_back(&a, &held[1].key).await;
    granted(waiter).await;
    refused(&a, &permit()).await;
}

pub async fn the_smallest_number_of_permits_counts<H: Harness>(h: H) {
    let a = h.client().await;
    if !has(&a, |p| p.permits, in_mode("pool", Mode::Permit(2))).await {
        return;
    }
    // Half a fleet is configured with 2, the other half with 5: no client sees more holders than its own number.
    take(&a, &in_mode("pool", Mode::Permit(2))).await;
    take(&a, &in_mode("pool", Mode::Permit(5))).await;
    refused_with(&a, &in_mode("pool", Mode::Permit(5)), "a third of two permits").await;
    refused(&a, &in_mode("pool", Mode::Permit(2))).await;
}

pub async fn several_names_are_all_or_nothing<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let both = || request_all(&["account/1", "account/2"]);
    if !has(&a, |p| p.multi_name, both()).await {
        return;
    }
    let one = take(&b, &request("account/2")).await;
    let busy = refused_with(&a, &both(), "two names, one of them held").await;
    assert_eq!(busy.name, name("account/2"));
    is_free(&a, "account/1").await;
    give_back(&b, &one.key).await;
    let held = take(&a, &both()).await;
    for text in ["account/1", "account/2"] {
        assert_eq!(refused(&b, &request(text)).await.held[0].fence, held.fence);
    }
    assert_eq!(a.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
    assert_eq!(give_back(&a, &held.key).await, ReleaseOutcome::Released);
    is_free(&a, "account/1").await;
    is_free(&a, "account/2").await;
}

pub async fn several_names_hold_nothing_while_they_wait<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let both = request_all(&["account/1", "account/2"]);
    if !has(&a, |p| p.multi_name, both.clone()).await {
        return;
    }
    let second = take(&b, &request("account/2")).await;
    let (a2, patient) = (a.clone(), with(both, |request| request.wait = Wait::Forever));
    let waiter = tokio::spawn(async move { a2.acquire(&patient).await });
    queue_reaches(&a, &name("account/2"), 1).await;
    let view = a.inspect(&name("account/1")).await.unwrap();
    assert!(view.as_ref().is_none_or(|view| view.held.is_empty()), "held while it waits: {view:?}");
    give_back(&b, &second.key).await;
    let held = granted(waiter).await;
    give_back(&a, &held.key).await;
    is_free(&a, "account/1").await;
}

pub async fn reentry_keeps_the_fence_and_counts_holds<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let me = owner();
    let mine = || with(request("orders/42"), |request| request.owner = Some(me));
    if !has(&a, |p| p.reentry, mine()).await {
        return;
    }
    let outer = take(&a, &mine()).await;
    let waiter = join_queue(&b, &request("orders/42"), 1).await;
    // Past the line, or it would wait for itself.
    let inner = take(&b, &mine()).await;
    assert_eq!(outer.fence, inner.fence, "a re-entry has a fence of its own");
    assert_eq!(give_back(&a, &outer.key).await, ReleaseOutcome::Released);
    refused(&a, &request("orders/42")).await;
    assert!(!waiter.is_finished(), "one of two holds is left");
    assert_eq!(give_back(&b, &inner.key).await, ReleaseOutcome::Released);
    let next = granted(waiter).await;
    assert!(next.fence > outer.fence);
    give_back(&b, &next.key).await;
    // Free to held is a new grant, also for the same owner.
    let later = take(&a, &mine()).await;
    assert!(later.fence > next.fence);
}

pub async fn strangers_do_not_reenter<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let of = |owner| with(request("orders/42"), |request| request.owner = owner);
    if !has(&a, |p| p.reentry, of(Some(owner()))).await {
        return;
    }
    take(&a, &of(Some(owner()))).await;
    refused_with(&b, &of(Some(owner())), "a stranger").await;
    refused(&b, &of(None)).await;
}

pub async fn lock_delay_holds_back_after_an_unclean_end<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let careful = |ttl| {
        with(request("orders/42"), |request| {
            request.ttl = ttl;
            request.lock_delay = SHORT * 20;
        })
    };
    if !has(&a, |p| p.lock_delay, careful(LONG)).await {
        return;
    }
    let late = take(&a, &careful(SHORT)).await;
    h.pass(SHORT * 2).await;
    assert_eq!(a.renew(std::slice::from_ref(&late)).await.unwrap(), [RenewOutcome::Lost]);
    refused_with(&b, &request("orders/42"), "a lock in its lock-delay").await;
    let view = b.inspect(&name("orders/42")).await.unwrap().unwrap();
    assert!(view.held.is_empty() && view.delayed_ms.is_some(), "{view:?}");
    // Breaking what is only held back frees it.
    b.break_lock(&name("orders/42"), "the old holder is known to be dead").await.unwrap();
    let next = take(&b, &careful(LONG)).await;
    // A break is an unclean end too.
    b.break_lock(&name("orders/42"), "hangs").await.unwrap();
    refused(&a, &request("orders/42")).await;
    assert!(next.fence > late.fence);
}

pub async fn lock_delay_spares_a_clean_release<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let careful = with(request("orders/42"), |request| request.lock_delay = LONG);
    if !has(&a, |p| p.lock_delay, careful.clone()).await {
        return;
    }
    let held = take(&a, &careful).await;
    give_back(&a, &held.key).await;
    take_with(&b, &request("orders/42"), "a lock after a clean release").await;
}

pub async fn min_hold_outlasts_the_release<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let cron = with(request("nightly"), |request| request.min_hold = SHORT * 4);
    if !has(&a, |p| p.min_hold, cron.clone()).await {
        return;
    }
    let held = take(&a, &cron).await;
    assert_eq!(give_back(&a, &held.key).await, ReleaseOutcome::Released);
    let busy = refused_with(&b, &request("nightly"), "a lock in its minimum hold").await;
    assert!(busy.held[0].lingering);
    assert_eq!(a.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Lost]);
    assert_eq!(give_back(&a, &held.key).await, ReleaseOutcome::AlreadyGone);
    let waiter = tokio::spawn(async move {
        let patient = with(request("nightly"), |request| request.wait = Wait::Forever);
        b.acquire(&patient).await
    });
    h.pass(SHORT * 5).await;
    match soon("the minimum hold ends", waiter).await.unwrap() {
        Ok(AcquireOutcome::Granted(next)) => assert!(next.fence > held.fence),
        other => panic!("it was to be granted after the minimum hold: {other:?}"),
    }
}
