//! Records are not for a store that can forget: a value that a majority has is not one that is kept.

use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{
    DeleteOutcome, Expect, LockName, Page, Record, RecordPage, Records, Result, WriteOutcome,
};

use crate::acquire::unsupported;
use crate::store::RedlockStore;

#[async_trait]
impl Records for RedlockStore {
    async fn read(&self, _key: &LockName) -> Result<Option<Record>> {
        Err(unsupported("records"))
    }

    async fn write(&self, _: &LockName, _: &[u8], _: Expect, _: Option<Duration>) -> Result<WriteOutcome> {
        Err(unsupported("records"))
    }

    async fn delete(&self, _key: &LockName, _expect: Expect) -> Result<DeleteOutcome> {
        Err(unsupported("records"))
    }

    async fn scan(&self, _prefix: &str, _page: &Page) -> Result<RecordPage> {
        Err(unsupported("records"))
    }
}
