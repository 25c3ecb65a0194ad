//! The public state of a lock: views, lists and events.

use serde::{Deserialize, Serialize};

use crate::{Fence, Holder, LockName, Mode, WallTime, limits};

/// A holder of a lock, as other clients may see it: never its attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderView {
    /// The process that holds it.
    pub holder: Holder,
    /// The fence of its grant.
    pub fence: Fence,
    /// How.
    pub mode: Mode,
    /// Since when.
    #[serde(rename = "since_us")]
    pub since: WallTime,
    /// For how much longer, if it is not renewed.
    pub expires_in_ms: u64,
    /// The holder has released it, and the rest of its minimum hold remains.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lingering: bool,
    /// Why an operator revoked the lock. The store does not renew its lease any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<String>,
}

/// A waiter in the queue of a lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaiterView {
    /// The process that waits.
    pub holder: Holder,
    /// The mode that it requested.
    pub mode: Mode,
    /// Since when.
    #[serde(rename = "since_us")]
    pub since: WallTime,
}

/// One lock as it is now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockView {
    /// Its name.
    pub name: LockName,
    /// Its holders, oldest first.
    pub held: Vec<HolderView>,
    /// Its queue, the next to be granted first; at most [`LockView::QUEUE_SHOWN`] waiters.
    pub queue: Vec<WaiterView>,
    /// How many waiters the queue has altogether.
    pub waiting: usize,
    /// How much of the lock-delay is left after an unclean end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delayed_ms: Option<u64>,
}

impl LockView {
    /// How many waiters of a queue are shown.
    pub const QUEUE_SHOWN: usize = 100;
    /// How many holders a busy answer names.
    pub const BUSY: usize = 3;

    /// A lock with this holder alone, and no queue.
    pub fn exclusive(name: LockName, holder: HolderView) -> LockView {
        LockView { name, held: vec![holder], queue: Vec::new(), waiting: 0, delayed_ms: None }
    }
}

/// Which part of a list is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Only what comes after this name.
    pub after: Option<LockName>,
    /// At most this many; larger numbers mean [`limits::PAGE`].
    pub limit: usize,
}

impl Page {
    /// The first page, as large as it may be.
    pub const FIRST: Page = Page { after: None, limit: limits::PAGE };

    /// The page that begins after `name`, as large as it may be.
    pub fn after(name: LockName) -> Page {
        Page { after: Some(name), limit: limits::PAGE }
    }

    /// How many items the page really has room for: at least one.
    pub fn size(&self) -> usize {
        self.limit.clamp(1, limits::PAGE)
    }
}

/// One page of locks, in order of their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LockPage {
    /// The locks that have a holder, a waiter or a lock-delay.
    pub locks: Vec<LockView>,
    /// Where the next page begins, if there is one: pass it as [`Page::after`].
    pub next: Option<LockName>,
}

impl LockPage {
    /// The page of all these locks, for a store whose backend has no order of its own.
    pub fn select(mut locks: Vec<LockView>, prefix: &str, page: &Page) -> LockPage {
        locks.retain(|lock| lock.name.as_str().starts_with(prefix) && Some(&lock.name) > page.after.as_ref());
        locks.sort_by(|a, b| a.name.cmp(&b.name));
        let more = locks.len() > page.size();
        locks.truncate(page.size());
        let next = locks.last().filter(|_| more).map(|last| last.name.clone());
        LockPage { locks, next }
    }
}

/// Something that happened to a lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When.
    #[serde(rename = "at_us")]
    pub at: WallTime,
    /// To which lock.
    pub name: LockName,
    /// What.
    #[serde(flatten)]
    pub kind: EventKind,
    /// The process that the event is about; none for a break.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<Holder>,
}

/// The kind of an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum EventKind {
    /// The store granted it.
    Granted {
        /// The fence of the grant.
        fence: Fence,
    },
    /// Its holder released it.
    Released {
        /// The fence of the grant.
        fence: Fence,
    },
    /// Its holder did not renew it within the ttl, or the holder's process died.
    Expired {
        /// The fence of the grant.
        fence: Fence,
    },
    /// An operator asks its holders to release it: see [`crate::Locks::revoke`].
    Revoked {
        /// Newer than everything granted before.
        fence: Fence,
        /// Why.
        reason: String,
    },
    /// An operator took it away.
    Broken {
        /// A fence that is newer than every grant before.
        fence: Fence,
        /// Why.
        reason: String,
    },
    /// A request joined its queue.
    Waiting,
    /// A request left its queue.
    Left,
    /// Some events before this one were missed: look again.
    Missed,
}

impl EventKind {
    /// The name of the event in JSON and logs.
    pub fn as_str(&self) -> &'static str {
        match self {
            EventKind::Granted { .. } => "granted",
            EventKind::Released { .. } => "released",
            EventKind::Expired { .. } => "expired",
            EventKind::Revoked { .. } => "revoked",
            EventKind::Broken { .. } => "broken",
            EventKind::Waiting => "waiting",
            EventKind::Left => "left",
            EventKind::Missed => "missed",
        }
    }

    /// The fence that the event is about.
    pub fn fence(&self) -> Option<Fence> {
        match self {
            EventKind::Granted { fence } | EventKind::Released { fence } | EventKind::Expired { fence } => {
                Some(*fence)
            }
            EventKind::Revoked { fence, .. } | EventKind::Broken { fence, .. } => Some(*fence),
            EventKind::Waiting | EventKind::Left | EventKind::Missed => None,
        }
    }
}
