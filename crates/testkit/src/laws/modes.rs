//! Shared, permits, several at once, re-entry, lock-delay and min-hold. What a profile does not declare must be refused.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use lockkeeper_core::{Acquired, Error, Mode, Profile, Release, Renewal, Wait};

use super::*;

/// Whether the store has a feature; if it says it has not, an ask that needs it must be refused.
pub(super) async fn has(
    store: &Arc<dyn Store>,
    feature: fn(&Profile) -> bool,
    needs: lockkeeper_core::Ask,
) -> bool {
    if feature(&store.profile()) {
        return true;
    }
    let answer = store.acquire(&needs).await;
    assert!(matches!(answer, Err(Error::Unsupported(_))), "undeclared and not refused: {answer:?}");
    false
}

fn in_mode(text: &str, mode: Mode) -> lockkeeper_core::Ask {
    with(ask(text), |ask| ask.mode = mode)
}

pub async fn shared_holders_share_and_keep_writers_out<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let shared = || in_mode("orders/42", Mode::Shared);
    if !has(&a, |p| p.shared, shared()).await {
        return;
    }
    let one = take(&a, &shared()).await;
    refused(&b, &ask("orders/42")).await;
    give_back(&a, &one.claim).await;
    let writer = take(&b, &ask("orders/42")).await;
    refused(&a, &shared()).await;
    give_back(&b, &writer.claim).await;
    take(&a, &shared()).await;
}

pub async fn shared_holders_do_share<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let shared = || in_mode("orders/42", Mode::Shared);
    if !has(&a, |p| p.shared, shared()).await {
        return;
    }
    let one = take(&a, &shared()).await;
    let two = take(&b, &shared()).await;
    assert_ne!(one.fence, two.fence);
    give_back(&a, &one.claim).await;
    refused(&a, &ask("orders/42")).await;
    // A writer waits for the last of them; then readers that came after it are served together.
    let writer = stand_in_line(&a, &ask("orders/42"), 1).await;
    let readers = [stand_in_line(&b, &shared(), 2).await, stand_in_line(&b, &shared(), 3).await];
    give_back(&b, &two.claim).await;
    let writer = granted(writer).await;
    give_back(&a, &writer.claim).await;
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
    let writer = stand_in_line(&b, &ask("orders/42"), 1).await;
    refused(&a, &shared()).await;
    give_back(&a, &reader.claim).await;
    granted(writer).await;
}

pub async fn permits_are_counted<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let permit = || in_mode("pool", Mode::Permit(3));
    if !has(&a, |p| p.permits, permit()).await {
        return;
    }
    let held = [take(&a, &permit()).await, take(&b, &permit()).await, take(&a, &permit()).await];
    refused(&b, &permit()).await;
    refused(&b, &ask("pool")).await;
    let waiter = stand_in_line(&b, &permit(), 1).await;
    give_back(&a, &held[1].claim).await;
    granted(waiter).await;
    refused(&a, &permit()).await;
}

pub async fn the_smallest_number_of_permits_counts<H: Harness>(h: H) {
    let a = h.client().await;
    if !has(&a, |p| p.permits, in_mode("pool", Mode::Permit(2))).await {
        return;
    }
    // Half a fleet has been told 2, the other half 5: nobody sees more than it was told.
    take(&a, &in_mode("pool", Mode::Permit(2))).await;
    take(&a, &in_mode("pool", Mode::Permit(5))).await;
    refused(&a, &in_mode("pool", Mode::Permit(5))).await;
    refused(&a, &in_mode("pool", Mode::Permit(2))).await;
}

pub async fn several_names_are_all_or_nothing<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let both = || ask_all(&["account/1", "account/2"]);
    if !has(&a, |p| p.several, both()).await {
        return;
    }
    let one = take(&b, &ask("account/2")).await;
    let busy = refused(&a, &both()).await;
    assert_eq!(busy.name, name("account/2"));
    is_free(&a, "account/1").await;
    give_back(&b, &one.claim).await;
    let held = take(&a, &both()).await;
    for text in ["account/1", "account/2"] {
        assert_eq!(refused(&b, &ask(text)).await.held[0].fence, held.fence);
    }
    assert_eq!(a.renew(std::slice::from_ref(&held)).await.unwrap(), [Renewal::Renewed]);
    assert_eq!(give_back(&a, &held.claim).await, Release::Released);
    is_free(&a, "account/1").await;
    is_free(&a, "account/2").await;
}

pub async fn several_names_hold_nothing_while_they_wait<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let both = ask_all(&["account/1", "account/2"]);
    if !has(&a, |p| p.several, both.clone()).await {
        return;
    }
    let second = take(&b, &ask("account/2")).await;
    let (a2, patient) = (a.clone(), with(both, |ask| ask.wait = Wait::Forever));
    let waiter = tokio::spawn(async move { a2.acquire(&patient).await });
    in_line(&a, &name("account/2"), 1).await;
    let view = a.inspect(&name("account/1")).await.unwrap();
    assert!(view.as_ref().is_none_or(|view| view.held.is_empty()), "{view:?}");
    give_back(&b, &second.claim).await;
    let held = granted(waiter).await;
    give_back(&a, &held.claim).await;
    is_free(&a, "account/1").await;
}

pub async fn reentry_keeps_the_fence_and_counts_holds<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let me = owner();
    let mine = || with(ask("orders/42"), |ask| ask.owner = Some(me));
    if !has(&a, |p| p.reentry, mine()).await {
        return;
    }
    let outer = take(&a, &mine()).await;
    let waiter = stand_in_line(&b, &ask("orders/42"), 1).await;
    // Past the line, or it would wait for itself.
    let inner = take(&b, &mine()).await;
    assert_eq!(outer.fence, inner.fence);
    assert_eq!(give_back(&a, &outer.claim).await, Release::Released);
    refused(&a, &ask("orders/42")).await;
    assert!(!waiter.is_finished(), "one of two holds is left");
    assert_eq!(give_back(&b, &inner.claim).await, Release::Released);
    let next = granted(waiter).await;
    assert!(next.fence > outer.fence);
    give_back(&b, &next.claim).await;
    // Free to held is a new grant, also for the same owner.
    let later = take(&a, &mine()).await;
    assert!(later.fence > next.fence);
}

pub async fn strangers_do_not_reenter<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let of = |owner| with(ask("orders/42"), |ask| ask.owner = owner);
    if !has(&a, |p| p.reentry, of(Some(owner()))).await {
        return;
    }
    take(&a, &of(Some(owner()))).await;
    refused(&b, &of(Some(owner()))).await;
    refused(&b, &of(None)).await;
}

pub async fn lock_delay_holds_back_after_an_unclean_end<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let careful = |ttl| {
        with(ask("orders/42"), |ask| {
            ask.ttl = ttl;
            ask.lock_delay = SHORT * 20;
        })
    };
    if !has(&a, |p| p.lock_delay, careful(LONG)).await {
        return;
    }
    let late = take(&a, &careful(SHORT)).await;
    h.pass(SHORT * 2).await;
    assert_eq!(a.renew(std::slice::from_ref(&late)).await.unwrap(), [Renewal::Lost]);
    refused(&b, &ask("orders/42")).await;
    let view = b.inspect(&name("orders/42")).await.unwrap().unwrap();
    assert!(view.held.is_empty() && view.delayed_ms.is_some(), "{view:?}");
    // Breaking what is only held back frees it.
    b.break_lock(&name("orders/42"), "the old holder is known to be dead").await.unwrap();
    let next = take(&b, &careful(LONG)).await;
    // A break is an unclean end too.
    b.break_lock(&name("orders/42"), "hangs").await.unwrap();
    refused(&a, &ask("orders/42")).await;
    assert!(next.fence > late.fence);
}

pub async fn lock_delay_spares_a_clean_release<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let careful = with(ask("orders/42"), |ask| ask.lock_delay = LONG);
    if !has(&a, |p| p.lock_delay, careful.clone()).await {
        return;
    }
    let held = take(&a, &careful).await;
    give_back(&a, &held.claim).await;
    take(&b, &ask("orders/42")).await;
}

pub async fn min_hold_outlasts_the_release<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let cron = with(ask("nightly"), |ask| ask.min_hold = SHORT * 4);
    if !has(&a, |p| p.min_hold, cron.clone()).await {
        return;
    }
    let held = take(&a, &cron).await;
    assert_eq!(give_back(&a, &held.claim).await, Release::Released);
    let busy = refused(&b, &ask("nightly")).await;
    assert!(busy.held[0].lingering);
    assert_eq!(a.renew(std::slice::from_ref(&held)).await.unwrap(), [Renewal::Lost]);
    assert_eq!(give_back(&a, &held.claim).await, Release::AlreadyGone);
    let waiter = tokio::spawn(async move {
        let patient = with(ask("nightly"), |ask| ask.wait = Wait::Forever);
        b.acquire(&patient).await
    });
    h.pass(SHORT * 5).await;
    match soon("the minimum hold ends", waiter).await.unwrap() {
        Ok(Acquired::Granted(next)) => assert!(next.fence > held.fence),
        other => panic!("it was to be granted after the minimum hold: {other:?}"),
    }
}
