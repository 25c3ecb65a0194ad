//! What is written in the item of a lock: who holds it, and what else keeps others from it.

use std::collections::BTreeMap;
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use lockkeeper_core::rules::Stake;
use lockkeeper_core::{Error, Fence, Held, Holder, LockName, Mode, Owner, Result, Wall};
use serde::{Deserialize, Serialize};

use crate::script::{Item, KEY, REV, number, number_of, text_of};

/// How an item is written. One of a later kind is not touched.
const FORMAT: u64 = 1;

/// Something that lasts for a while. It is over when it has not changed for that long, by the clock of whoever looks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// The write that made it or renewed it.
    pub beat: u64,
    pub ms: u64,
    /// When it is over by the wall clock: for people only.
    pub ends_us: u64,
}

/// One grant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// Whose: a hash of the attempt. Empty once it lingers.
    pub mark: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    pub mode: Mode,
    pub fence: Fence,
    /// The ttl; for a hold that lingers what is left of its minimum.
    pub span: Span,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lock_delay_ms: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub min_hold_ms: u64,
    pub since: Wall,
    pub holder: Holder,
    /// All its names, if it has several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<LockName>,
    /// The write that revoked it: the key of its reason in [`Book::reasons`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<u64>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Hold {
    /// Released, and kept only for the rest of its minimum hold.
    pub fn lingers(&self) -> bool {
        self.mark.is_empty()
    }

    pub fn stake(&self) -> Stake {
        let owner = self.owner.as_deref().and_then(|hex| Owner::from_hex(hex).ok());
        Stake { owner, mode: self.mode, fence: self.fence }
    }

    /// As others may see it, apart from why it was revoked.
    pub fn view(&self, wall: Wall) -> Held {
        let left = self.span.ends_us.saturating_sub(wall.as_micros()) / 1000;
        Held {
            holder: self.holder.clone(),
            fence: self.fence,
            mode: self.mode,
            since: self.since,
            expires_in_ms: left.min(self.span.ms),
            lingering: self.lingers(),
            revoked: None,
        }
    }
}

/// Someone waits to have the lock alone: while that is so, nobody new joins those who share it. Fairness only, so the wall
/// clock is good enough.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    pub mark: String,
    pub ends_us: u64,
}

/// A process of some boot of some machine has seen the item: what was there then has lasted since then for all processes of that
/// boot, because they share a clock. So a job that never waits still gets the lock of a dead holder in the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Witness {
    pub boot: String,
    /// On the clock of that boot.
    pub at_ns: u64,
    /// On the wall clock. Both must agree that time has passed: copies of a virtual machine share a boot.
    pub at_us: u64,
    /// What was the last write then.
    pub rev: u64,
}

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Book {
    /// Oldest first; re-entrant holds of one owner beside each other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holds: Vec<Hold>,
    /// Held back after an unclean end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay: Option<Span>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intent: Option<Intent>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub seen: Vec<Witness>,
    /// Why holds were revoked, by the write that revoked them. Stored once for all holds: an item has little room.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reasons: BTreeMap<u64, String>,
}

impl Book {
    pub fn find(&self, mark: &str) -> Option<&Hold> {
        self.holds.iter().find(|hold| hold.mark == mark)
    }

    /// Everything in it that lasts.
    pub fn spans(&self) -> impl Iterator<Item = &Span> {
        self.holds.iter().map(|hold| &hold.span).chain(&self.delay)
    }

    /// Re-entrant holds stand beside each other, so that the rule can count owners by their fences.
    pub fn add(&mut self, hold: Hold) {
        let beside = self.holds.iter().rposition(|other| other.fence == hold.fence);
        self.holds.insert(beside.map_or(self.holds.len(), |i| i + 1), hold);
    }
}

/// The item of a lock, taken apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// Which write it is; `None`: there is no item.
    pub rev: Option<u64>,
    /// The highest fence of this lock. It stays when everything else is gone.
    pub fence: Option<Fence>,
    pub book: Book,
}

impl Page {
    /// # Errors
    /// [`Error::Unsupported`] if it is not ours, or of a later kind: then it is not touched.
    pub fn read(item: Option<&Item>) -> Result<Page> {
        let Some(item) = item else { return Ok(Page::default()) };
        let odd = |what: &str| {
            let key = text_of(item, KEY).unwrap_or_default();
            Error::Unsupported(format!("the item {key:?} is not one that this version understands ({what})"))
        };
        if number_of(item, "format") != Some(FORMAT) {
            return Err(odd("its format"));
        }
        let fence = match number_of(item, "fence") {
            Some(n) => Some(Fence::new(n)?),
            None => None,
        };
        let book = match text_of(item, "book") {
            Some(text) => serde_json::from_str(text).map_err(|error| odd(&error.to_string()))?,
            None => Book::default(),
        };
        Ok(Page { rev: Some(number_of(item, REV).ok_or_else(|| odd("its revision"))?), fence, book })
    }

    /// The item, as write number `rev`.
    pub fn item(&self, key: String, rev: u64) -> Result<Item> {
        let mut item = Item::from([
            (KEY.to_owned(), AttributeValue::S(key)),
            (REV.to_owned(), number(rev)),
            ("format".to_owned(), number(FORMAT)),
        ]);
        if let Some(fence) = self.fence {
            item.insert("fence".into(), number(fence.get()));
        }
        if self.book != Book::default() {
            let text = serde_json::to_string(&self.book)
                .map_err(|error| Error::Invalid(format!("a holder that cannot be written down: {error}")))?;
            item.insert("book".into(), AttributeValue::S(text));
        }
        Ok(item)
    }
}

pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The same, rounded up: a lease that is stored must not end before the one that the holder counts.
pub fn millis_up(time: Duration) -> u64 {
    u64::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
}
