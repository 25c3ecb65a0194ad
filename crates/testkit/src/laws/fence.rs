//! The fence of a lock strictly grows from grant to grant, whatever ended the one before.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use lockkeeper_core::{Fence, Renewal};

use super::*;

pub async fn fences_grow_from_grant_to_grant<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let mut last = None;
    for round in 0..6 {
        let client = if round % 2 == 0 { &a } else { &b };
        let held = take(client, &ask("orders/42")).await;
        assert!(Some(held.fence) > last, "{} after {last:?}", held.fence);
        last = Some(held.fence);
        give_back(client, &held.claim).await;
    }
    assert!(last <= Some(Fence::MAX));
}

pub async fn the_fence_outlives_release_and_expiry<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let released = take(&a, &ask("orders/42")).await;
    give_back(&a, &released.claim).await;
    is_free(&a, "orders/42").await;
    let expired = take(&b, &with(ask("orders/42"), |ask| ask.ttl = SHORT)).await;
    assert!(expired.fence > released.fence, "a release took the fence back");
    h.pass(SHORT * 2).await;
    let next = take(&a, &ask("orders/42")).await;
    assert!(next.fence > expired.fence, "an expiry took the fence back");
}

pub async fn fences_grow_across_names_and_clients<H: Harness>(h: H) {
    // A fence guards a resource, and a resource may be guarded by one name today and by another tomorrow. And: one
    // client's count is not another's.
    let clients = [h.client().await, h.client().await, h.client().await];
    let mut last = None;
    for round in 0..9 {
        let client = &clients[round % 3];
        let held = take(client, &ask("orders/42")).await;
        assert!(Some(held.fence) > last, "{} after {last:?}", held.fence);
        last = Some(held.fence);
        give_back(client, &held.claim).await;
    }
}

pub async fn a_break_moves_the_fence_on<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let old = take(&a, &ask("orders/42")).await;
    let broken = b.break_lock(&name("orders/42"), "the holder hangs").await.unwrap();
    assert!(broken > old.fence, "the old holder's writes would still be taken");
    let new = take(&b, &ask("orders/42")).await;
    assert!(new.fence > broken);
}

pub async fn a_broken_holder_is_told_so<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let old = take(&a, &ask("orders/42")).await;
    b.break_lock(&name("orders/42"), "the holder hangs").await.unwrap();
    assert_eq!(a.renew(std::slice::from_ref(&old)).await.unwrap(), [Renewal::Lost]);
    let new = take(&b, &ask("orders/42")).await;
    give_back(&a, &old.claim).await;
    assert_eq!(b.renew(&[new]).await.unwrap(), [Renewal::Renewed]);
}

pub async fn a_break_of_a_free_lock_moves_the_fence_too<H: Harness>(h: H) {
    let a = h.client().await;
    let held = take(&a, &ask("orders/42")).await;
    give_back(&a, &held.claim).await;
    let first = a.break_lock(&name("orders/42"), "to be sure").await.unwrap();
    let second = a.break_lock(&name("orders/42"), "to be surer").await.unwrap();
    assert!(held.fence < first && first < second);
}
