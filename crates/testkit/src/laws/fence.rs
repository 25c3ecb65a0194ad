//! The fence of a lock strictly grows from grant to grant, whatever ended the one before.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use futures_util::StreamExt;
use lockkeeper_core::{Error, EventKind, Fence, ReleaseOutcome, RenewOutcome};

use super::*;

pub async fn fences_grow_from_grant_to_grant<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let mut last = None;
    for round in 0..6 {
        let client = if round % 2 == 0 { &a } else { &b };
        let held = take(client, &request("orders/42")).await;
        assert!(Some(held.fence) > last, "{} after {last:?}", held.fence);
        last = Some(held.fence);
        give_back(client, &held.key).await;
    }
    assert!(last <= Some(Fence::MAX));
}

pub async fn the_fence_outlives_release_and_expiry<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let released = take(&a, &request("orders/42")).await;
    give_back(&a, &released.key).await;
    is_free(&a, "orders/42").await;
    let expired = take(&b, &with(request("orders/42"), |request| request.ttl = SHORT)).await;
    assert!(expired.fence > released.fence, "a release took the fence back");
    h.pass(SHORT * 2).await;
    let next = take(&a, &request("orders/42")).await;
    assert!(next.fence > expired.fence, "an expiry took the fence back");
}

pub async fn fences_grow_across_names_and_clients<H: Harness>(h: H) {
    // A fence guards a resource, and a resource may be guarded by one name today and by another tomorrow. And: one
    // client's count is not another's.
    let clients = [h.client().await, h.client().await, h.client().await];
    let mut last = None;
    for round in 0..9 {
        let client = &clients[round % 3];
        let held = take(client, &request("orders/42")).await;
        assert!(Some(held.fence) > last, "{} after {last:?}", held.fence);
        last = Some(held.fence);
        give_back(client, &held.key).await;
    }
}

pub async fn a_break_moves_the_fence_on<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let old = take(&a, &request("orders/42")).await;
    let broken = b.break_lock(&name("orders/42"), "the holder hangs").await.unwrap();
    assert!(broken > old.fence, "the old holder's writes would still be taken");
    let new = take(&b, &request("orders/42")).await;
    assert!(new.fence > broken);
}

pub async fn a_broken_holder_is_told_so<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let old = take(&a, &request("orders/42")).await;
    b.break_lock(&name("orders/42"), "the holder hangs").await.unwrap();
    let told = a.renew(std::slice::from_ref(&old)).await.unwrap();
    assert_eq!(told, [RenewOutcome::Lost], "a broken holder is not told");
    let new = take(&b, &request("orders/42")).await;
    give_back(&a, &old.key).await;
    assert_eq!(b.renew(&[new]).await.unwrap(), [RenewOutcome::Renewed]);
}

pub async fn a_break_of_a_free_lock_moves_the_fence_too<H: Harness>(h: H) {
    let a = h.client().await;
    let held = take(&a, &request("orders/42")).await;
    give_back(&a, &held.key).await;
    let first = a.break_lock(&name("orders/42"), "to be sure").await.unwrap();
    let second = a.break_lock(&name("orders/42"), "to be surer").await.unwrap();
    assert!(held.fence < first && first < second, "a break of a free lock left the fence: {first}, {second}");
}

/// Whether the store can revoke; one that cannot says so and changes nothing.
async fn revokes(store: &Arc<dyn Store>) -> bool {
    if store.profile().revoke {
        return true;
    }
    let held = take(store, &request("orders/42")).await;
    let refused = store.revoke(&name("orders/42"), "the host is drained").await;
    assert!(matches!(refused, Err(Error::Unsupported(_))), "{refused:?}");
    assert_eq!(store.renew(&[held]).await.unwrap(), [RenewOutcome::Renewed], "nothing was to be changed");
    false
}

pub async fn a_revoked_holder_is_told_why_and_let_finish<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    if !revokes(&a).await {
        return;
    }
    let held = take(&a, &request("orders/42")).await;
    let waiter = join_queue(&b, &request("orders/42"), 1).await;
    assert!(matches!(b.revoke(&name("orders/42"), " ").await, Err(Error::Invalid(_))));
    let fence = b.revoke(&name("orders/42"), "the host is drained").await.unwrap();
    assert!(fence > held.fence, "{fence} is not newer than {}", held.fence);
    for _ in 0..2 {
        let told = a.renew(std::slice::from_ref(&held)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiter.is_finished(), "the next one was let in before the holder had stopped");
        assert_eq!(told, [RenewOutcome::Revoked("the host is drained".into())]);
    }
    let view = b.inspect(&name("orders/42")).await.unwrap().expect("it is held");
    assert_eq!(view.held[0].revoked.as_deref(), Some("the host is drained"));
    assert_eq!(give_back(&a, &held.key).await, ReleaseOutcome::Released);
    let next = granted(waiter).await;
    assert!(next.fence > fence, "{} is not newer than {fence}", next.fence);
    assert_eq!(
        b.renew(&[next]).await.unwrap(),
        [RenewOutcome::Renewed],
        "the next holder was revoked as well"
    );
}

pub async fn a_revoked_lease_is_not_renewed<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    if !revokes(&a).await {
        return;
    }
    let held = take(&a, &with(request("orders/42"), |request| request.ttl = SHORT * 2)).await;
    b.revoke(&name("orders/42"), "the host is drained").await.unwrap();
    h.pass(SHORT).await;
    let told = a.renew(std::slice::from_ref(&held)).await.unwrap();
    assert_ne!(told, [RenewOutcome::Renewed], "a revoked lease was renewed");
    h.pass(SHORT * 3 / 2).await;
    let next = take(&b, &request("orders/42")).await;
    assert!(next.fence > held.fence);
    assert_eq!(a.renew(&[held]).await.unwrap(), [RenewOutcome::Lost]);
}

pub async fn a_revoked_holder_cannot_begin_anew<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    if !revokes(&a).await {
        return;
    }
    // A minimum hold is for a holder that ends too soon, not for one that is to end.
    let min_hold = if a.profile().min_hold { LONG } else { Duration::ZERO };
    let owner = a.profile().reentry.then(owner);
    let first = with(request("orders/42"), |request| (request.min_hold, request.owner) = (min_hold, owner));
    let held = take(&a, &first).await;
    b.revoke(&name("orders/42"), "the host is drained").await.unwrap();
    let again = a.acquire(&first).await;
    assert!(
        matches!(&again, Err(Error::Lost(why)) if why.contains("the host is drained")),
        "it began anew: {again:?}"
    );
    if owner.is_some() {
        let inner = a.acquire(&with(request("orders/42"), |request| request.owner = owner)).await;
        assert!(matches!(&inner, Err(Error::Lost(_))), "{inner:?}");
    }
    assert_eq!(give_back(&a, &held.key).await, ReleaseOutcome::Released);
    take(&b, &request("orders/42")).await;
}

/// Names that a store may keep in several places, as a cluster does: each of them shows it, and the waiter of each is let in when the
/// holder has released the grant.
pub async fn a_grant_of_several_names_is_revoked_as_a_whole<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    if !revokes(&a).await || !a.profile().multi_name {
        return;
    }
    let mut events = match a.profile().watch {
        true => Some(a.watch("").await.unwrap()),
        false => None,
    };
    let names = ["orders/1", "orders/2", "orders/3"];
    let held = take(&a, &request_all(&names)).await;
    let waiter = join_queue(&b, &request("orders/1"), 1).await;
    let fence = b.revoke(&name("orders/2"), "the host is drained").await.unwrap();
    assert!(fence > held.fence, "{fence} is not newer than {}", held.fence);
    for text in names {
        let view = b.inspect(&name(text)).await.unwrap().expect("it is held");
        assert_eq!(view.held[0].revoked.as_deref(), Some("the host is drained"), "{text} was not revoked");
    }
    let mut told = std::collections::BTreeSet::new();
    while let Some(events) = events.as_mut().filter(|_| told.len() < 3) {
        let event = soon("the revoke is reported for every name", events.next()).await.unwrap().unwrap();
        if let EventKind::Revoked { fence: newer, reason } = event.kind {
            assert!(newer > held.fence && reason == "the host is drained", "{newer} {reason}");
            assert!(told.insert(event.name), "one revoke is reported twice");
        }
    }
    let renewed = a.renew(std::slice::from_ref(&held)).await.unwrap();
    assert_eq!(renewed, [RenewOutcome::Revoked("the host is drained".into())]);
    assert!(!waiter.is_finished(), "the next one was let in before the holder had stopped");
    assert_eq!(give_back(&a, &held.key).await, ReleaseOutcome::Released);
    let next = granted(waiter).await;
    assert_eq!(
        b.renew(&[next]).await.unwrap(),
        [RenewOutcome::Renewed],
        "the next holder was revoked as well"
    );
    is_free(&b, "orders/2").await;
    is_free(&b, "orders/3").await;
    if a.profile().reentry {
        // One hash tag: a Redis cluster takes several names of one owner only from one slot.
        let owner = Some(owner());
        take(&a, &with(request_all(&["{x}/1", "{x}/2"]), |request| request.owner = owner)).await;
        b.revoke(&name("{x}/1"), "the host is drained").await.unwrap();
        let inner = a.acquire(&with(request("{x}/2"), |request| request.owner = owner)).await;
        assert!(matches!(&inner, Err(Error::Lost(_))), "it was entered again by its other name: {inner:?}");
    }
}
