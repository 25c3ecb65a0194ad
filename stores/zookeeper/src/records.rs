//! The trait of the records.

use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{
    DeleteOutcome, Expect, LockName, Page, Record, RecordPage, Records, Result, WriteOutcome,
};

use crate::store::ZooKeeperStore;

#[async_trait]
impl Records for ZooKeeperStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        self.run(self.shared.records.read(key)).await
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        Record::check(value, ttl)?;
        self.run(self.shared.records.write(key, value, expect, ttl)).await
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        self.run(self.shared.records.delete(key, expect)).await
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        self.run(self.shared.records.scan(prefix, page)).await
    }
}
