//! One client opens a store, acquires a free lock, waits for a held one, and releases both. With any fault on its connection the result
//! must be the same.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper::Lockkeeper;
use lockkeeper_core::{Error, ReleaseOutcome, Result, Store};
use lockkeeper_host::SystemClock;

use crate::laws::{give_back, is_free, name, queue_reaches, request, soon, take};

const TTL: Duration = Duration::from_secs(20);

/// The steps of that client. `open` opens the store through the connection with the fault; `other` is a client without faults.
///
/// # Panics
/// If the result differs from that without a fault.
pub async fn open_acquire_wait_release(
    open: impl AsyncFn() -> Result<Arc<dyn Store>>,
    other: &Arc<dyn Store>,
) {
    // A failed open leaves nothing, and is retried.
    let store = loop {
        match open().await {
            Ok(store) => break store,
            Err(Error::Unavailable(_) | Error::Unknown(_)) => {}
            Err(error) => panic!("{error}"),
        }
    };
    let keeper = Lockkeeper::with_store(store, Arc::new(SystemClock));
    // A free lock is granted once, with or without a reply.
    let guard = loop {
        match soon("a free lock is granted", keeper.lock("x").ttl(TTL).acquire()).await {
            Ok(guard) => break guard,
            Err(Error::Unavailable(_)) => {}
            Err(error) => panic!("{error}"),
        }
    };
    let seen = other.inspect(&name("x")).await.expect("an answer").expect("it is held");
    assert_eq!(seen.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [guard.fence()]);
    // A held lock is handed to the waiter once.
    let held = take(other, &request("y")).await;
    let keeper2 = keeper.clone();
    let waiter = tokio::spawn(async move {
        loop {
            match keeper2.lock("y").ttl(TTL).acquire().await {
                Err(Error::Unavailable(_)) => {}
                other => break other,
            }
        }
    });
    queue_reaches(other, &name("y"), 1).await;
    give_back(other, &held.key).await;
    let next = soon("the waiter is granted the lock", waiter).await.expect("the waiter ends well");
    let next = next.unwrap_or_else(|error| panic!("the waiter failed: {error}"));
    assert!(next.fence() > held.fence);
    // A release with an unknown outcome has happened in the end.
    match soon("a release ends", guard.release()).await {
        Ok(ReleaseOutcome::Released | ReleaseOutcome::AlreadyGone)
        | Err(Error::Unknown(_) | Error::Unavailable(_)) => {}
        Err(error) => panic!("{error}"),
    }
    drop(next);
    soon("the remaining holds are released", keeper.settle()).await;
    is_free(other, "x").await;
    is_free(other, "y").await;
}
