//! Public views of locks: inspect and list.

use std::collections::BTreeSet;

use futures_util::future::{join_all, try_join_all};
use lockkeeper_core::{LockName, LockPage, LockView, Page, Result};
use redis::{Value, cmd};

use crate::codec;
use crate::codec::{holders, stored_holds};
use crate::connection::Connection;
use crate::error::Failure;
use crate::error::unexpected_reply;
use crate::runner::ScriptRunner;
use crate::statements::{INSPECT, ScriptCall};

/// How many keys a server looks at in one step of a scan.
const SCAN_COUNT: usize = 1000;

impl ScriptRunner {
    pub(crate) async fn inspect_lock(&self, name: &LockName) -> Result<Option<LockView>> {
        let group = self.keys.group(name);
        let (base, key) = (self.keys.group_prefix(group), self.keys.lock_key(name));
        let keys = [format!("{base}queue:{key}"), key];
        let call = ScriptCall::new(&INSPECT, &keys).arg(base).arg(LockView::QUEUE_SHOWN);
        let reply = self.run(group, &call).await.map_err(Failure::of_script_without_partial_writes)?;
        let Value::Array(parts) = reply else {
            return Err(unexpected_reply());
        };
        let [
            Value::Int(now_us),
            Value::Int(pttl),
            Value::Array(holds),
            Value::Int(waiting),
            Value::Array(queue),
        ] = &parts[..]
        else {
            return Err(unexpected_reply());
        };
        let now_us = u64::try_from(*now_us).map_err(|_| unexpected_reply())?;
        let now_ms = now_us / 1000;
        let holds = stored_holds(holds);
        let held = holders(&holds, *pttl, now_ms);
        let delayed_ms = holds.iter().flatten().filter_map(|hold| hold.delayed_after(now_ms)).max();
        let queue: Vec<_> = queue
            .iter()
            .filter_map(|request| match request {
                // A queue entry whose process is gone is empty, and does not count.
                Value::BulkString(packed) if !packed.is_empty() => Some(codec::view_waiter(packed, now_us)),
                _ => None,
            })
            .collect();
        let waiting = usize::try_from(*waiting).unwrap_or(0);
        let waiting = if waiting <= LockView::QUEUE_SHOWN { queue.len() } else { waiting };
        let nothing = held.is_empty() && waiting == 0 && delayed_ms.is_none();
        Ok((!nothing).then(|| LockView { name: name.clone(), held, queue, waiting, delayed_ms }))
    }

    pub(crate) async fn list_locks(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        let mut names = self.scan_names("", prefix, page).await?;
        names.extend(self.scan_names("queue", prefix, page).await?);
        let mut names: Vec<LockName> = names.into_iter().take(page.size() + 1).collect();
        let more = names.len() > page.size();
        names.truncate(page.size());
        let next = if more { names.last().cloned() } else { None };
        let views = try_join_all(names.iter().map(|name| self.inspect_lock(name))).await?;
        Ok(LockPage { locks: views.into_iter().flatten().collect(), next })
    }

    /// The first names of a page and one more for which there is a key of this kind. `SCAN` walks through every server in steps, so
    /// it blocks no other client, and finds every key that existed during the whole walk.
    pub(crate) async fn scan_names(
        &self,
        kind: &str,
        prefix: &str,
        page: &Page,
    ) -> Result<BTreeSet<LockName>> {
        let servers = self.router.all().await?;
        let walks = servers.iter().map(|server| self.scan_server(server, kind, prefix, page));
        let mut found = BTreeSet::new();
        for names in join_all(walks).await {
            found.extend(names?);
        }
        Ok(found)
    }

    async fn scan_server(
        &self,
        server: &Connection,
        kind: &str,
        prefix: &str,
        page: &Page,
    ) -> Result<BTreeSet<LockName>, Failure> {
        let pattern = self.keys.pattern(kind, prefix);
        let wanted = if kind == "queue" { "zset" } else { "string" };
        let mut found = BTreeSet::new();
        let mut cursor = b"0".to_vec();
        loop {
            let mut step = cmd("SCAN");
            step.arg(&cursor[..])
                .arg("MATCH")
                .arg(&pattern)
                .arg("COUNT")
                .arg(SCAN_COUNT)
                .arg("TYPE")
                .arg(wanted);
            let Value::Array(answer) = server.call(&step).await? else { break };
            let [Value::BulkString(next), Value::Array(keys)] = &answer[..] else { break };
            for key in keys {
                let Value::BulkString(key) = key else { continue };
                let key = if kind.is_empty() { Some(&key[..]) } else { self.keys.lock_key_in(kind, key) };
                let Some(name) = key.and_then(|key| self.keys.lock_name(key)) else { continue };
                if name.as_str().starts_with(prefix) && page.after.as_ref().is_none_or(|after| name > *after)
                {
                    found.insert(name);
                    if found.len() > page.size() + 1 {
                        found.pop_last();
                    }
                }
            }
            if next == b"0" {
                break;
            }
            cursor = next.clone();
        }
        Ok(found)
    }
}
