//! The `Records` trait, thin. A store without records leaves it as it is, and has no recipes.

use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{
    DeleteOutcome, Error, Expect, LockName, Page, Record, RecordPage, Records, Result, WriteOutcome,
};

use crate::TemplateStore;

impl TemplateStore {
    fn no_records<T>(&self, key: &LockName) -> Result<T> {
        Err(Error::Unsupported(format!("the template store has no records: {}", self.keys.record(key))))
    }
}

#[async_trait]
impl Records for TemplateStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        self.no_records(key)
    }

    /// Fill in: compare and write in one step. Take the version from a counter that outlives the record, such as the fence's: a
    /// record that is created again must not repeat one.
    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        _expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        Record::check(value, ttl)?;
        self.no_records(key)
    }

    async fn delete(&self, key: &LockName, _expect: Expect) -> Result<DeleteOutcome> {
        self.no_records(key)
    }

    async fn scan(&self, _prefix: &str, _page: &Page) -> Result<RecordPage> {
        crate::profile::unsupported("records")
    }
}
