//! What others may see of the locks.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::join_all;
use lockkeeper_core::{LockName, LockPage, LockView, Page, Result};

use crate::entry::{Line, One, State};
use crate::fault::Failure;
use crate::proto::{Kv, RangeRequest, RangeResponse};
use crate::script::{end_of, get, queue, txn};
use crate::store::Shared;

/// How many keys are read in one step of a walk through all of them.
const STEP: i64 = 1000;

/// How much longer each lease lasts.
type Left = BTreeMap<i64, Duration>;

impl Shared {
    pub async fn view(&self, name: &LockName) -> Result<Option<LockView>> {
        let (base, floor) = (self.layout.base(), self.floor());
        let look = txn(Vec::new(), vec![get(&base), queue(&self.layout.queue(name))], Vec::new());
        let answer = self.lane.send(look, Vec::new()).await?;
        let revision = answer.revision;
        let mut ranges = answer.txn.ranges().into_iter();
        let found = ranges.next().and_then(|range| range.kvs.into_iter().next());
        self.learn_base(found.as_ref(), revision, floor).await?;
        let line = Line::read(&self.layout, name, ranges.next().unwrap_or_default());
        let left = self.time_left(std::iter::once(&line)).await?;
        Ok(self.show(&line, &left))
    }

    async fn time_left<'a>(&self, lines: impl Iterator<Item = &'a Line>) -> Result<Left, Failure> {
        let matters = |one: &&One| one.lease != 0 && !one.is(State::Waiting);
        let leases: BTreeSet<i64> =
            lines.flat_map(|line| line.all.iter().filter(matters)).map(|one| one.lease).collect();
        let looks = leases.into_iter().map(|id| async move {
            let found = self.link.look_at_lease(id, false).await?;
            Ok((id, found.map_or(Duration::ZERO, |(left, _)| left)))
        });
        join_all(looks).await.into_iter().collect()
    }

    fn show(&self, line: &Line, left: &Left) -> Option<LockView> {
        let left_of = |one: &One| left.get(&one.lease).map_or(0, |left| left.as_millis() as u64);
        let (mut held, mut delayed) = (Vec::new(), None);
        for one in &line.all {
            let (delay, ttl) =
                one.entry.as_ref().map_or((0, u64::MAX), |entry| (entry.lock_delay_ms, entry.ttl_ms));
            let lease = left_of(one);
            if one.is(State::Delayed) || (one.is(State::Granted) && delay > 0 && lease <= delay) {
                delayed = delayed.max(Some(lease.max(1)));
            } else if line.holds(one) {
                let left =
                    if one.is(State::Lingering) { lease } else { (lease - lease.min(delay)).clamp(1, ttl) };
                held.push(one.held(self.base(), left));
            }
        }
        let waiting = line.waiters().count();
        let queue: Vec<_> = line.waiters().take(LockView::LINE).map(One::queued).collect();
        let nothing = held.is_empty() && waiting == 0 && delayed.is_none();
        let name = line.name.clone();
        (!nothing).then_some(LockView { name, held, line: queue, waiting, delayed_ms: delayed })
    }

    pub async fn page(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.refresh_base().await?;
        let mut lines: BTreeMap<LockName, Vec<Kv>> = BTreeMap::new();
        for kv in self.walk_locks(&self.layout.all(prefix)).await? {
            let Some((name, _)) = self.layout.name(&kv.key) else { continue };
            let wanted = page.after.as_ref().is_none_or(|after| name > *after);
            if wanted && name.as_str().starts_with(prefix) {
                lines.entry(name).or_default().push(kv);
            }
        }
        let more = lines.len() > page.size();
        let lines: Vec<Line> = lines
            .into_iter()
            .take(page.size())
            .map(|(name, kvs)| {
                Line::read(&self.layout, &name, RangeResponse { kvs, ..RangeResponse::default() })
            })
            .collect();
        let left = self.time_left(lines.iter()).await?;
        let next = if more { lines.last().map(|line| line.name.clone()) } else { None };
        Ok(LockPage { locks: lines.iter().filter_map(|line| self.show(line, &left)).collect(), next })
    }

    /// All keys that begin with `prefix`, as they were at one revision, step by step.
    pub async fn walk(&self, prefix: &[u8]) -> Result<Vec<Kv>, Failure> {
        let (found, _) = self.walk_range(prefix.to_vec(), end_of(prefix), 0, false).await?;
        Ok(found)
    }

    /// The same for the keys of locks alone. Records stand among them: of those only the keys are read, because a lock may be called so
    /// that its keys stand there too.
    async fn walk_locks(&self, prefix: &[u8]) -> Result<Vec<Kv>, Failure> {
        let (end, records) = (end_of(prefix), self.layout.records());
        let after = end_of(&records);
        if !is_before(prefix, &after) || !is_before(&records, &end) {
            return self.walk(prefix).await;
        }
        let (mut found, mut revision) = (Vec::new(), 0);
        let first = prefix.to_vec().max(records.clone());
        if prefix < &records[..] {
            (found, revision) = self.walk_range(prefix.to_vec(), records, 0, false).await?;
        }
        let last = if is_before(&end, &after) { end.clone() } else { after.clone() };
        let (among, revision) = self.walk_range(first, last, revision, true).await?;
        for kv in among.into_iter().filter(|kv| self.layout.name(&kv.key).is_some()) {
            let one = RangeRequest { key: kv.key, revision, ..RangeRequest::default() };
            let answer: RangeResponse = self.link.call("/etcdserverpb.KV/Range", &one).await?;
            found.extend(answer.kvs);
        }
        if is_before(&after, &end) {
            found.extend(self.walk_range(after, end, revision, false).await?.0);
        }
        Ok(found)
    }

    /// The keys from `key` to `range_end`, as they were at `revision` (zero: now), and which revision that was.
    async fn walk_range(
        &self,
        mut key: Vec<u8>,
        range_end: Vec<u8>,
        mut revision: i64,
        keys_only: bool,
    ) -> Result<(Vec<Kv>, i64), Failure> {
        let mut found: Vec<Kv> = Vec::new();
        loop {
            let range_end = range_end.clone();
            let step =
                RangeRequest { key, range_end, limit: STEP, revision, keys_only, ..RangeRequest::default() };
            let answer: RangeResponse = self.link.call("/etcdserverpb.KV/Range", &step).await?;
            if revision == 0 {
                revision = answer.header.map_or(0, |header| header.revision);
            }
            found.extend(answer.kvs);
            match found.last() {
                Some(last) if answer.more => key = [&last.key[..], &[0]].concat(),
                _ => return Ok((found, revision)),
            }
        }
    }
}

/// Whether a key is before the end of a range: a zero stands for the end of everything.
fn is_before(key: &[u8], range_end: &[u8]) -> bool {
    range_end == [0] || (key != [0] && key < range_end)
}
