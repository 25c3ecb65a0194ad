//! Many requests for one lock at once.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use futures_util::future::join_all;
use lockkeeper_core::{Acquired, Mode, Profile, Renewal, Wait};

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
    let mine = || with(ask("orders/42"), |ask| ask.owner = Some(me));
    if !has(&a, |profile| profile.reentry, mine()).await {
        return;
    }
    let first = take(&a, &mine()).await;
    let count = many(&a, 100, 5);
    let patient = || with(ask("orders/42"), |ask| ask.wait = Wait::Forever);
    let mut waiters: Vec<_> = (0..count)
        .map(|_| {
            let (b, ask) = (b.clone(), patient());
            tokio::spawn(async move { b.acquire(&ask).await })
        })
        .collect();
    in_line(&a, &name("orders/42"), count).await;
    let again = take(&a, &mine()).await;
    assert_eq!(again.fence, first.fence, "a re-entry keeps the fence");
    give_back(&a, &first.claim).await;
    let view = b.inspect(&name("orders/42")).await.unwrap().expect("it is held");
    let waiting = if polls(&b) { 0 } else { count };
    assert_eq!((view.held.len(), view.waiting), (1, waiting), "a waiter is shown as a holder: {view:?}");
    // Long enough for a waiter to be let in, if a store does that.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!waiters.iter().any(|waiter| waiter.is_finished()), "a waiter was let in beside the second hold");
    assert_eq!(a.renew(std::slice::from_ref(&again)).await.unwrap(), [Renewal::Renewed]);
    give_back(&a, &again.claim).await;
    eventually("a waiter is let in", || async { waiters.iter().any(|waiter| waiter.is_finished()) }).await;
    let served = waiters.iter().position(|waiter| waiter.is_finished()).expect("a waiter was let in");
    assert!(granted(waiters.swap_remove(served)).await.fence > first.fence);
    waiters.iter().for_each(|waiter| waiter.abort());
}

/// How long each request waits: less than the poll of any store with a queue.
const WAIT: Duration = Duration::from_secs(8);
/// How long all of them may take. A request that missed the grant of the one in front looks again when its wait is over, and not before.
const ALL: Duration = Duration::from_secs(6);

/// Whether a store declares a mode.
type Declared = fn(&Profile) -> bool;

/// Requests that nobody excludes are all granted, though they come at once: none of them waits for a poll, or for the end of its wait.
pub async fn requests_that_nobody_excludes_are_all_let_in<H: Harness>(h: H) {
    let clients = [h.client().await, h.client().await, h.client().await];
    let count = many(&clients[0], 30, 6);
    let permits = Mode::Permit(count as u32);
    let modes: [(&str, Mode, Declared); 2] = [
        ("readers", Mode::Shared, |profile| profile.shared),
        ("permits", permits, |profile| profile.permits),
    ];
    for (text, mode, declared) in modes {
        let patient = || {
            with(ask(text), |ask| {
                ask.mode = mode;
                ask.wait = Wait::For(WAIT);
            })
        };
        if !has(&clients[0], declared, patient()).await {
            continue;
        }
        let began = h.clock().now();
        let asks: Vec<_> = (0..count).map(|_| patient()).collect();
        let asked = asks.iter().enumerate().map(|(i, ask)| clients[i % 3].acquire(ask));
        for answer in soon("all are answered", join_all(asked)).await {
            assert!(
                matches!(answer, Ok(Acquired::Granted(_))),
                "nobody excludes it, and it is told: {answer:?}"
            );
        }
        let took = h.clock().now().since(began);
        assert!(took < ALL || polls(&clients[0]), "nobody excludes {count} {text}, and they took {took:?}");
    }
}
