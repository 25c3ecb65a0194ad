//! What others may see of the locks.

use std::collections::BTreeSet;

use futures_util::future::{join_all, try_join_all};
use lockkeeper_core::{LockName, LockPage, LockView, Page, Result};
use redis::{Value, cmd};

use crate::entry;
use crate::fault::Failure;
use crate::hold::{holders, odd, stored_holds};
use crate::link::Link;
use crate::script::{Call, INSPECT};
use crate::store::Shared;

/// How many keys a server looks at in one step of a scan.
const STEP: usize = 1000;

impl Shared {
    pub(crate) async fn view(&self, name: &LockName) -> Result<Option<LockView>> {
        let group = self.layout.group(name);
        let (base, key) = (self.layout.base(group), self.layout.key(name));
        let keys = [format!("{base}line:{key}"), key];
        let call = Call::new(&INSPECT, &keys).arg(base).arg(LockView::LINE);
        let Value::Array(parts) = call.run(&self.fleet, group.slot()).await? else { return Err(odd()) };
        let [
            Value::Int(now_us),
            Value::Int(pttl),
            Value::Array(holds),
            Value::Int(waiting),
            Value::Array(line),
        ] = &parts[..]
        else {
            return Err(odd());
        };
        let now_ms = u64::try_from(*now_us).map_err(|_| odd())? / 1000;
        let holds = stored_holds(holds);
        let held = holders(&holds, *pttl, now_ms);
        let delayed_ms = holds.iter().flatten().filter_map(|hold| hold.delayed_after(now_ms)).max();
        let line: Vec<_> = line
            .iter()
            .filter_map(|ask| match ask {
                Value::BulkString(packed) => entry::queued(packed),
                _ => None,
            })
            .collect();
        // Whoever was seen to be gone does not wait any more.
        let waiting = usize::try_from(*waiting).unwrap_or(0);
        let waiting = if waiting <= LockView::LINE { line.len() } else { waiting };
        let nothing = held.is_empty() && waiting == 0 && delayed_ms.is_none();
        Ok((!nothing).then(|| LockView { name: name.clone(), held, line, waiting, delayed_ms }))
    }

    pub(crate) async fn page(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        let mut names = self.find("", prefix, page).await?;
        names.extend(self.find("line", prefix, page).await?);
        let mut names: Vec<LockName> = names.into_iter().take(page.size() + 1).collect();
        let more = names.len() > page.size();
        names.truncate(page.size());
        let next = if more { names.last().cloned() } else { None };
        let views = try_join_all(names.iter().map(|name| self.view(name))).await?;
        Ok(LockPage { locks: views.into_iter().flatten().collect(), next })
    }

    /// The first names of a page and one more, for which there is a key of this kind. Every server is walked through
    /// in steps: nobody else is kept waiting, and nothing that was there all the time is missed.
    pub(crate) async fn find(&self, kind: &str, prefix: &str, page: &Page) -> Result<BTreeSet<LockName>> {
        let servers = self.fleet.all().await?;
        let walks = servers.iter().map(|server| self.walk(server, kind, prefix, page));
        let mut found = BTreeSet::new();
        for names in join_all(walks).await {
            found.extend(names?);
        }
        Ok(found)
    }

    async fn walk(
        &self,
        server: &Link,
        kind: &str,
        prefix: &str,
        page: &Page,
    ) -> Result<BTreeSet<LockName>, Failure> {
        let pattern = self.layout.pattern(kind, prefix);
        let wanted = if kind == "line" { "zset" } else { "string" };
        let mut found = BTreeSet::new();
        let mut cursor = b"0".to_vec();
        loop {
            let mut step = cmd("SCAN");
            step.arg(&cursor[..]).arg("MATCH").arg(&pattern).arg("COUNT").arg(STEP).arg("TYPE").arg(wanted);
            let Value::Array(answer) = server.call(&step).await? else { break };
            let [Value::BulkString(next), Value::Array(keys)] = &answer[..] else { break };
            for key in keys {
                let Value::BulkString(key) = key else { continue };
                let key = if kind.is_empty() { Some(&key[..]) } else { self.layout.owner_key(kind, key) };
                let Some(name) = key.and_then(|key| self.layout.name(key)) else { continue };
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
