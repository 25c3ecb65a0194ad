use serde::{Deserialize, Serialize};

use crate::{Fence, Holder, LockName, Mode, Wall, limits};

/// Someone who holds a lock, as others may see it: never the attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Who.
    pub holder: Holder,
    /// With which fence.
    pub fence: Fence,
    /// How.
    pub mode: Mode,
    /// Since when.
    #[serde(rename = "since_us")]
    pub since: Wall,
    /// For how much longer, if it is not renewed.
    pub expires_in_ms: u64,
    /// Released by its holder; kept only for the rest of its minimum hold.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lingering: bool,
    /// Why its holder is to give it back: the lock was revoked, and its lease is not renewed any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<String>,
}

/// Someone who stands in line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queued {
    /// Who.
    pub holder: Holder,
    /// For what.
    pub mode: Mode,
    /// Since when.
    #[serde(rename = "since_us")]
    pub since: Wall,
}

/// One lock as it is now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockView {
    /// Which.
    pub name: LockName,
    /// Who holds it, oldest first.
    pub held: Vec<Held>,
    /// Who stands in line, first in line first; at most [`LockView::LINE`] of them.
    pub line: Vec<Queued>,
    /// How many stand in line altogether.
    pub waiting: usize,
    /// For how much longer it is held back after an unclean end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delayed_ms: Option<u64>,
}

impl LockView {
    /// How much of the line is shown.
    pub const LINE: usize = 100;
    /// How many holders a busy answer names.
    pub const BUSY: usize = 3;
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
    /// The locks that are held, waited for or held back.
    pub locks: Vec<LockView>,
    /// Where the next page begins, if there is one: pass it as [`Page::after`].
    pub next: Option<LockName>,
}

/// Something that happened to a lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When.
    #[serde(rename = "at_us")]
    pub at: Wall,
    /// To which lock.
    pub name: LockName,
    /// What.
    #[serde(flatten)]
    pub kind: EventKind,
    /// Whose; for a break, nobody's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<Holder>,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum EventKind {
    /// Someone got it.
    Granted {
        /// The fence of the grant.
        fence: Fence,
    },
    /// Its holder gave it back.
    Released {
        /// The fence of the grant.
        fence: Fence,
    },
    /// Its holder fell silent for longer than the ttl, or its process died.
    Expired {
        /// The fence of the grant.
        fence: Fence,
    },
    /// An operator asks its holders to give it back: see [`crate::Locks::revoke`].
    Revoked {
        /// Newer than everything granted before.
        fence: Fence,
        /// Why.
        reason: String,
    },
    /// An operator took it away.
    Broken {
        /// The fence that moved on: everything granted before is older than this.
        fence: Fence,
        /// Why.
        reason: String,
    },
    /// Someone stands in line for it.
    Waiting,
    /// Someone left the line.
    Left,
    /// Some events before this one were missed: look again.
    Missed,
}

impl EventKind {
    /// The word for it.
    pub fn word(&self) -> &'static str {
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

    /// The fence it is about.
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
