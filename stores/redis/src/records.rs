//! Records: small values with a version, written by compare-and-swap.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::try_join_all;
use lockkeeper_core::{
    DeleteOutcome, Expect, LockName, Page, Record, RecordPage, Records, Result, Version, WriteOutcome,
};
use redis::{Value, cmd};

use crate::error::unexpected_reply;
use crate::runner::ScriptRunner;
use crate::statements::millis;
use crate::statements::{ScriptCall, WRITE};
use crate::store::RedisStore;

impl ScriptRunner {
    fn record_key(&self, key: &LockName) -> String {
        format!("{}record:{}", self.keys.group_prefix(self.keys.group(key)), self.keys.lock_key(key))
    }

    async fn record(&self, key: &LockName) -> Result<Option<Record>> {
        let slot = self.keys.group(key).slot();
        match self.router.call(slot, cmd("GET").arg(self.record_key(key))).await? {
            Value::Nil => Ok(None),
            Value::BulkString(text) => read(key, &text).map(Some),
            _ => Err(unexpected_reply()),
        }
    }

    /// Writes or deletes. `Ok(Ok(n))`: done, and this is the new version or how many there were.
    async fn change(
        &self,
        key: &LockName,
        expect: Expect,
        ttl: u64,
        verb: &str,
        value: &[u8],
    ) -> Result<Result<u64, Option<Record>>> {
        let group = self.keys.group(key);
        let expect = match expect {
            Expect::Absent => "absent".to_owned(),
            Expect::Any => "any".to_owned(),
            Expect::Version(Version(version)) => format!("{version:016}"),
        };
        let keys = [format!("{}fence", self.keys.group_prefix(group)), self.record_key(key)];
        let call = ScriptCall::new(&WRITE, &keys)
            .arg(expect)
            .arg(ttl)
            .arg(self.highest_fence_seen())
            .arg(verb)
            .arg(value);
        let Value::Array(answer) = self.run(group, &call).await? else {
            return Err(unexpected_reply());
        };
        match &answer[..] {
            [Value::Int(1), Value::Int(n)] => Ok(Ok(u64::try_from(*n).map_err(|_| unexpected_reply())?)),
            [Value::Int(0), Value::BulkString(text)] if text.is_empty() => Ok(Err(None)),
            [Value::Int(0), Value::BulkString(text)] => Ok(Err(Some(read(key, text)?))),
            _ => Err(unexpected_reply()),
        }
    }
}

fn read(key: &LockName, text: &[u8]) -> Result<Record> {
    let (version, value) = text.split_at_checked(16).ok_or_else(unexpected_reply)?;
    let version = std::str::from_utf8(version)
        .ok()
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(unexpected_reply)?;
    Ok(Record { key: key.clone(), value: value.to_vec(), version: Version(version) })
}

#[async_trait]
impl Records for RedisStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        self.runner().record(key).await
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        Record::check(value, ttl)?;
        match self.runner().change(key, expect, ttl.map_or(0, millis), "write", value).await? {
            Ok(version) => {
                self.runner().raise_fence_seen(version);
                Ok(WriteOutcome::Written(Version(version)))
            }
            Err(found) => Ok(WriteOutcome::Conflict(found)),
        }
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        Ok(match self.runner().change(key, expect, 0, "delete", b"").await? {
            Ok(0) | Err(None) => DeleteOutcome::Absent,
            Ok(_) => DeleteOutcome::Deleted,
            Err(Some(found)) => DeleteOutcome::Conflict(found),
        })
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        let mut keys: Vec<LockName> =
            self.runner().scan_names("record", prefix, page).await?.into_iter().collect();
        let more = keys.len() > page.size();
        keys.truncate(page.size());
        let next = if more { keys.last().cloned() } else { None };
        let records = try_join_all(keys.iter().map(|key| self.runner().record(key))).await?;
        Ok(RecordPage { records: records.into_iter().flatten().collect(), next })
    }
}
