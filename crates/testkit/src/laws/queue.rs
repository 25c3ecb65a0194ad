//! First come, first served; and a waiter that leaves, leaves nothing behind.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use lockkeeper_core::{AcquireOutcome, Error, Mode, ReleaseOutcome, RenewOutcome, Wait};
use tokio::task::JoinHandle;

use super::*;

pub async fn waiters_are_served_in_order<H: Harness>(h: H) {
    let clients = [h.client().await, h.client().await, h.client().await];
    let held = take(&clients[0], &request("orders/42")).await;
    let mut waiters = Vec::new();
    for place in 0..6 {
        waiters.push(join_queue(&clients[place % 3], &request("orders/42"), place + 1).await);
    }
    if polls(&clients[0]) {
        serve_all(&clients[0], held, waiters).await;
        return is_free(&clients[0], "orders/42").await;
    }
    let mut holds = held.key;
    let mut last = held.fence;
    while !waiters.is_empty() {
        give_back(&clients[0], &holds).await;
        eventually("a waiter is served", || async { waiters.iter().any(JoinHandle::is_finished) }).await;
        let first = waiters.remove(0);
        assert!(first.is_finished(), "the first waiter was overtaken");
        let served = granted(first).await;
        assert!(served.fence > last);
        (holds, last) = (served.key, served.fence);
    }
    give_back(&clients[0], &holds).await;
    is_free(&clients[0], "orders/42").await;
}

pub async fn one_release_serves_one_waiter<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &request("orders/42")).await;
    let first = join_queue(&b, &request("orders/42"), 1).await;
    let second = join_queue(&b, &request("orders/42"), 2).await;
    if polls(&a) {
        return serve_all(&a, held, vec![first, second]).await;
    }
    give_back(&a, &held.key).await;
    let served = granted(first).await;
    let view = a.inspect(&name("orders/42")).await.unwrap().unwrap();
    assert_eq!(view.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [served.fence]);
    assert_eq!(view.waiting, 1, "the second still waits");
    assert!(!second.is_finished(), "two were served");
    give_back(&b, &served.key).await;
    // Served after the first let go, and not somehow before.
    let next = granted(second).await;
    assert!(next.fence > served.fence, "two were served: {next:?} beside {served:?}");
    let view = a.inspect(&name("orders/42")).await.unwrap().unwrap();
    assert_eq!(view.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [next.fence]);
}

pub async fn a_waiter_gives_up_on_time<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &request("orders/42")).await;
    let began = h.clock().now();
    let impatient = with(request("orders/42"), |request| request.wait = Wait::For(SHORT));
    let waiter = join_queue(&b, &impatient, 1).await;
    h.pass(SHORT * 2).await;
    match soon("a waiter gives up", waiter).await.unwrap() {
        Ok(AcquireOutcome::Busy(busy)) => assert_eq!(busy.held[0].fence, held.fence),
        other => panic!("a waiter was to give up: {other:?}"),
    }
    assert!(h.clock().now().since(began) >= SHORT, "it gave up too early");
    queue_reaches(&a, &name("orders/42"), 0).await;
    // No other waiter is granted in its place.
    give_back(&a, &held.key).await;
    is_free(&a, "orders/42").await;
}

pub async fn a_waiter_that_left_is_never_served<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &request("orders/42")).await;
    let leaver = request("orders/42");
    let left = join_queue(&b, &leaver, 1).await;
    let stays = join_queue(&b, &request("orders/42"), 2).await;
    assert_eq!(give_back(&b, &leaver.key).await, ReleaseOutcome::Released);
    give_back(&a, &held.key).await;
    let answer = soon("the request that left is answered", left).await.unwrap();
    assert!(!matches!(answer, Ok(AcquireOutcome::Granted(_))), "the one that left was served: {answer:?}");
    let served = granted(stays).await;
    give_back(&b, &served.key).await;
    is_free(&a, "orders/42").await;
}

pub async fn a_dropped_request_can_be_withdrawn<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    // Dropped while it waits.
    let held = take(&a, &request("orders/42")).await;
    let dropped = request("orders/42");
    join_queue(&b, &dropped, 1).await.abort();
    give_back(&b, &dropped.key).await;
    give_back(&a, &held.key).await;
    is_free_after(&a, "orders/42", "a dropped request").await;
    // Dropped after the grant, before the caller saw it.
    let dropped_late = request("orders/42");
    take(&b, &dropped_late).await;
    assert_eq!(give_back(&b, &dropped_late.key).await, ReleaseOutcome::Released);
    take(&a, &request("orders/42")).await;
}

pub async fn a_queued_request_is_not_doubled<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &request("orders/42")).await;
    let once = request("orders/42");
    let first = join_queue(&b, &once, 1).await;
    // The first reply is lost; the same ask comes again.
    first.abort();
    let (b2, patient) = (b.clone(), with(once.clone(), |request| request.wait = Wait::Forever));
    let again = tokio::spawn(async move { b2.acquire(&patient).await });
    let label = |label: &str| Arc::new(lockkeeper_core::Holder::new("host", 1, Some(label.into())).unwrap());
    let (b2, last) = (b.clone(), with(request("orders/42"), |request| request.holder = label("last")));
    let next =
        tokio::spawn(async move { b2.acquire(&with(last, |request| request.wait = Wait::Forever)).await });
    if polls(&a) {
        serve_all(&a, held, vec![again, next]).await;
        return is_free(&a, "orders/42").await;
    }
    eventually("the last one is in the queue", || async {
        let line = a.inspect(&name("orders/42")).await.unwrap().unwrap().queue;
        line.iter().any(|queued| queued.holder == *label("last"))
    })
    .await;
    let view = a.inspect(&name("orders/42")).await.unwrap().unwrap();
    assert_eq!(view.waiting, 2, "the request that was sent again has two queue entries: {view:?}");
    give_back(&a, &held.key).await;
    let served = granted(again).await;
    assert_eq!(served.key, once.key);
    give_back(&b, &served.key).await;
    let served = granted(next).await;
    give_back(&b, &served.key).await;
    is_free(&a, "orders/42").await;
}

pub async fn no_request_overtakes_the_queue<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &request("orders/42")).await;
    let waiter = join_queue(&b, &request("orders/42"), 1).await;
    if polls(&a) {
        // There is no queue to overtake; but no waiter starves.
        give_back(&a, &held.key).await;
        if let Ok(AcquireOutcome::Granted(newcomer)) = a.acquire(&request("orders/42")).await {
            give_back(&a, &newcomer.key).await;
        }
        let served = granted(waiter).await;
        give_back(&b, &served.key).await;
        return is_free(&a, "orders/42").await;
    }
    give_back(&a, &held.key).await;
    // Whether the waiter has come to its turn yet or not: one who just arrives does not.
    refused_with(&a, &request("orders/42"), "a newcomer behind a waiter").await;
    let served = granted(waiter).await;
    give_back(&b, &served.key).await;
    is_free(&a, "orders/42").await;
}

pub async fn a_waiter_is_served_when_the_holder_expires<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let late = take(&a, &with(request("orders/42"), |request| request.ttl = SHORT)).await;
    let waiter = tokio::spawn(async move {
        let patient = with(request("orders/42"), |request| request.wait = Wait::Forever);
        b.acquire(&patient).await
    });
    h.pass(SHORT * 2).await;
    let served = granted(waiter).await;
    assert!(served.fence > late.fence);
}

/// A waiter may wait for longer than its ttl. In the end it gets the lock, and not the news of a grant that ended with the ttl.
pub async fn a_waiter_that_waited_for_longer_than_its_ttl_has_the_lock<H: Harness>(h: H) {
    let ttl = SHORT * 4;
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &request("orders/42")).await;
    let brief = with(request("orders/42"), |request| request.ttl = ttl);
    let waiter = join_queue(&b, &brief, 1).await;
    h.pass(ttl * 5 / 4).await;
    give_back(&a, &held.key).await;
    let served = granted(waiter).await;
    let busy = refused_with(&a, &request("orders/42"), "a lock that was granted after a long wait").await;
    assert_eq!(busy.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [served.fence]);
    assert_eq!(b.renew(&[served]).await.unwrap(), [RenewOutcome::Renewed]);
}

pub async fn a_cycle_of_owners_is_a_deadlock<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let (one, two) = (owner(), owner());
    let of = |text: &str, owner| {
        with(request(text), |request| {
            request.owner = Some(owner);
            request.wait = Wait::Forever;
        })
    };
    if !a.profile().reentry {
        // Without owners there is no cycle of them.
        let answer = a.acquire(&of("x", one)).await;
        assert!(matches!(answer, Err(Error::Unsupported(_))), "undeclared and not refused: {answer:?}");
        return;
    }
    let x = take(&a, &of("x", one)).await;
    let y = take(&b, &of("y", two)).await;
    let first = join_queue(&a, &of("y", one), 1).await;
    if !a.profile().deadlocks {
        // Undeclared: then the wait time ends it, and no waiter is granted by mistake.
        let patient = with(of("x", two), |request| request.wait = Wait::For(SHORT));
        let waiter = join_queue(&b, &patient, 1).await;
        h.pass(SHORT * 2).await;
        assert!(matches!(soon("patience ends", waiter).await.unwrap(), Ok(AcquireOutcome::Busy(_))));
        assert!(!first.is_finished(), "both were served");
        return;
    }
    match soon("a cycle is reported", b.acquire(&of("x", two))).await {
        Err(Error::Deadlock(names)) => {
            assert!(names.contains(&name("x")) && names.contains(&name("y")), "{names:?}")
        }
        other => panic!("a circle was to be told: {other:?}"),
    }
    // The older ask is not hurt: the younger lets go, and the older is served.
    give_back(&b, &y.key).await;
    granted(first).await;
    give_back(&a, &x.key).await;
}

pub async fn an_upgrade_is_a_deadlock<H: Harness>(h: H) {
    let a = h.client().await;
    let me = owner();
    let mine = |mode| {
        with(request("orders/42"), |request| {
            request.owner = Some(me);
            request.mode = mode;
            request.wait = Wait::Forever;
        })
    };
    if !a.profile().reentry {
        let answer = a.acquire(&mine(Mode::Shared)).await;
        assert!(matches!(answer, Err(Error::Unsupported(_))), "undeclared and not refused: {answer:?}");
        return;
    }
    take(&a, &mine(Mode::Shared)).await;
    let answer = soon("an upgrade is answered", a.acquire(&mine(Mode::Exclusive))).await;
    assert!(matches!(answer, Err(Error::Deadlock(_))), "{answer:?}");
}
