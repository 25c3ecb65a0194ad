//! A store whose answers take a random while, and sometimes get lost: before the write, or after it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper::{
    EventStream, Fence, Limits, LockName, LockPage, LockView, Locks, Page, Profile, Records, ReleaseOutcome,
    Result, Store,
};
use lockkeeper_core::limit::{LimitOutcome, LimitRequest};
use lockkeeper_core::{
    AcquireOutcome, DeleteOutcome, Error, Expect, Grant, LockRequest, Record, RecordPage, RenewOutcome,
    RequestKey, WriteOutcome,
};

use super::tools::pause;

/// Numbers that are the same again for the same seed.
#[derive(Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    pub fn below(&mut self, most: u64) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % most
    }
}

pub struct Shaky {
    pub store: Arc<dyn Store>,
    pub dice: Mutex<Dice>,
    /// One of this many writes is of unknown fate.
    pub doubts: u64,
}

impl Shaky {
    fn roll(&self, most: u64) -> u64 {
        self.dice.lock().unwrap().below(most)
    }

    async fn a_while(&self) {
        pause(self.roll(4) as usize).await;
    }
}

#[async_trait]
impl Records for Shaky {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        self.a_while().await;
        let found = self.store.read(key).await;
        self.a_while().await;
        found
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        self.a_while().await;
        let doubt = self.roll(self.doubts);
        let lost = || Error::Unknown("the answer got lost".into());
        if doubt == 0 {
            return Err(lost());
        }
        let written = self.store.write(key, value, expect, ttl).await;
        self.a_while().await;
        if doubt == 1 { Err(lost()) } else { written }
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        self.store.delete(key, expect).await
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        self.store.scan(prefix, page).await
    }
}

#[async_trait]
impl Locks for Shaky {
    fn profile(&self) -> Profile {
        self.store.profile()
    }
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
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

lockkeeper_testkit::forward_examine!(Shaky);

#[async_trait]
impl Limits for Shaky {
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        self.store.limit(request).await
    }
}
