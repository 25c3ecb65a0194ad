//! First come, first served; and whoever leaves, leaves no trace.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use lockkeeper_core::{Acquired, Error, Mode, Release, Wait};

use super::*;

pub async fn waiters_are_served_in_order<H: Harness>(h: H) {
    let clients = [h.client().await, h.client().await, h.client().await];
    let held = take(&clients[0], &ask("orders/42")).await;
    let mut waiters = Vec::new();
    for place in 0..6 {
        waiters.push(stand_in_line(&clients[place % 3], &ask("orders/42"), place + 1).await);
    }
    if polls(&clients[0]) {
        serve_all(&clients[0], held, waiters).await;
        return is_free(&clients[0], "orders/42").await;
    }
    let mut holds = held.claim;
    let mut last = held.fence;
    for waiter in waiters {
        give_back(&clients[0], &holds).await;
        // If somebody else was served, this one is not served before that other lets go, which it never does.
        let served = granted(waiter).await;
        assert!(served.fence > last);
        (holds, last) = (served.claim, served.fence);
    }
    give_back(&clients[0], &holds).await;
    is_free(&clients[0], "orders/42").await;
}

pub async fn one_release_serves_one_waiter<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &ask("orders/42")).await;
    let first = stand_in_line(&b, &ask("orders/42"), 1).await;
    let second = stand_in_line(&b, &ask("orders/42"), 2).await;
    if polls(&a) {
        return serve_all(&a, held, vec![first, second]).await;
    }
    give_back(&a, &held.claim).await;
    let served = granted(first).await;
    let view = a.inspect(&name("orders/42")).await.unwrap().unwrap();
    assert_eq!(view.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [served.fence]);
    assert_eq!(view.waiting, 1, "the second still waits");
    assert!(!second.is_finished(), "two were served");
    give_back(&b, &served.claim).await;
    // Served after the first let go, and not somehow before.
    let next = granted(second).await;
    assert!(next.fence > served.fence, "{next:?} was served beside {served:?}");
    let view = a.inspect(&name("orders/42")).await.unwrap().unwrap();
    assert_eq!(view.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [next.fence]);
}

pub async fn a_waiter_gives_up_on_time<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &ask("orders/42")).await;
    let began = h.clock().now();
    let impatient = with(ask("orders/42"), |ask| ask.wait = Wait::For(SHORT));
    let waiter = stand_in_line(&b, &impatient, 1).await;
    h.pass(SHORT * 2).await;
    match soon("a waiter gives up", waiter).await.unwrap() {
        Ok(Acquired::Busy(busy)) => assert_eq!(busy.held[0].fence, held.fence),
        other => panic!("a waiter was to give up: {other:?}"),
    }
    assert!(h.clock().now().since(began) >= SHORT, "it gave up too early");
    in_line(&a, &name("orders/42"), 0).await;
    // Nobody is served in its place.
    give_back(&a, &held.claim).await;
    is_free(&a, "orders/42").await;
}

pub async fn a_waiter_that_left_is_never_served<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &ask("orders/42")).await;
    let leaver = ask("orders/42");
    let left = stand_in_line(&b, &leaver, 1).await;
    let stays = stand_in_line(&b, &ask("orders/42"), 2).await;
    assert_eq!(give_back(&b, &leaver.claim).await, Release::Released);
    in_line(&a, &name("orders/42"), 1).await;
    give_back(&a, &held.claim).await;
    let served = granted(stays).await;
    let answer = soon("the ask that left is answered", left).await.unwrap();
    assert!(!matches!(answer, Ok(Acquired::Granted(_))), "the one that left was served: {answer:?}");
    give_back(&b, &served.claim).await;
    is_free(&a, "orders/42").await;
}

pub async fn a_dropped_ask_can_be_taken_back<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    // Dropped while it waits.
    let held = take(&a, &ask("orders/42")).await;
    let dropped = ask("orders/42");
    stand_in_line(&b, &dropped, 1).await.abort();
    give_back(&b, &dropped.claim).await;
    give_back(&a, &held.claim).await;
    is_free(&a, "orders/42").await;
    // Dropped after it was granted, before anybody heard of it.
    let unheard = ask("orders/42");
    take(&b, &unheard).await;
    assert_eq!(give_back(&b, &unheard.claim).await, Release::Released);
    take(&a, &ask("orders/42")).await;
}

pub async fn an_ask_in_line_is_not_doubled<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &ask("orders/42")).await;
    let once = ask("orders/42");
    let first = stand_in_line(&b, &once, 1).await;
    // The first reply is lost; the same ask comes again.
    first.abort();
    let (b2, patient) = (b.clone(), with(once.clone(), |ask| ask.wait = Wait::Forever));
    let again = tokio::spawn(async move { b2.acquire(&patient).await });
    let label = |label: &str| Arc::new(lockkeeper_core::Holder::new("host", 1, Some(label.into())).unwrap());
    let (b2, last) = (b.clone(), with(ask("orders/42"), |ask| ask.holder = label("last")));
    let next = tokio::spawn(async move { b2.acquire(&with(last, |ask| ask.wait = Wait::Forever)).await });
    if polls(&a) {
        serve_all(&a, held, vec![again, next]).await;
        return is_free(&a, "orders/42").await;
    }
    eventually("the last one stands in line", || async {
        let line = a.inspect(&name("orders/42")).await.unwrap().unwrap().line;
        line.iter().any(|queued| queued.holder == *label("last"))
    })
    .await;
    let view = a.inspect(&name("orders/42")).await.unwrap().unwrap();
    assert_eq!(view.waiting, 2, "the ask that came again has two places: {view:?}");
    give_back(&a, &held.claim).await;
    let served = granted(again).await;
    assert_eq!(served.claim, once.claim);
    give_back(&b, &served.claim).await;
    let served = granted(next).await;
    give_back(&b, &served.claim).await;
    is_free(&a, "orders/42").await;
}

pub async fn nobody_overtakes_the_line<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &ask("orders/42")).await;
    let waiter = stand_in_line(&b, &ask("orders/42"), 1).await;
    if polls(&a) {
        // There is no line to overtake; but whoever waits is not left behind for good.
        give_back(&a, &held.claim).await;
        if let Ok(Acquired::Granted(newcomer)) = a.acquire(&ask("orders/42")).await {
            give_back(&a, &newcomer.claim).await;
        }
        let served = granted(waiter).await;
        give_back(&b, &served.claim).await;
        return is_free(&a, "orders/42").await;
    }
    give_back(&a, &held.claim).await;
    // Whether the waiter has come to its turn yet or not: one who just arrives does not.
    refused(&a, &ask("orders/42")).await;
    let served = granted(waiter).await;
    give_back(&b, &served.claim).await;
    is_free(&a, "orders/42").await;
}

pub async fn a_waiter_is_served_when_the_holder_expires<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let late = take(&a, &with(ask("orders/42"), |ask| ask.ttl = SHORT)).await;
    let waiter = tokio::spawn(async move {
        let patient = with(ask("orders/42"), |ask| ask.wait = Wait::Forever);
        b.acquire(&patient).await
    });
    h.pass(SHORT * 2).await;
    let served = granted(waiter).await;
    assert!(served.fence > late.fence);
}

pub async fn a_circle_of_owners_is_told_deadlock<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let (one, two) = (owner(), owner());
    let of = |text: &str, owner| {
        with(ask(text), |ask| {
            ask.owner = Some(owner);
            ask.wait = Wait::Forever;
        })
    };
    if !a.profile().reentry {
        // Where nobody is an owner there is no circle of them.
        let answer = a.acquire(&of("x", one)).await;
        assert!(matches!(answer, Err(Error::Unsupported(_))), "undeclared and not refused: {answer:?}");
        return;
    }
    let x = take(&a, &of("x", one)).await;
    let y = take(&b, &of("y", two)).await;
    let first = stand_in_line(&a, &of("y", one), 1).await;
    if !a.profile().deadlocks {
        // Undeclared: then patience ends it, and nobody is served by mistake.
        let patient = with(of("x", two), |ask| ask.wait = Wait::For(SHORT));
        let waiter = stand_in_line(&b, &patient, 1).await;
        h.pass(SHORT * 2).await;
        assert!(matches!(soon("patience ends", waiter).await.unwrap(), Ok(Acquired::Busy(_))));
        assert!(!first.is_finished(), "both were served");
        return;
    }
    match soon("a circle is told", b.acquire(&of("x", two))).await {
        Err(Error::Deadlock(names)) => {
            assert!(names.contains(&name("x")) && names.contains(&name("y")), "{names:?}")
        }
        other => panic!("a circle was to be told: {other:?}"),
    }
    // The older ask is not hurt: the younger lets go, and the older is served.
    give_back(&b, &y.claim).await;
    granted(first).await;
    give_back(&a, &x.claim).await;
}

pub async fn an_upgrade_is_told_deadlock<H: Harness>(h: H) {
    let a = h.client().await;
    let me = owner();
    let mine = |mode| {
        with(ask("orders/42"), |ask| {
            ask.owner = Some(me);
            ask.mode = mode;
            ask.wait = Wait::Forever;
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
