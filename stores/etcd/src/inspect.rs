//! Views of locks: inspect and list.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use lockkeeper_core::{LockName, LockPage, LockView, Page, Result};

use crate::client::EtcdClient;
use crate::codec::EntryState;
use crate::error::Failure;
use crate::fence_base::FenceBase;
use crate::proto::{Kv, RangeResponse};
use crate::queue::{QueueEntry, QueueSnapshot};
use crate::statements::{range_end_of, range_oldest_first};

/// The time that each lease has left.
type LeaseTimes = BTreeMap<i64, Duration>;

/// Builds the views.
pub struct Inspector {
    pub client: Arc<EtcdClient>,
    pub base: Arc<FenceBase>,
}

impl Inspector {
    pub async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        let keys = &self.client.keys;
        let reads = vec![range_oldest_first(&keys.lock_prefix(name))];
        let (_, mut ranges) = self.base.read_with(reads).await?;
        let queue = QueueSnapshot::read(keys, name, ranges.next().unwrap_or_default());
        let left = self.lease_times(std::iter::once(&queue)).await?;
        Ok(self.build_view(&queue, &left))
    }

    async fn lease_times<'a>(
        &self,
        queues: impl Iterator<Item = &'a QueueSnapshot>,
    ) -> Result<LeaseTimes, Failure> {
        let matters = |entry: &&QueueEntry| entry.lease != 0 && !entry.is(EntryState::Waiting);
        let leases: BTreeSet<i64> =
            queues.flat_map(|queue| queue.all.iter().filter(matters)).map(|entry| entry.lease).collect();
        let requests = leases.into_iter().map(|id| async move {
            Ok((id, self.client.connection.lease_time_left(id).await?.unwrap_or_default()))
        });
        join_all(requests).await.into_iter().collect()
    }

    fn build_view(&self, queue: &QueueSnapshot, left: &LeaseTimes) -> Option<LockView> {
        let left_of = |entry: &QueueEntry| left.get(&entry.lease).map_or(0, |left| left.as_millis() as u64);
        let (mut held, mut delayed) = (Vec::new(), None);
        for entry in &queue.all {
            let (delay, ttl) =
                entry.value.as_ref().map_or((0, u64::MAX), |value| (value.lock_delay_ms, value.ttl_ms));
            let lease = left_of(entry);
            if entry.is(EntryState::Delayed) || (entry.is(EntryState::Granted) && delay > 0 && lease <= delay)
            {
                delayed = delayed.max(Some(lease.max(1)));
            } else if queue.holds(entry) {
                let left = if entry.is(EntryState::Lingering) {
                    lease
                } else {
                    (lease - lease.min(delay)).clamp(1, ttl)
                };
                held.push(entry.holder_view(self.base.get(), left));
            }
        }
        let waiting = queue.waiters().count();
        let waiters: Vec<_> =
            queue.waiters().take(LockView::QUEUE_SHOWN).map(QueueEntry::waiter_view).collect();
        let nothing = held.is_empty() && waiting == 0 && delayed.is_none();
        let name = queue.name.clone();
        (!nothing).then_some(LockView { name, held, queue: waiters, waiting, delayed_ms: delayed })
    }

    pub async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.base.refresh().await?;
        let keys = &self.client.keys;
        let mut queues: BTreeMap<LockName, Vec<Kv>> = BTreeMap::new();
        for kv in self.read_lock_keys(&keys.starting_with(prefix)).await? {
            let Some((name, _)) = keys.parse_entry_key(&kv.key) else { continue };
            let wanted = page.after.as_ref().is_none_or(|after| name > *after);
            if wanted && name.as_str().starts_with(prefix) {
                queues.entry(name).or_default().push(kv);
            }
        }
        let more = queues.len() > page.size();
        let queues: Vec<QueueSnapshot> = queues
            .into_iter()
            .take(page.size())
            .map(|(name, kvs)| {
                QueueSnapshot::read(keys, &name, RangeResponse { kvs, ..RangeResponse::default() })
            })
            .collect();
        let left = self.lease_times(queues.iter()).await?;
        let next = if more { queues.last().map(|queue| queue.name.clone()) } else { None };
        Ok(LockPage {
            locks: queues.iter().filter_map(|queue| self.build_view(queue, &left)).collect(),
            next,
        })
    }

    /// Reads the keys of locks only. Records lie between them, and only their keys are read, without values: a lock's
    /// name may sort its keys among the records.
    async fn read_lock_keys(&self, prefix: &[u8]) -> Result<Vec<Kv>, Failure> {
        let client = &self.client;
        let (end, records) = (range_end_of(prefix), client.keys.records());
        let after = range_end_of(&records);
        if !is_before(prefix, &after) || !is_before(&records, &end) {
            return client.read_prefix(prefix).await;
        }
        let (mut found, mut revision) = (Vec::new(), 0);
        let first = prefix.to_vec().max(records.clone());
        if prefix < &records[..] {
            (found, revision) = client.read_range(prefix.to_vec(), records, 0, false).await?;
        }
        let last = if is_before(&end, &after) { end.clone() } else { after.clone() };
        let (between, revision) = client.read_range(first, last, revision, true).await?;
        for kv in between.into_iter().filter(|kv| client.keys.parse_entry_key(&kv.key).is_some()) {
            found.extend(client.read_at(kv.key, revision).await?);
        }
        if is_before(&after, &end) {
            found.extend(client.read_range(after, end, revision, false).await?.0);
        }
        Ok(found)
    }
}

/// Whether a key is before the end of a range. A zero byte is the end of all keys.
fn is_before(key: &[u8], range_end: &[u8]) -> bool {
    range_end == [0] || (key != [0] && key < range_end)
}
