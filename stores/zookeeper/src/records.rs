use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use lockkeeper_core::{Delete, Expect, LockName, Page, Record, RecordPage, Records, Result, Version, Write};
use zookeeper_client as zk;

use crate::base::Base;
use crate::entry::millis;
use crate::fault::Failure;
use crate::layout;
use crate::link::{Done, Session};
use crate::parts::Head;
use crate::script::{ANY, Op, check, create, delete, set};
use crate::store::{Shared, ZooKeeperStore};

/// How many records are read together.
const TOGETHER: usize = 64;
/// A record is taken away when it is surely over.
const LATER: Duration = Duration::from_millis(5);
/// How long until a value is looked for again whose parts were not there.
const PAUSE: Duration = Duration::from_millis(100);

/// A record as it was found.
struct Found {
    record: Record,
    head: Head,
    /// Which write of its node it is.
    node: i32,
    /// Its time is over.
    over: bool,
}

/// What is there, and which write of the node above it that is: that one is written whenever a record is deleted, so that
/// one that was made again is not taken for the one that was read.
pub struct Seen {
    base: Base,
    above: i32,
    found: Option<Found>,
}

impl Seen {
    /// Whether this write of it is over.
    pub fn is_over(&self, node: i32) -> bool {
        self.found.as_ref().is_some_and(|found| found.over && found.node == node)
    }

    /// What others may see of it.
    fn alive(&self) -> Option<&Found> {
        self.found.as_ref().filter(|found| !found.over)
    }
}

impl Shared {
    /// What is there now. The server that we talk to may be behind the others, so that it is made to catch up first.
    pub async fn see(&self, session: &Session, key: &LockName) -> Result<Seen, Failure> {
        let (caught_up, seen) = tokio::join!(session.catch_up(), self.see_here(session, key));
        caught_up?;
        seen
    }

    /// What that server knows of it.
    async fn see_here(&self, session: &Session, key: &LockName) -> Result<Seen, Failure> {
        loop {
            let (path, base, above) = (self.layout.record(key), self.base(), self.layout.records());
            let stands = self.layout.base(base.number);
            // In this order: what was deleted between the two is then told by the first.
            let (above, base_is, read) =
                tokio::join!(session.get(&above), session.get(&stands), session.get(&path));
            if Failure::gone(base_is)?.is_none() {
                self.learn_base(session, false).await?;
                continue;
            }
            let Some((_, above)) = Failure::gone(above)? else {
                session.make_all(&self.layout.records(), self.link.acls()).await?;
                continue;
            };
            let Some((data, stat)) = Failure::gone(read)? else {
                return Ok(Seen { base, above: above.version, found: None });
            };
            let (head, here) = Head::split(&data).unwrap_or((Head::default(), &data));
            let over = match head.ttl_ms {
                Some(ttl) => {
                    stat.mtime.unsigned_abs().saturating_add(ttl) <= self.ensemble_time(session).await?
                }
                None => false,
            };
            let Some(value) = self.read_parts(session, &head, here).await? else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            let version = Version(base.number.saturating_add(stat.mzxid.unsigned_abs()));
            let record = Record { key: key.clone(), value, version };
            let found = Found { record, head, node: stat.version, over };
            return Ok(Seen { base, above: above.version, found: Some(found) });
        }
    }

    /// What must be as it was seen for a step to happen.
    fn unchanged(&self, seen: &Seen) -> Vec<Op> {
        vec![self.base_stands(seen.base), check(self.layout.records(), seen.above)]
    }

    /// `None`: something changed meanwhile.
    async fn step(self: &Arc<Self>, session: &Session, ops: &[Op]) -> Result<Option<Done>, Failure> {
        match self.write(session, ops).await {
            Ok(done) => Ok(Some(done)),
            Err(Failure::Refused(0, zk::Error::NoNode | zk::Error::BadVersion)) => {
                self.learn_base(session, false).await?;
                Ok(None)
            }
            Err(Failure::Refused(_, zk::Error::NoNode | zk::Error::BadVersion | zk::Error::NodeExists)) => {
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }

    async fn write_record(
        self: &Arc<Self>,
        key: &LockName,
        value: &[u8],
        mut expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<Write> {
        let session = self.link.session().await?;
        let mut written: Option<(Vec<u8>, Head)> = None;
        let answer = loop {
            let seen = self.see(&session, key).await?;
            let alive = seen.alive().map(|found| found.record.clone());
            if !expect.met_by(alive.as_ref().map(|record| record.version)) {
                break Write::Conflict(alive);
            }
            let (data, _) = match &written {
                Some(written) => written.clone(),
                None => written.insert(self.write_parts(&session, value, ttl.map(millis)).await?).clone(),
            };
            let path = self.layout.record(key);
            let mut ops = self.unchanged(&seen);
            // Only what is set tells its number.
            ops.extend(seen.found.is_none().then(|| create(&path, Vec::new())));
            ops.push(set(&path, data, seen.found.as_ref().map_or(0, |found| found.node)));
            let floor = self.floor();
            let Some(done) = self.step(&session, &ops).await? else { continue };
            let Some(stat) = done.stat() else { continue };
            let version = seen.base.number.saturating_add(stat.mzxid.unsigned_abs());
            if version <= floor {
                // The ensemble was put back to an older state: it is written again, over itself, with a higher number. What it
                // is made of now is there until then.
                self.learn_base(&session, true).await?;
                let number = self.base().number.saturating_add(stat.mzxid.unsigned_abs());
                (expect, written) = (Expect::Version(Version(number)), None);
                continue;
            }
            let old = seen.found.map_or(Vec::new(), |found| found.head.parts);
            self.delete_parts_later(&session, old);
            match ttl {
                Some(ttl) => self.fading.add(key, self.clock.now() + ttl + LATER, stat.version),
                None => self.fading.forget(key),
            }
            return Ok(Write::Written(Version(version)));
        };
        if let Some((_, head)) = written {
            self.delete_parts_later(&session, head.parts);
        }
        Ok(answer)
    }

    /// False: something changed meanwhile.
    pub async fn remove(
        self: &Arc<Self>,
        session: &Arc<Session>,
        key: &LockName,
        seen: &Seen,
    ) -> Result<bool, Failure> {
        let Some(found) = &seen.found else { return Ok(true) };
        let mut ops = self.unchanged(seen);
        ops.push(set(self.layout.records(), Vec::new(), ANY));
        ops.push(delete(self.layout.record(key), found.node));
        let done = self.step(session, &ops).await?.is_some();
        if done {
            self.fading.forget(key);
            self.delete_parts_later(session, found.head.parts.clone());
        }
        Ok(done)
    }

    /// One that is over, and whose writer may be gone, is taken away by whoever meets it.
    fn meet(&self, key: &LockName, seen: &Seen) {
        if let Some(found) = seen.found.as_ref().filter(|found| found.over) {
            self.fading.add(key, self.clock.now(), found.node);
        }
    }

    async fn read_record(&self, key: &LockName) -> Result<Option<Record>> {
        let session = self.link.session().await?;
        let seen = self.see(&session, key).await?;
        self.meet(key, &seen);
        Ok(seen.alive().map(|found| found.record.clone()))
    }

    async fn delete_record(self: &Arc<Self>, key: &LockName, expect: Expect) -> Result<Delete> {
        let session = self.link.session().await?;
        loop {
            let seen = self.see(&session, key).await?;
            let Some(alive) = seen.alive() else { return Ok(Delete::Absent) };
            if !expect.met_by(Some(alive.record.version)) {
                return Ok(Delete::Conflict(alive.record.clone()));
            }
            if self.remove(&session, key, &seen).await? {
                return Ok(Delete::Deleted);
            }
        }
    }

    async fn scan_records(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        let session = self.link.session().await?;
        let records = self.layout.records();
        let (caught_up, found) = tokio::join!(session.catch_up(), session.children(&records));
        caught_up?;
        let found = Failure::gone(found)?;
        let mut keys: Vec<LockName> = found
            .iter()
            .flat_map(|(children, _)| children)
            .filter_map(|child| layout::decode(child))
            .collect();
        keys.retain(|key| {
            key.as_str().starts_with(prefix) && page.after.as_ref().is_none_or(|after| key > after)
        });
        keys.sort();
        let mut records = Vec::new();
        for some in keys.chunks(TOGETHER) {
            for (key, seen) in
                some.iter().zip(join_all(some.iter().map(|key| self.see_here(&session, key))).await)
            {
                let seen = seen?;
                self.meet(key, &seen);
                records.extend(seen.alive().map(|found| found.record.clone()));
            }
            if records.len() > page.size() {
                break;
            }
        }
        let more = records.len() > page.size();
        records.truncate(page.size());
        let next = if more { records.last().map(|record| record.key.clone()) } else { None };
        Ok(RecordPage { records, next })
    }
}

#[async_trait]
impl Records for ZooKeeperStore {
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
        self.run(self.shared.write_record(key, value, expect, ttl)).await
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<Delete> {
        self.run(self.shared.delete_record(key, expect)).await
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        self.run(self.shared.scan_records(prefix, page)).await
    }
}
