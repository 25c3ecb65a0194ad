//! Views of locks, by the replies of a majority: `inspect` and `list`.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures_util::future::try_join_all;
use lockkeeper_core::{LockName, LockPage, LockView, Page, Result};
use lockkeeper_redis::Failure;
use redis::{Value, cmd};

use crate::codec::{self, NodeLock};
use crate::connection::RedlockNode;
use crate::error::unexpected_reply;
use crate::keys::Keys;
use crate::quorum::Quorum;
use crate::statements::{INSPECT, ScriptCall};

/// How many keys a node checks in one SCAN call.
const SCAN_COUNT: usize = 1000;

/// Shows locks. Clones share everything.
#[derive(Clone)]
pub struct Viewer {
    pub quorum: Arc<Quorum>,
    pub keys: Arc<Keys>,
}

impl Viewer {
    /// The view of one lock. It has a holder if the nodes that are locked for the holder, and those without a reply, are a majority.
    pub async fn view(&self, name: &LockName) -> Result<Option<LockView>> {
        let call = ScriptCall::new(&INSPECT, &self.keys.lock_and_vote(name)[..]);
        let good = self.quorum.require_majority(self.quorum.run_on_all(&call).await)?;
        let silent = self.quorum.nodes.len() - good.len();
        let mut seen = Vec::new();
        for (_, answer) in &good {
            match answer {
                Value::Array(parts) if parts.len() == 1 => {}
                Value::Array(parts) if parts.len() == 2 => {
                    seen.push(NodeLock::read(&parts[1]).ok_or_else(unexpected_reply)?)
                }
                _ => return Err(unexpected_reply()),
            }
        }
        let leader = codec::leader(seen.iter());
        if leader.is_empty() || leader.len() + silent < self.quorum.size {
            return Ok(None);
        }
        let held = vec![codec::holder_view(&leader, self.quorum.size)];
        Ok(Some(LockView { name: name.clone(), held, queue: Vec::new(), waiting: 0, delayed_ms: None }))
    }

    pub async fn page(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        let work = |node: Arc<RedlockNode>| self.clone().scan_names(node, prefix.to_owned(), page.clone());
        let scans = self.quorum.call_all(self.quorum.options.access.timeout * 5, work, |_| false).await;
        let mut names = BTreeSet::new();
        for (_, found) in self.quorum.require_majority(scans)? {
            let Value::Array(found) = found else { return Err(unexpected_reply()) };
            names.extend(found.iter().filter_map(|name| match name {
                Value::BulkString(name) => LockName::new(std::str::from_utf8(name).ok()?).ok(),
                _ => None,
            }));
        }
        let mut names: Vec<LockName> = names.into_iter().take(page.size() + 1).collect();
        let more = names.len() > page.size();
        names.truncate(page.size());
        let next = if more { names.last().cloned() } else { None };
        let views = try_join_all(names.iter().map(|name| self.view(name))).await?;
        Ok(LockPage { locks: views.into_iter().flatten().collect(), next })
    }

    /// The first names of a page and one more, as one node knows them. SCAN does not block
    /// the node, and finds every key that exists during the whole scan.
    async fn scan_names(self, node: Arc<RedlockNode>, prefix: String, page: Page) -> Result<Value, Failure> {
        let pattern = self.keys.pattern(&prefix);
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
                .arg("string");
            let Value::Array(answer) = node.connection.call(&step).await? else { break };
            let [Value::BulkString(next), Value::Array(keys)] = &answer[..] else { break };
            for key in keys {
                let Value::BulkString(key) = key else { continue };
                let Some(name) = self.keys.lock_name(key) else { continue };
                if name.as_str().starts_with(&prefix) && page.after.as_ref().is_none_or(|after| name > *after)
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
        Ok(Value::Array(found.iter().map(|name| Value::BulkString(name.as_str().into())).collect()))
    }
}
