//! Views of locks: `inspect` and `list`.

use std::collections::BTreeMap;
use std::time::Duration;

use lockkeeper_core::{HolderView, LockName, LockPage, LockView, Page, Result};

use crate::attributes::{AttributeMap, FENCE, FORMAT, KEY, LOCK_STATE, REV, text_of};
use crate::backoff::retry_throttled;
use crate::cas::{LockTable, WorkingCopy};
use crate::codec::{StoredHold, millis};
use crate::config::Options;
use crate::keys::{self, LOCKS};
use crate::observation::HoldPhase;
use crate::statements::TableClient;

impl WorkingCopy {
    /// The holders.
    pub fn held(&self) -> Vec<HolderView> {
        let state = &self.item.state;
        let holds = state.holds.iter();
        let holds = holds.filter(|hold| matches!(self.observed.phase(hold), HoldPhase::Held(_)));
        let reason = |hold: &StoredHold| state.revoke_reason(hold).map(str::to_owned);
        holds.map(|hold| HolderView { revoked: reason(hold), ..hold.view(self.observed.wall) }).collect()
    }

    fn view(&self) -> Option<LockView> {
        let held = self.held();
        let state = &self.item.state;
        let of_holds = state.holds.iter().filter_map(|hold| match self.observed.phase(hold) {
            HoldPhase::LockDelay(left) => Some(left),
            _ => None,
        });
        let stored = state.lock_delay.iter().map(|delay| self.observed.remaining(delay, 0));
        let delayed = of_holds.chain(stored).max().filter(|left| *left > Duration::ZERO);
        let delayed_ms = delayed.map(|left| millis(left).max(1));
        let free = held.is_empty() && delayed_ms.is_none();
        (!free).then(|| LockView { name: self.name.clone(), held, queue: Vec::new(), waiting: 0, delayed_ms })
    }
}

impl LockTable {
    pub async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        let key = keys::lock(name);
        let item = retry_throttled(&self.options, || self.client.get(&key)).await?;
        Ok(self.observe(name, item.as_ref())?.view())
    }

    pub async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        let wanted = [KEY, REV, FORMAT, FENCE, LOCK_STATE];
        let items = scan_items(&self.client, &self.options, LOCKS, prefix, &page.after, &wanted).await?;
        let mut locks = Vec::new();
        for (name, item) in items {
            let Some(view) = self.observe(&name, Some(&item))?.view() else { continue };
            if locks.len() == page.size() {
                return Ok(LockPage { next: locks.last().map(|last: &LockView| last.name.clone()), locks });
            }
            locks.push(view);
        }
        Ok(LockPage { locks, next: None })
    }
}

/// All items of a kind whose names begin with `prefix` and come after `after`, sorted by name.
pub async fn scan_items(
    client: &TableClient,
    options: &Options,
    kind: &str,
    prefix: &str,
    after: &Option<LockName>,
    wanted: &[&str],
) -> Result<BTreeMap<LockName, AttributeMap>> {
    let start = format!("{kind}{prefix}");
    let items = retry_throttled(options, || client.scan(&start, wanted)).await?;
    let named = items.into_iter().filter_map(|item| {
        let name = LockName::new(text_of(&item, KEY)?.strip_prefix(kind)?).ok()?;
        Some((name, item))
    });
    Ok(named.filter(|(name, _)| after.as_ref().is_none_or(|after| name > after)).collect())
}
