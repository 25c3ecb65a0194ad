//! One holder at a time, and only the holder may renew and release.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures_util::future::join_all;
use lockkeeper_core::{AcquireOutcome, Error, Grant, Mode, ReleaseOutcome, RenewOutcome, limits};

use super::lossy::{self, LossyStore};
use super::*;

pub async fn one_name_has_one_holder<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &request("orders/42")).await;
    let busy = refused_with(&b, &request("orders/42"), "a second holder").await;
    assert_eq!(busy.name, name("orders/42"));
    assert_eq!(busy.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [held.fence]);
    refused(&a, &request("orders/42")).await;
    assert_eq!(give_back(&a, &held.key).await, ReleaseOutcome::Released);
    take(&b, &request("orders/42")).await;
}

pub async fn different_names_do_not_block_each_other<H: Harness>(h: H) {
    let a = h.client().await;
    for text in ["orders/42", "orders/4", "orders", "Orders/42", "orders/42 "] {
        take_with(&a, &request(text), "another name").await;
    }
}

pub async fn every_legal_name_is_a_lock_of_its_own<H: Harness>(h: H) {
    let a = h.client().await;
    let long = "n".repeat(limits::NAME_BYTES);
    let nearly = format!("{}m", &long[1..]);
    let odd = [
        "'; DROP TABLE locks; --",
        "a/../b",
        "a/b",
        "..",
        ".",
        "/",
        "//",
        "*",
        "%",
        "_",
        "[a]",
        "{x}",
        "{x}y",
        "x}",
        "$(id)",
        "`id`",
        "\"",
        "\\",
        "\\\\",
        "a b",
        "A",
        "a",
        "ä",
        "a\u{308}",
        "ключ",
        "鍵",
        "🔒",
        "\u{202e}abc",
        "\u{feff}",
        "\u{a0}",
        ":",
        "lock:a",
        "a:b",
        "-",
        "--help",
        "0",
        "00",
        "null",
        "%2F",
        "%252F",
        "a%2Fb",
        &long,
        &nearly,
    ];
    for text in odd {
        take_with(&a, &request(text), "a name of its own").await;
    }
    for text in odd {
        let busy = refused(&a, &request(text)).await;
        assert_eq!(busy.name.as_str(), text);
        let view = a.inspect(&name(text)).await.unwrap().unwrap_or_else(|| panic!("{text:?} is not seen"));
        assert_eq!((view.name.as_str(), view.held.len()), (text, 1));
    }
}

pub async fn an_expired_lock_goes_to_the_next<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    take(&a, &with(request("orders/42"), |request| request.ttl = SHORT)).await;
    refused(&b, &request("orders/42")).await;
    h.pass(SHORT * 2).await;
    take_with(&b, &request("orders/42"), "an expired lock").await;
}

pub async fn an_expired_holder_is_told_so<H: Harness>(h: H) {
    let a = h.client().await;
    let late = take(&a, &with(request("orders/42"), |request| request.ttl = SHORT)).await;
    let live = take(&a, &request("orders/43")).await;
    h.pass(SHORT * 2).await;
    let told = a.renew(&[late.clone(), live]).await.unwrap();
    assert_eq!(told, [RenewOutcome::Lost, RenewOutcome::Renewed], "an expired holder is not told");
    assert_eq!(give_back(&a, &late.key).await, ReleaseOutcome::AlreadyGone);
}

pub async fn renewal_keeps_the_lock_and_its_fence<H: Harness>(h: H) {
    // A longer ttl than SHORT, so that a slow machine renews in time.
    let ttl = SHORT * 4;
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &with(request("orders/42"), |request| request.ttl = ttl)).await;
    for _ in 0..3 {
        h.pass(ttl / 2).await;
        assert_eq!(a.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
    }
    let busy = refused_with(&b, &request("orders/42"), "a lock that was renewed").await;
    assert_eq!(busy.held[0].fence, held.fence);
}

pub async fn a_stale_release_is_harmless<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let late = take(&a, &with(request("orders/42"), |request| request.ttl = SHORT)).await;
    h.pass(SHORT * 2).await;
    let live = take(&b, &request("orders/42")).await;
    let told = give_back(&a, &late.key).await;
    let kept = b.renew(&[live]).await.unwrap();
    assert_eq!(kept, [RenewOutcome::Renewed], "a stale release ended the next holder's lock");
    assert_eq!(told, ReleaseOutcome::AlreadyGone);
}

pub async fn a_stale_renewal_is_harmless<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let late = take(&a, &with(request("orders/42"), |request| request.ttl = SHORT)).await;
    h.pass(SHORT * 2).await;
    let live = take(&b, &request("orders/42")).await;
    let told = a.renew(&[late]).await.unwrap();
    let busy = refused(&a, &request("orders/42")).await;
    assert_eq!(busy.held[0].fence, live.fence, "a stale renewal ended the next holder's lock");
    assert_eq!(b.renew(&[live]).await.unwrap(), [RenewOutcome::Renewed]);
    assert_eq!(told, [RenewOutcome::Lost]);
    // Free, but not the late one's any more: it must ask again, and gets a new fence.
    let late = take(&a, &with(request("orders/43"), |request| request.ttl = SHORT)).await;
    h.pass(SHORT * 2).await;
    assert_eq!(a.renew(&[late]).await.unwrap(), [RenewOutcome::Lost]);
    take(&b, &request("orders/43")).await;
}

pub async fn a_second_release_says_already_gone<H: Harness>(h: H) {
    let a = h.client().await;
    let held = take(&a, &request("orders/42")).await;
    assert_eq!(give_back(&a, &held.key).await, ReleaseOutcome::Released);
    let second = give_back(&a, &held.key).await;
    assert_eq!(second, ReleaseOutcome::AlreadyGone, "a second release is not told apart");
    assert_eq!(give_back(&a, &request("orders/42").key).await, ReleaseOutcome::AlreadyGone);
    assert_eq!(a.renew(&[held]).await.unwrap(), [RenewOutcome::Lost]);
}

pub async fn the_same_attempt_gets_the_same_fence<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let once = request("orders/42");
    let first = take(&a, &once).await;
    let again = take_with(&a, &once, "the same attempt again").await;
    assert_eq!((first.fence, &first.key), (again.fence, &again.key));
    // One grant, not two: one release frees it.
    assert_eq!(give_back(&a, &once.key).await, ReleaseOutcome::Released);
    take(&b, &request("orders/42")).await;
}

pub async fn a_retry_counts_the_lease_anew<H: Harness>(h: H) {
    let ttl = SHORT * 4;
    let (a, b) = (h.client().await, h.client().await);
    let once = with(request("orders/42"), |request| request.ttl = ttl);
    let first = take(&a, &once).await;
    h.pass(ttl / 2).await;
    let again = take(&a, &once).await;
    assert!(again.sent_at > first.sent_at, "the retry's lease counts from the retry");
    h.pass(ttl * 3 / 4).await;
    refused(&b, &request("orders/42")).await;
}

pub async fn racing_clients_never_hold_together<H: Harness>(h: H) {
    let clients = [h.client().await, h.client().await, h.client().await, h.client().await];
    for round in 0..10 {
        let text = format!("race/{round}");
        let tries = clients.iter().map(|client| {
            let (client, request) = (client.clone(), request(&text));
            tokio::spawn(async move { client.acquire(&request).await })
        });
        let mut winners: Vec<Grant> = Vec::new();
        for one in tries.collect::<Vec<_>>() {
            match soon("a race ends", one).await.unwrap().unwrap() {
                AcquireOutcome::Granted(grant) => winners.push(grant),
                AcquireOutcome::Busy(_) => {}
            }
        }
        assert!(winners.len() <= 1, "winners of one race: {winners:?}");
        // Where answers are lost, those who ask again may find what each other's first try has left behind.
        assert!(!H::CALM || winners.len() == 1, "no client has won");
    }
}

/// Replies get lost, and the callers send the same attempts again: each is let in once, and never two at a time.
pub async fn retries_after_lost_replies_let_no_two_in<H: Harness>(h: H) {
    let clients = [h.client().await, h.client().await, h.client().await];
    for seed in lossy::seeds() {
        let (inside, last) = (AtomicBool::new(false), AtomicU64::new(0));
        let workers = (0..).zip(&clients).map(|(i, client)| {
            let network: Arc<dyn Store> = LossyStore::with_lossy_locks(client.clone(), seed * 10 + i);
            let (inside, last) = (&inside, &last);
            async move {
                for _ in 0..4 {
                    let request = request("orders/42");
                    let grant = loop {
                        match network.acquire(&request).await {
                            Ok(AcquireOutcome::Granted(grant)) => break grant,
                            Ok(AcquireOutcome::Busy(_)) | Err(Error::Unknown(_)) => {}
                            Err(error) => panic!("neither granted, busy nor unknown: {error}"),
                        }
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    };
                    assert!(!inside.swap(true, Ordering::SeqCst), "two were let in after a lost reply");
                    let before = last.swap(grant.fence.get(), Ordering::SeqCst);
                    assert!(before < grant.fence.get(), "{} after {before}", grant.fence);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    inside.store(false, Ordering::SeqCst);
                    while let Err(error) = network.release(&grant.key).await {
                        assert!(matches!(error, Error::Unknown(_)), "{error}");
                    }
                }
            }
        });
        soon("all are let in though replies are lost", join_all(workers)).await;
        is_free(&clients[0], "orders/42").await;
    }
}

pub async fn a_bad_ask_is_refused_and_leaves_nothing<H: Harness>(h: H) {
    let a = h.client().await;
    let bad = [
        with(request("orders/42"), |request| request.ttl = Duration::ZERO),
        with(request("orders/42"), |request| request.ttl = limits::TTL_MIN - Duration::from_nanos(1)),
        with(request("orders/42"), |request| request.ttl = limits::TTL_MAX + Duration::from_secs(1)),
        with(request("orders/42"), |request| request.ttl = Duration::MAX),
        with(request("orders/42"), |request| request.lock_delay = Duration::MAX),
        with(request("orders/42"), |request| request.min_hold = Duration::MAX),
        with(request("orders/42"), |request| request.mode = Mode::Permit(0)),
        with(request("orders/42"), |request| request.mode = Mode::Permit(u32::MAX)),
    ];
    for request in bad {
        let answer = a.acquire(&request).await;
        assert!(
            matches!(answer, Err(Error::Invalid(_) | Error::Unsupported(_))),
            "{request:?} gave {answer:?}"
        );
    }
    assert_eq!(a.inspect(&name("orders/42")).await.unwrap(), None);
    assert!(matches!(a.break_lock(&name("orders/42"), " ").await, Err(Error::Invalid(_))));
}

/// A store may count in whole milliseconds, but it keeps the ttl that it was asked for.
pub async fn a_ttl_may_have_a_fraction_of_a_millisecond<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    let fraction = Duration::from_micros(250);
    let granted = soon("it is granted", keeper.lock("orders/42").ttl(LONG + fraction).acquire()).await;
    let guard = granted.unwrap_or_else(|told| panic!("the ttl was not kept to its fraction: {told}"));
    let patient = keeper.lock("orders/42").ttl(LONG + fraction * 2).acquire();
    let waiter = tokio::spawn(patient);
    queue_reaches(keeper.store(), &name("orders/42"), 1).await;
    soon("it is released", guard.release()).await.unwrap();
    let guard = soon("the waiter is served", waiter).await.unwrap().unwrap();
    soon("it is released", guard.release()).await.unwrap();
}
