//! The records as items: reads, and writes by compare-and-swap.

use std::time::Duration;

use lockkeeper_core::{
    DeleteOutcome, Expect, Fence, LockName, Page, Record, RecordPage, Result, Version, WallTime, WriteOutcome,
};
use lockkeeper_host::sleep_until;

use crate::attributes::KEY;
use crate::backoff::{ThrottleBackoff, jitter, retry_throttled};
use crate::cas::after;
use crate::config::Options;
use crate::error::Failure;
use crate::inspect::scan_items;
use crate::keys::{self, RECORDS};
use crate::record_chunks::RecordItem;
use crate::server_clock::DynamoClock;
use crate::statements::{TableClient, TableWrite};

/// The items of the records.
pub struct RecordStore {
    options: Options,
    client: TableClient,
    clock: DynamoClock,
}

/// The decision on a write or a delete.
enum RecordChange<T> {
    Write(Vec<TableWrite>, T),
    /// The record does not have the expected version.
    Refused,
}

impl RecordStore {
    pub fn new(options: Options, client: TableClient, clock: DynamoClock) -> Self {
        RecordStore { options, client, clock }
    }

    /// The clock of DynamoDB, as its replies show it.
    pub fn wall(&self) -> WallTime {
        self.clock.now()
    }

    async fn first_item(&self, key: &LockName) -> Result<RecordItem> {
        let record = keys::record(key);
        let item = retry_throttled(&self.options, || self.client.get(&record)).await?;
        RecordItem::decode(item.as_ref())
    }

    pub async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        let first = self.first_item(key).await?;
        self.load(key, first).await
    }

    /// Loads the record that begins with this item; `None` if it does not exist.
    async fn load(&self, key: &LockName, mut first: RecordItem) -> Result<Option<Record>> {
        let mut backoff = ThrottleBackoff::new(&self.options);
        loop {
            if !first.exists(self.clock.now()) {
                return Ok(None);
            }
            let Some(keys) = first.all_keys(key) else { return first.into_record(key, &[]) };
            match self.client.get_all(&keys).await {
                Ok(items) => {
                    let found = RecordItem::decode(items.first().and_then(Option::as_ref))?;
                    if found.revision == first.revision {
                        return found.into_record(key, &items[1..]);
                    }
                    // A writer replaced the record meanwhile.
                    first = found;
                }
                Err(Failure::Conflict(_)) => self.pause_after_conflict().await,
                Err(failure) => backoff.pause(failure).await?,
            }
        }
    }

    async fn pause_after_conflict(&self) {
        let clock = &*self.options.clock;
        sleep_until(clock, clock.now() + jitter(Duration::from_millis(10))).await;
    }

    /// Changes a record by compare-and-swap, and repeats after every conflict. `Err`: the record does not have the expected version.
    async fn change<T>(
        &self,
        key: &LockName,
        decide: impl Fn(&RecordItem) -> Result<RecordChange<T>>,
    ) -> Result<Result<T, RecordItem>> {
        let mut backoff = ThrottleBackoff::new(&self.options);
        let mut known = None;
        loop {
            let first = match known.take() {
                Some(first) => first,
                None => self.first_item(key).await?,
            };
            let (writes, answer) = match decide(&first)? {
                RecordChange::Write(writes, answer) => (writes, answer),
                RecordChange::Refused => return Ok(Err(first)),
            };
            match self.client.write(writes).await {
                Ok(()) => return Ok(Ok(answer)),
                Err(Failure::Conflict(found)) => {
                    known = found.map(|item| RecordItem::decode(item.as_ref())).transpose()?;
                    self.pause_after_conflict().await;
                }
                Err(failure) => backoff.pause(failure).await?,
            }
        }
    }

    /// The next version. The version of a deleted record is not used again either.
    fn next_version(&self, first: &RecordItem) -> Result<u64> {
        let last = first.revision.map(Fence::new).transpose()?;
        Ok(Fence::after(last, self.clock.now())?.get())
    }

    pub async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        let decide = |first: &RecordItem| {
            let wall = self.clock.now();
            if !expect.met_by(first.version(wall)) {
                return Ok(RecordChange::Refused);
            }
            let version = self.next_version(first)?;
            let writes = first.put(key, version, value, ttl.map(|ttl| after(wall, ttl)));
            Ok(RecordChange::Write(writes, Version(version)))
        };
        match self.change(key, decide).await? {
            Ok(version) => Ok(WriteOutcome::Written(version)),
            Err(first) => Ok(WriteOutcome::Conflict(self.load(key, first).await?)),
        }
    }

    pub async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        loop {
            let decide = |first: &RecordItem| match first.version(self.clock.now()) {
                Some(version) if expect.met_by(Some(version)) => {
                    Ok(RecordChange::Write(first.delete(key, self.next_version(first)?), ()))
                }
                _ => Ok(RecordChange::Refused),
            };
            let Err(first) = self.change(key, decide).await? else { return Ok(DeleteOutcome::Deleted) };
            match self.load(key, first).await? {
                None => return Ok(DeleteOutcome::Absent),
                Some(record) if expect.met_by(Some(record.version)) => {}
                Some(record) => return Ok(DeleteOutcome::Conflict(record)),
            }
        }
    }

    pub async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        let mut records: Vec<Record> = Vec::new();
        let items = scan_items(&self.client, &self.options, RECORDS, prefix, &page.after, &[KEY]).await?;
        for key in items.into_keys() {
            let Some(record) = self.read(&key).await? else { continue };
            if records.len() == page.size() {
                let next = records.last().map(|last| last.key.clone());
                return Ok(RecordPage { records, next });
            }
            records.push(record);
        }
        Ok(RecordPage { records, next: None })
    }
}
