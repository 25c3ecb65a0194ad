//! Many waiters for the lock `popular`, each of which releases its grant at once.

use std::sync::Arc;

use lockkeeper_core::{AcquireOutcome, Fence, Store, Wait};
use tokio::task::JoinHandle;

use crate::laws::{give_back, request, with};

/// Adds this many waiters. Each returns its fence.
pub fn join(store: &Arc<dyn Store>, waiters: usize) -> Vec<JoinHandle<Fence>> {
    let wait = |store: Arc<dyn Store>| async move {
        let patient = with(request("popular"), |request| request.wait = Wait::Forever);
        let grant = match store.acquire(&patient).await {
            Ok(AcquireOutcome::Granted(grant)) => grant,
            other => panic!("not granted: {other:?}"),
        };
        give_back(&store, &grant.key).await;
        grant.fence
    };
    (0..waiters).map(|_| tokio::spawn(wait(store.clone()))).collect()
}

/// Waits until all of them have had the lock.
///
/// # Panics
/// If two grants had one fence.
pub async fn all_granted(crowd: Vec<JoinHandle<Fence>>) {
    let (count, mut fences) = (crowd.len(), Vec::new());
    for waiter in crowd {
        fences.push(waiter.await.expect("a waiter ends well"));
    }
    fences.sort_unstable();
    fences.dedup();
    assert_eq!(fences.len(), count, "each grant has a fence of its own");
}
