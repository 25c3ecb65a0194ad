//! The faults that a proxy can inject, and where.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Direction;

/// A question about what a client has sent.
pub type Test = dyn Fn(&[u8]) -> bool + Send + Sync;

/// Which connections are meant.
#[derive(Clone, Default)]
pub enum Pick {
    /// Every one.
    #[default]
    Any,
    /// The one with this number: they are counted from 0 in the order in which the proxy took them.
    Index(u64),
    /// The connections for which the test holds for the bytes that their client has sent so far (the first 4096 of them).
    Sent(Arc<Test>),
}

impl Pick {
    /// The connections whose client has sent `text` so far, such as `SUBSCRIBE` (in its first 4096 bytes).
    pub fn sent(text: &str) -> Self {
        let text = text.to_owned();
        Pick::Sent(Arc::new(move |sent| {
            sent.windows(text.len().max(1)).any(|w| w.eq_ignore_ascii_case(text.as_bytes()))
        }))
    }

    pub(super) fn takes(&self, index: u64, sent: &[u8]) -> bool {
        match self {
            Pick::Any => true,
            Pick::Index(n) => *n == index,
            Pick::Sent(test) => test(sent),
        }
    }
}

impl fmt::Debug for Pick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pick::Any => f.write_str("Any"),
            Pick::Index(n) => write!(f, "Index({n})"),
            Pick::Sent(_) => f.write_str("Sent(..)"),
        }
    }
}

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionEnd {
    /// Both sides are closed.
    Close,
    /// The client is sent a RST; the server's side is closed.
    Reset,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum FaultAction {
    /// The message is not passed on.
    EndBefore(ConnectionEnd),
    /// The message is passed on, then the connection ends.
    EndAfter(ConnectionEnd),
    /// The message is passed on; the connection ends when the answer to it comes, which is not passed on.
    EndAtReply(ConnectionEnd),
    /// The message and everything behind it stands still; for ever without a duration.
    Hold(Option<Duration>),
    /// Like [`FaultAction::Hold`], and the other side does not learn that the client has left.
    DeliverLate,
    /// The message vanishes.
    Drop,
    /// The message is sent twice.
    Duplicate,
}

/// One thing that goes wrong at one message. [`Fault::at_request`] and [`Fault::at_reply`] begin it.
#[derive(Clone, Debug)]
#[must_use = "a fault does nothing before it is injected"]
pub struct Fault {
    pub(super) at: At,
    pub(super) what: FaultAction,
}

impl Fault {
    /// At the `n`th request from now on, counted from 1 over all the connections that are meant.
    pub fn at_request(n: u64) -> At {
        At { direction: Direction::Requests, n: n.max(1), pick: Pick::Any, repeat: false }
    }

    /// At the `n`th reply from now on, counted from 1 over all the connections that are meant.
    pub fn at_reply(n: u64) -> At {
        At { direction: Direction::Replies, ..Fault::at_request(n) }
    }
}

/// Where a fault is to happen; its methods say what is to happen there.
#[derive(Clone, Debug)]
#[must_use = "say what is to happen there"]
pub struct At {
    pub(super) direction: Direction,
    pub(super) n: u64,
    pub(super) pick: Pick,
    pub(super) repeat: bool,
}

impl At {
    /// Only on these connections; messages of others are not counted.
    pub fn on(self, pick: Pick) -> Self {
        At { pick, ..self }
    }

    /// At every message from there on, not at one only.
    pub fn and_every_later_one(self) -> Self {
        At { repeat: true, ..self }
    }

    fn is(self, what: FaultAction) -> Fault {
        Fault { at: self, what }
    }

    /// Both sides are closed; the message is not passed on.
    pub fn cut(self) -> Fault {
        self.is(FaultAction::EndBefore(ConnectionEnd::Close))
    }

    /// The message is passed on, then both sides are closed.
    pub fn cut_after(self) -> Fault {
        self.is(FaultAction::EndAfter(ConnectionEnd::Close))
    }

    /// The unknown outcome: the request is passed on and answered, and both sides are closed instead of passing on the
    /// answer. Answers to earlier requests and later requests pass as usual until then.
    pub fn cut_before_reply(self) -> Fault {
        self.is(FaultAction::EndAtReply(ConnectionEnd::Close))
    }

    /// Like [`At::cut`], with a RST to the client.
    pub fn reset(self) -> Fault {
        self.is(FaultAction::EndBefore(ConnectionEnd::Reset))
    }

    /// Like [`At::cut_after`], with a RST to the client.
    pub fn reset_after(self) -> Fault {
        self.is(FaultAction::EndAfter(ConnectionEnd::Reset))
    }

    /// Like [`At::cut_before_reply`], with a RST to the client.
    pub fn reset_before_reply(self) -> Fault {
        self.is(FaultAction::EndAtReply(ConnectionEnd::Reset))
    }

    /// The message and everything behind it, in this direction of this connection, stands still until it is released.
    pub fn hold(self) -> Fault {
        self.is(FaultAction::Hold(None))
    }

    /// The message and everything behind it stands still until it is released. The server gets it then although the client has
    /// given the request up: the proxy drops what would say so, and keeps the server's side of a closed connection open.
    pub fn deliver_late(self) -> Fault {
        self.is(FaultAction::DeliverLate)
    }

    /// The message, and so everything behind it, comes this much later.
    pub fn delay(self, by: Duration) -> Fault {
        self.is(FaultAction::Hold(Some(by)))
    }

    /// The message vanishes.
    pub fn drop(self) -> Fault {
        self.is(FaultAction::Drop)
    }

    /// The message is sent twice.
    pub fn duplicate(self) -> Fault {
        self.is(FaultAction::Duplicate)
    }
}
