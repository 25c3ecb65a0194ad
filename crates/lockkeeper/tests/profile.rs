//! Requests are judged by the profile that the store declares now, not by that of the moment at which the store was opened.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper::{Error, Lockkeeper, ReleaseOutcome, Result, Store, SystemClock};
use lockkeeper_core::{
    AcquireOutcome, EventStream, Expect, Fence, Grant, Guarantee, LockName, LockPage, LockRequest, LockView,
    Locks, Page, Profile, RenewOutcome, RequestKey, WriteOutcome,
};
use lockkeeper_memory::MemoryStore;

/// The memory store in the role of a server whose settings an operator changes.
struct ChangingStore {
    store: Arc<dyn Store>,
    forgets_grants: AtomicBool,
    /// The names of the lock requests that arrived.
    requests: Mutex<Vec<String>>,
}

#[async_trait]
impl Locks for ChangingStore {
    fn profile(&self) -> Profile {
        let kept = if self.forgets_grants.load(SeqCst) { Guarantee::Likely } else { Guarantee::Kept };
        Profile { fence: kept, durable: kept, ..self.store.profile() }
    }
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.requests.lock().unwrap().push(request.key.names.to_string());
        self.store.acquire(request).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.store.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.store.release(key).await
    }
    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        self.store.inspect(name).await
    }
    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.store.list(prefix, page).await
    }
    async fn watch(&self, prefix: &str) -> Result<EventStream> {
        self.store.watch(prefix).await
    }
    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        self.store.revoke(name, reason).await
    }
    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        self.store.break_lock(name, reason).await
    }
}

lockkeeper_testkit::forward_records!(ChangingStore, {
    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        self.store.write(key, value, expect, ttl).await
    }
});

lockkeeper_testkit::forward_examine!(ChangingStore);

#[async_trait]
impl lockkeeper_core::Limits for ChangingStore {
    async fn limit(
        &self,
        request: &lockkeeper_core::limit::LimitRequest,
    ) -> Result<lockkeeper_core::limit::LimitOutcome> {
        self.store.limit(request).await
    }
}

/// The keeper used to judge every request by the profile of the moment at which it was made: a service that had run for months
/// got locks for correctness from a server that had lost its guarantees since.
#[tokio::test]
async fn one_keeper_follows_the_profile_of_its_store() {
    let clock = Arc::new(SystemClock);
    let store = Arc::new(ChangingStore {
        store: Arc::new(MemoryStore::new(clock.clone())),
        forgets_grants: AtomicBool::new(false),
        requests: Mutex::default(),
    });
    let keeper = Lockkeeper::with_store(store.clone(), clock);
    let group = keeper.claim("c").unwrap().for_correctness();
    let mut source = group.from(["1", "2"]).unwrap();
    let all = |key: &'static str| {
        let (keeper, group) = (keeper.clone(), group.clone());
        async move {
            let work = |_| async { Ok::<_, String>(1) };
            [
                ("a lock", keeper.lock(key).for_correctness().try_acquire().await.map(drop)),
                ("an election", keeper.election(key).for_correctness().campaign("me").await.map(drop)),
                ("once", keeper.once(key).for_correctness().run(work).await.map(drop)),
                ("a claim", group.from(["1"]).map(drop)),
                ("partitions", keeper.partitions(key, 2).for_correctness().join().await.map(drop)),
            ]
        }
    };
    for (what, answer) in all("before").await {
        answer.unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    source.take(1).await.expect("an item is claimed");
    store.forgets_grants.store(true, SeqCst);
    assert_eq!(keeper.profile().durable, Guarantee::Likely);
    for (what, answer) in all("after").await {
        assert!(matches!(answer, Err(Error::Unsupported(_))), "{what}: {answer:?}");
    }
    let answer = source.try_take(1).await;
    assert!(matches!(answer, Err(Error::Unsupported(_))), "an item of a list from before: {answer:?}");
    let requests = store.requests.lock().unwrap().clone();
    assert!(
        !requests.iter().any(|name| name.contains("after")),
        "a refused request reached the store: {requests:?}"
    );
    keeper.lock("after").try_acquire().await.expect("a lock for efficiency is granted as before");
    store.forgets_grants.store(false, SeqCst);
    keeper
        .lock("after all")
        .for_correctness()
        .try_acquire()
        .await
        .expect("the server keeps its grants again");
}
