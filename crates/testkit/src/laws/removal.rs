//! Values that were removed, while replies are lost and requests come late.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use std::sync::Mutex;

use async_trait::async_trait;
use lockkeeper::Error;
use lockkeeper::register::{Entry, Swap};
use lockkeeper_core::{
    AcquireOutcome, DeleteOutcome, Expect, Grant, LockName, LockRequest, Page, Record, RecordPage, Records,
    ReleaseOutcome, RenewOutcome, RequestKey, Result, WriteOutcome,
};

use super::lossy::{self, LossyStore};
use super::register::has_records;
use super::*;

/// One request that changes a record.
#[derive(Clone)]
enum NotedChange {
    Write(Vec<u8>, Expect, Option<Duration>),
    Delete,
}

/// A client that notes its changes, and that loses the reply to the next change on request, after `meanwhile` was written.
struct Noting {
    store: Arc<dyn Store>,
    changes: Mutex<Vec<NotedChange>>,
    meanwhile: Mutex<Option<lockkeeper::register::Register<u64>>>,
}

impl Noting {
    /// The reply to a change, if it is not lost.
    async fn reply<T>(&self, change: NotedChange, answer: Result<T>) -> Result<T> {
        self.changes.lock().unwrap().push(change);
        let meanwhile = self.meanwhile.lock().unwrap().take();
        if let Some(register) = meanwhile {
            register.update(|_| 2).await?;
            return Err(Error::Unknown("the reply was lost".into()));
        }
        answer
    }
}

crate::forward_locks!(Noting, {
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.store.acquire(request).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.store.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.store.release(key).await
    }
});

#[async_trait]
impl Records for Noting {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        self.store.read(key).await
    }
    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        let answer = self.store.write(key, value, expect, ttl).await;
        self.reply(NotedChange::Write(value.to_vec(), expect, ttl), answer).await
    }
    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        let answer = self.store.delete(key, expect).await;
        self.reply(NotedChange::Delete, answer).await
    }
    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        self.store.scan(prefix, page).await
    }
}

async fn noting<H: Harness>(h: &H) -> (Arc<Noting>, lockkeeper::register::Register<u64>) {
    let noting = Noting { store: h.client().await, changes: Mutex::default(), meanwhile: Mutex::default() };
    let noting = Arc::new(noting);
    (noting.clone(), Lockkeeper::with_store(noting, h.clock()).register("visits"))
}

pub async fn a_removal_whose_reply_is_lost_spares_what_came_after<H: Harness>(h: H) {
    let other = h.keeper().await;
    if !has_records(&other).await {
        return;
    }
    let (store, register) = noting(&h).await;
    let first = register.update(|_| 1).await.unwrap();
    *store.meanwhile.lock().unwrap() = Some(other.register("visits"));
    let removed = soon("it ends", while_time_passes(&h, register.remove(None))).await;
    let left = other.register::<u64>("visits").read().await.unwrap();
    assert!(
        matches!(left, Some(Entry { value: 2, .. })),
        "a removal deleted a value that was written after it: {left:?}"
    );
    assert_eq!(removed.unwrap(), Swap::Swapped(first.fence), "its own removal was not found");
}

pub async fn a_first_write_that_comes_late_does_not_revive_a_removed_value<H: Harness>(h: H) {
    let other = h.keeper().await;
    if !has_records(&other).await {
        return;
    }
    let (store, register) = noting(&h).await;
    register.update(|_| 1).await.unwrap();
    assert!(matches!(other.register::<u64>("visits").remove(None).await.unwrap(), Swap::Swapped(_)));
    // The first write once more, as the network delivers it when its reply was lost and it was sent twice.
    let late = store.changes.lock().unwrap()[0].clone();
    let NotedChange::Write(value, expect, ttl) = late else { panic!("a value begins with a write") };
    assert_eq!(expect, Expect::Absent);
    let _ = h.client().await.write(&name("visits"), &value, expect, ttl).await.unwrap();
    let found = register.read().await.unwrap();
    assert_eq!(found, None, "a late duplicate revived a removed value");
    assert!(other.registers("", &Page::FIRST).await.unwrap().0.is_empty(), "a removed value is listed");
    // The next one is made as if nothing had been there, with a newer fence.
    assert_eq!(register.update(|old| old.unwrap_or(9)).await.unwrap().value, 9);
}

/// Requests and replies get lost, and requests come late, all chosen by a seed.
pub async fn a_removal_over_a_lossy_network_removes_one_value<H: Harness>(h: H) {
    let calm = h.keeper().await;
    if !has_records(&calm).await {
        return;
    }
    let mut delivered_late = 0;
    for seed in lossy::seeds() {
        let network = LossyStore::new(h.client().await, seed);
        let client = Lockkeeper::with_store(network.clone(), h.clock());
        for round in 0..6 {
            let key = format!("visits/{seed}/{round}");
            let (lossy, register) = (client.register::<u64>(&key), calm.register::<u64>(&key));
            let first = register.update(|_| 1).await.unwrap();
            let removed = soon("it ends", while_time_passes(&h, lossy.remove(Some(first.fence)))).await;
            assert_eq!(removed.unwrap(), Swap::Swapped(first.fence), "its own removal was not found");
            assert_eq!(register.read().await.unwrap(), None, "a removed value is still there");
            let second = register.update(|old| old.unwrap_or(2)).await.unwrap();
            network.deliver().await;
            let left = register.read().await.unwrap().map(|entry| (entry.value, entry.fence));
            assert_eq!(left, Some((2, second.fence)), "a removal that came late deleted a newer value");
        }
        delivered_late += network.delivered_late();
    }
    assert!(delivered_late > 0, "no request came late: the law shows nothing");
}
