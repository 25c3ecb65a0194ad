use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{
    Delete, Expect, Fence, LockName, Page, Record, RecordPage, Records, Result, Version, Write,
};
use lockkeeper_host::sleep_until;

use crate::fault::Failure;
use crate::layout::{self, RECORDS};
use crate::parts::Head;
use crate::script::{KEY, Op};
use crate::step::{Backoff, after, jitter};
use crate::store::{DynamoStore, Shared};

/// What a write or a delete comes to.
enum Change<T> {
    Do(Vec<Op>, T),
    No,
}

impl Shared {
    async fn head(&self, key: &LockName) -> Result<Head> {
        let mut backoff = Backoff::new(self);
        loop {
            match self.script.get(&layout::record(key)).await {
                Ok(item) => return Ok(Head::read(item.as_ref())),
                Err(failure) => backoff.pause(self, failure).await?,
            }
        }
    }

    /// The record that begins with this head; `None` if there is none.
    async fn load(&self, key: &LockName, mut head: Head) -> Result<Option<Record>> {
        let mut backoff = Backoff::new(self);
        loop {
            if !head.lives(self.wall.now()) {
                return Ok(None);
            }
            let Some(keys) = head.keys(key) else { return head.record(key, &[]) };
            match self.script.get_all(&keys).await {
                Ok(items) => {
                    let found = Head::read(items.first().and_then(Option::as_ref));
                    if found.rev == head.rev {
                        return found.record(key, &items[1..]);
                    }
                    // Written anew meanwhile.
                    head = found;
                }
                Err(Failure::Conflict(_)) => self.breathe().await,
                Err(failure) => backoff.pause(self, failure).await?,
            }
        }
    }

    async fn breathe(&self) {
        let clock = &*self.options.clock;
        sleep_until(clock, clock.now() + jitter(Duration::from_millis(10))).await;
    }

    /// Changes a record over what was read, again and again until nobody was faster. `Err`: what is there does not allow it.
    async fn change<T>(
        &self,
        key: &LockName,
        decide: impl Fn(&Head) -> Result<Change<T>>,
    ) -> Result<Result<T, Head>> {
        let mut backoff = Backoff::new(self);
        let mut known = None;
        loop {
            let head = match known.take() {
                Some(head) => head,
                None => self.head(key).await?,
            };
            let (ops, answer) = match decide(&head)? {
                Change::Do(ops, answer) => (ops, answer),
                Change::No => return Ok(Err(head)),
            };
            match self.script.write(ops).await {
                Ok(()) => return Ok(Ok(answer)),
                Err(Failure::Conflict(found)) => {
                    known = found.map(|item| Head::read(item.as_ref()));
                    self.breathe().await;
                }
                Err(failure) => backoff.pause(self, failure).await?,
            }
        }
    }

    /// The version after this head's: also one that was deleted is not repeated.
    fn next_version(&self, head: &Head) -> Result<u64> {
        let last = head.rev.map(Fence::new).transpose()?;
        Ok(Fence::after(last, self.wall.now())?.get())
    }

    async fn write_record(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<Write> {
        let decide = |head: &Head| {
            let wall = self.wall.now();
            if !expect.met_by(head.version(wall)) {
                return Ok(Change::No);
            }
            let version = self.next_version(head)?;
            let ops = head.put(key, version, value, ttl.map(|ttl| after(wall, ttl)));
            Ok(Change::Do(ops, Version(version)))
        };
        match self.change(key, decide).await? {
            Ok(version) => Ok(Write::Written(version)),
            Err(head) => Ok(Write::Conflict(self.load(key, head).await?)),
        }
    }

    async fn delete_record(&self, key: &LockName, expect: Expect) -> Result<Delete> {
        loop {
            let decide = |head: &Head| match head.version(self.wall.now()) {
                Some(version) if expect.met_by(Some(version)) => {
                    Ok(Change::Do(head.clear(key, self.next_version(head)?), ()))
                }
                _ => Ok(Change::No),
            };
            let Err(head) = self.change(key, decide).await? else { return Ok(Delete::Deleted) };
            match self.load(key, head).await? {
                None => return Ok(Delete::Absent),
                Some(record) if expect.met_by(Some(record.version)) => {}
                Some(record) => return Ok(Delete::Conflict(record)),
            }
        }
    }

    async fn scan_records(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        let mut records: Vec<Record> = Vec::new();
        for key in self.walk(RECORDS, prefix, &page.after, &[KEY]).await?.into_keys() {
            let head = self.head(&key).await?;
            let Some(record) = self.load(&key, head).await? else { continue };
            if records.len() == page.size() {
                let next = records.last().map(|last| last.key.clone());
                return Ok(RecordPage { records, next });
            }
            records.push(record);
        }
        Ok(RecordPage { records, next: None })
    }
}

#[async_trait]
impl Records for DynamoStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        self.run(async {
            let head = self.shared.head(key).await?;
            self.shared.load(key, head).await
        })
        .await
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<Write> {
        Record::check(value, ttl)?;
        self.run(self.shared.write_record(key, value, expect, ttl)).await
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<Delete> {
        self.run(self.shared.delete_record(key, expect)).await
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        self.run(self.shared.scan_records(prefix, page)).await
    }
}
