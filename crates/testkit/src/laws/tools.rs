//! What the laws are written with.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lockkeeper_core::{
    Acquired, Ask, Attempt, Busy, Claim, Grant, Holder, LockName, Names, Owner, Result, Store, Wait, Waiting,
};
use lockkeeper_host::{host_name, random_128};
use tokio::task::JoinHandle;

/// A ttl that ends within a law.
pub const SHORT: Duration = Duration::from_secs(1);
/// A ttl that does not end within a law, however slow the machine is.
pub const LONG: Duration = Duration::from_secs(600);

/// How long something that must happen may take before a law says that it did not: generous, because a busy machine is
/// not a broken law; shorter where a planted bug is expected to make it not happen.
static PATIENCE_MS: AtomicU64 = AtomicU64::new(30_000);

/// Sets how long laws wait for something that must happen.
pub fn set_patience(patience: Duration) {
    PATIENCE_MS.store(patience.as_millis() as u64, Ordering::Relaxed);
}

fn patience() -> Duration {
    Duration::from_millis(PATIENCE_MS.load(Ordering::Relaxed))
}

/// Waits for something that must happen.
pub async fn soon<F: Future>(what: &str, work: F) -> F::Output {
    match tokio::time::timeout(patience(), work).await {
        Ok(done) => done,
        Err(_) => panic!("it did not happen: {what}"),
    }
}

/// Waits until `check` is true.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut check: impl FnMut() -> F) {
    let until_true = async {
        while !check().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(what, until_true).await;
}

/// A name that is fine.
pub fn name(text: &str) -> LockName {
    LockName::new(text).expect("a good name")
}

/// A new owner.
pub fn owner() -> Owner {
    Owner::from_bytes(random_128())
}

/// An exclusive ask for one name with a new attempt, a long ttl and no patience.
pub fn ask(text: &str) -> Ask {
    ask_all(&[text])
}

/// The same for several names.
pub fn ask_all(texts: &[&str]) -> Ask {
    let names = Names::new(texts.iter().map(|text| name(text))).expect("good names");
    let holder = Holder::new(host_name(), std::process::id(), Some("a law".into())).expect("a good holder");
    Ask::new(Attempt::from_bytes(random_128()), names, LONG, Arc::new(holder))
}

/// Changes an ask on the way.
pub fn with(mut ask: Ask, change: impl FnOnce(&mut Ask)) -> Ask {
    change(&mut ask);
    ask
}

/// Asks; it must be granted.
pub async fn take(store: &Arc<dyn Store>, ask: &Ask) -> Grant {
    match soon("a free lock is granted", store.acquire(ask)).await {
        Ok(Acquired::Granted(grant)) => {
            assert_eq!(grant.claim, ask.claim, "another grant than the one asked for");
            grant
        }
        other => panic!("{:?} was to be granted: {other:?}", ask.claim.names),
    }
}

/// Asks without patience; it must be busy.
pub async fn refused(store: &Arc<dyn Store>, ask: &Ask) -> Busy {
    let ask = with(ask.clone(), |ask| ask.wait = Wait::No);
    match soon("an ask without patience is answered", store.acquire(&ask)).await {
        Ok(Acquired::Busy(busy)) => busy,
        other => panic!("{:?} was to be busy: {other:?}", ask.claim.names),
    }
}

/// Gives back.
pub async fn give_back(store: &Arc<dyn Store>, claim: &Claim) -> lockkeeper_core::Release {
    soon("a release is answered", store.release(claim)).await.expect("a release works")
}

/// Asks in the background, with patience for ever, and returns when it stands in line as number `place` for its first
/// name.
pub async fn stand_in_line(store: &Arc<dyn Store>, ask: &Ask, place: usize) -> JoinHandle<Result<Acquired>> {
    let ask = with(ask.clone(), |ask| {
        if ask.wait == Wait::No {
            ask.wait = Wait::Forever;
        }
    });
    let (store2, first) = (store.clone(), ask.claim.names.first().clone());
    let waiter = tokio::spawn(async move { store2.acquire(&ask).await });
    in_line(store, &first, place).await;
    waiter
}

/// Waits until exactly `count` stand in line. Where nobody stands in line, it gives them the time to begin.
pub async fn in_line(store: &Arc<dyn Store>, name: &LockName, count: usize) {
    if polls(store) {
        return tokio::time::sleep(Duration::from_millis(100)).await;
    }
    eventually(&format!("{count} stand in line for {name}"), || async {
        let view = store.inspect(name).await.expect("inspect works");
        view.map_or(0, |view| view.waiting) == count
    })
    .await;
}

/// Whether there is no line: everybody tries again and again, and is served in any order.
pub fn polls(store: &Arc<dyn Store>) -> bool {
    store.profile().waiting == Waiting::Poll
}

/// Gives back `held`, and whatever is granted to those who wait until all were served: in any order, never two at once.
pub async fn serve_all(store: &Arc<dyn Store>, held: Grant, mut waiters: Vec<JoinHandle<Result<Acquired>>>) {
    let (mut holds, mut last) = (held.claim, held.fence);
    while !waiters.is_empty() {
        give_back(store, &holds).await;
        eventually("somebody is served", || async { waiters.iter().any(JoinHandle::is_finished) }).await;
        let first = waiters.iter().position(JoinHandle::is_finished).expect("somebody was served");
        let served = granted(waiters.swap_remove(first)).await;
        assert!(served.fence > last, "{served:?} is not newer than {last}");
        // Long enough for a second one to be let in, if somebody does.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiters.iter().any(JoinHandle::is_finished), "two were served");
        (holds, last) = (served.claim, served.fence);
    }
    give_back(store, &holds).await;
}

/// What a waiter in the background was granted.
pub async fn granted(waiter: JoinHandle<Result<Acquired>>) -> Grant {
    match soon("a waiter is served", waiter).await.expect("the waiter ends well") {
        Ok(Acquired::Granted(grant)) => grant,
        other => panic!("a waiter was to be served: {other:?}"),
    }
}

/// Nobody holds it, waits for it or is kept from it.
pub async fn is_free(store: &Arc<dyn Store>, text: &str) {
    let name = name(text);
    eventually(&format!("{text} is free"), || async {
        store.inspect(&name).await.expect("inspect works").is_none()
    })
    .await;
}

/// Does `work` while time passes: on a virtual clock nobody else would turn it.
pub async fn while_time_passes<H: super::Harness, F: Future>(h: &H, work: F) -> F::Output {
    let passing = async {
        loop {
            h.pass(Duration::from_millis(20)).await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        done = work => done,
        () = passing => unreachable!("time never ends"),
    }
}
