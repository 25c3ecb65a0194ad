//! The trait `Records`.

use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{
    DeleteOutcome, Expect, LockName, Page, Record, RecordPage, Records, Result, WriteOutcome,
};

use crate::store::DynamoStore;

#[async_trait]
impl Records for DynamoStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        self.run(self.inner.records.read(key)).await
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        Record::check(value, ttl)?;
        self.run(self.inner.records.write(key, value, expect, ttl)).await
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        self.run(self.inner.records.delete(key, expect)).await
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        self.run(self.inner.records.scan(prefix, page)).await
    }
}
