//! What others may see of the locks.

use std::collections::BTreeMap;
use std::time::Duration;

use lockkeeper_core::{Held, LockName, LockPage, LockView, Page, Result};

use crate::book::{Hold, millis};
use crate::layout::{self, LOCKS};
use crate::script::{Item, KEY, REV, text_of};
use crate::sight::Phase;
use crate::step::{Backoff, Slot};
use crate::store::Shared;

impl Slot {
    /// Who holds it, as others may see it.
    pub fn held(&self) -> Vec<Held> {
        let holds = self.page.book.holds.iter();
        let holds = holds.filter(|hold| matches!(self.sight.phase(hold), Phase::Held(_)));
        let reason = |hold: &Hold| self.page.book.reason(hold).map(str::to_owned);
        holds.map(|hold| Held { revoked: reason(hold), ..hold.view(self.sight.wall) }).collect()
    }

    fn view(&self) -> Option<LockView> {
        let held = self.held();
        let book = &self.page.book;
        let after = book.holds.iter().filter_map(|hold| match self.sight.phase(hold) {
            Phase::Delayed(left) => Some(left),
            _ => None,
        });
        let delay = book.delay.iter().map(|delay| self.sight.left(delay, 0));
        let delayed = after.chain(delay).max().filter(|left| *left > Duration::ZERO);
        let delayed_ms = delayed.map(|left| millis(left).max(1));
        let nothing = held.is_empty() && delayed_ms.is_none();
        (!nothing).then(|| LockView {
            name: self.name.clone(),
            held,
            line: Vec::new(),
            waiting: 0,
            delayed_ms,
        })
    }
}

impl Shared {
    pub async fn view(&self, name: &LockName) -> Result<Option<LockView>> {
        let mut backoff = Backoff::new(self);
        loop {
            match self.script.get(&layout::lock(name)).await {
                Ok(item) => return Ok(self.slot(name, item.as_ref())?.view()),
                Err(failure) => backoff.pause(self, failure).await?,
            }
        }
    }

    pub async fn page(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        let items = self.walk(LOCKS, prefix, &page.after, &[KEY, REV, "format", "fence", "book"]).await?;
        let mut locks = Vec::new();
        for (name, item) in items {
            let Some(view) = self.slot(&name, Some(&item))?.view() else { continue };
            if locks.len() == page.size() {
                return Ok(LockPage { next: locks.last().map(|last: &LockView| last.name.clone()), locks });
            }
            locks.push(view);
        }
        Ok(LockPage { locks, next: None })
    }

    /// All items of a kind whose names begin with `prefix` and come after `after`, in order.
    pub async fn walk(
        &self,
        kind: &str,
        prefix: &str,
        after: &Option<LockName>,
        wanted: &[&str],
    ) -> Result<BTreeMap<LockName, Item>> {
        let mut backoff = Backoff::new(self);
        let items = loop {
            match self.script.scan(&format!("{kind}{prefix}"), wanted).await {
                Ok(items) => break items,
                Err(failure) => backoff.pause(self, failure).await?,
            }
        };
        let named = items.into_iter().filter_map(|item| {
            let name = LockName::new(text_of(&item, KEY)?.strip_prefix(kind)?).ok()?;
            Some((name, item))
        });
        Ok(named.filter(|(name, _)| after.as_ref().is_none_or(|after| name > after)).collect())
    }
}
