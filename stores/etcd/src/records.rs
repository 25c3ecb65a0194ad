use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{
    Delete, Error, Expect, LockName, Page, Record, RecordPage, Records, Result, Version, Write,
};

use crate::base::base_stands;
use crate::hold::seconds;
use crate::order::{Answer, Topic};
use crate::proto::{Compare, Kv, RequestOp};
use crate::script::{created, delete, get, put, txn, written};
use crate::store::{EtcdStore, Shared};

/// What a step on a record has come to.
enum Done {
    Yes(Answer),
    /// The expectation was not met.
    No(Option<Record>),
}

impl Shared {
    fn record(&self, kv: Kv) -> Option<Record> {
        let key = self.layout.record_name(&kv.key)?;
        Some(Record { key, value: kv.value, version: self.version(kv.mod_revision) })
    }

    fn version(&self, revision: i64) -> Version {
        Version(self.base().saturating_add(revision.unsigned_abs()))
    }

    /// One transaction: what is wanted, if the expectation is met; and what is there in any case.
    async fn step(&self, key: &LockName, expect: Expect, wish: RequestOp) -> Result<Done> {
        let at = self.layout.record(key);
        loop {
            let (base, floor) = (self.base(), self.floor());
            let mut compare: Vec<Compare> = vec![base_stands(&self.layout, base)];
            match expect {
                Expect::Any => {}
                Expect::Absent => compare.push(created(&at, 0)),
                // A number that no write of this store can have had is met by none.
                Expect::Version(Version(version)) => {
                    let revision = version.checked_sub(base).and_then(|n| i64::try_from(n).ok());
                    compare.push(written(&at, revision.filter(|n| *n > 0).unwrap_or(i64::MAX)));
                }
            }
            let order = txn(compare, vec![get(&at), wish.clone()], vec![get(&self.layout.base()), get(&at)]);
            let answer = self.lane.send(order, vec![Topic::new(&at)]).await?;
            if answer.txn.succeeded {
                return Ok(Done::Yes(answer));
            }
            let revision = answer.revision;
            let mut found = answer.txn.ranges().into_iter().map(|range| range.kvs.into_iter().next());
            self.learn_base(found.next().flatten().as_ref(), revision, floor).await?;
            let there = found.next().flatten().and_then(|kv| self.record(kv));
            if base == self.base() {
                return Ok(Done::No(there));
            }
        }
    }

    /// Written with a ttl: etcd's leases are whole seconds, and two of them at least, so where that is much too long the process looks
    /// after it too. Not elsewhere: what waits for the end of a month would pile up.
    fn forget_later(self: &Arc<Self>, at: Vec<u8>, revision: i64, lease: i64, ttl: Duration) {
        let shared = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(ttl).await;
            let gone = txn(vec![written(&at, revision)], vec![delete(&at)], Vec::new());
            if shared.lane.send(gone, vec![Topic::new(&at)]).await.is_ok() {
                _ = shared.link.revoke_lease(lease).await;
            }
        });
    }

    /// A lease that has nothing to end, or nothing any more: etcd would keep it until its time is over.
    fn let_go(self: &Arc<Self>, lease: i64) {
        if lease != 0 {
            let shared = self.clone();
            tokio::spawn(async move { shared.link.revoke_lease(lease).await });
        }
    }

    async fn write_record(
        self: &Arc<Self>,
        key: &LockName,
        value: Vec<u8>,
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<Write> {
        let (lease, lasts) = match ttl {
            Some(ttl) => self.link.grant_lease(seconds(ttl)).await?,
            None => (0, Duration::ZERO),
        };
        let at = self.layout.record(key);
        let answer = match self.step(key, expect, put(&at, value, lease)).await {
            Ok(Done::Yes(answer)) => answer,
            Ok(Done::No(found)) => {
                self.let_go(lease);
                return Ok(Write::Conflict(found));
            }
            // It may have been written: then the lease is in use.
            Err(error @ (Error::Unknown(_) | Error::Limited(_))) => return Err(error),
            Err(error) => {
                self.let_go(lease);
                return Err(error);
            }
        };
        let version = self.version(answer.revision);
        if let Some(ttl) = ttl.filter(|ttl| lasts > *ttl + *ttl / 8) {
            self.forget_later(at, answer.revision, lease, ttl);
        }
        // The lease of the value before has nothing to end any more.
        self.let_go(answer.txn.one().map_or(0, |kv| kv.lease));
        Ok(Write::Written(version))
    }

    async fn read_record(&self, key: &LockName) -> Result<Option<Record>> {
        let floor = self.floor();
        let look = vec![get(&self.layout.base()), get(&self.layout.record(key))];
        let answer = self.lane.send(txn(Vec::new(), look, Vec::new()), Vec::new()).await?;
        let revision = answer.revision;
        let mut found = answer.txn.ranges().into_iter().map(|range| range.kvs.into_iter().next());
        self.learn_base(found.next().flatten().as_ref(), revision, floor).await?;
        Ok(found.next().flatten().and_then(|kv| self.record(kv)))
    }

    async fn delete_record(self: &Arc<Self>, key: &LockName, expect: Expect) -> Result<Delete> {
        let at = self.layout.record(key);
        match self.step(key, expect, delete(&at)).await? {
            Done::Yes(answer) => Ok(match answer.txn.one() {
                Some(gone) => {
                    self.let_go(gone.lease);
                    Delete::Deleted
                }
                None => Delete::Absent,
            }),
            Done::No(None) => Ok(Delete::Absent),
            Done::No(Some(found)) => Ok(Delete::Conflict(found)),
        }
    }

    async fn scan_records(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        self.refresh_base().await?;
        let found = self.walk(&self.layout.records()).await?;
        let mut records: Vec<Record> = found.into_iter().filter_map(|kv| self.record(kv)).collect();
        records.retain(|record| {
            record.key.as_str().starts_with(prefix)
                && page.after.as_ref().is_none_or(|after| record.key > *after)
        });
        records.sort_by(|a, b| a.key.cmp(&b.key));
        let more = records.len() > page.size();
        records.truncate(page.size());
        let next = if more { records.last().map(|record| record.key.clone()) } else { None };
        Ok(RecordPage { records, next })
    }
}

#[async_trait]
impl Records for EtcdStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        self.run(self.shared.read_record(key)).await
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<Write> {
        Record::check(value, ttl)?;
        self.run(self.shared.write_record(key, value.to_vec(), expect, ttl)).await
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<Delete> {
        self.run(self.shared.delete_record(key, expect)).await
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        self.run(self.shared.scan_records(prefix, page)).await
    }
}
