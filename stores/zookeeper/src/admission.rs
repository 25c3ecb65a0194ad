//! Admission: core's rule, applied to the queues as they were read.
//!
//! No request can be inserted before an existing node, so a lock that is free for a request stays free for it. Only a re-entry passes waiters,
//! and its transaction checks that the hold that it re-enters still exists.

use lockkeeper_core::admission::ActiveHold;
use lockkeeper_core::{Busy, LockName, LockView, Mode};
use lockkeeper_store_kit::admission::{AdmissionEntry, RequestQueue};

use crate::codec::RequestState;
use crate::queue::{HoldBack, QueueEntry, QueueSnapshot};

/// A queue, as it was read for the request with this node.
#[derive(Clone, Copy)]
pub struct RequestView<'a> {
    pub queue: &'a QueueSnapshot,
    pub own: &'a str,
}

/// The queues, as they were read for the request with these nodes.
pub fn views<'a>(queues: &'a [QueueSnapshot], own: &'a [String]) -> Vec<RequestView<'a>> {
    queues.iter().zip(own).map(|(queue, own)| RequestView { queue, own }).collect()
}

impl RequestQueue for RequestView<'_> {
    type Entry = QueueEntry;

    fn name(&self) -> &LockName {
        &self.queue.name
    }

    fn other_holders(&self) -> impl Iterator<Item = &QueueEntry> {
        self.queue.holders().filter(|entry| entry.path != self.own)
    }

    fn active_holds(&self, base: u64) -> impl Iterator<Item = ActiveHold> {
        let held = self.other_holders().map(move |entry| ActiveHold {
            owner: entry.owner(),
            mode: entry.mode(),
            fence: entry.fence(base),
        });
        let kept = self.queue.hold_backs.iter().filter_map(HoldBack::holder_view);
        held.chain(kept.map(|held| ActiveHold { owner: None, mode: held.mode, fence: held.fence }))
    }

    fn waiting_ahead(&self) -> impl Iterator<Item = &QueueEntry> {
        self.ahead()
    }

    fn is_held_back(&self) -> bool {
        self.queue.hold_backs.iter().any(|hold_back| !hold_back.lingers())
    }
}

impl<'a> RequestView<'a> {
    fn position(self) -> usize {
        self.queue.position(self.own).unwrap_or(self.queue.entries.len())
    }

    fn ahead(self) -> impl Iterator<Item = &'a QueueEntry> {
        let ahead = &self.queue.entries[self.queue.sharers_ahead..self.position()];
        ahead.iter().filter(move |entry| !self.queue.holds(entry))
    }

    /// The last entry ahead of the request. `None`: there is no entry ahead.
    pub fn predecessor(self) -> Option<&'a QueueEntry> {
        let (entries, position) = (&self.queue.entries, self.position());
        // A re-entry was enqueued later than this request, and still blocks it.
        let later = entries.iter().skip(position + 1).find(|entry| entry.is_in(RequestState::Granted));
        entries[..position].last().or(later)
    }

    /// The entry whose grant or deletion may admit a request that can share the lock: the last one ahead that does not hold. The nodes are
    /// read one after the other, so an entry further back may already have been read as a holder.
    pub fn entry_to_watch(self, mode: Mode) -> Option<&'a QueueEntry> {
        let waiting_ahead = self.ahead().last().filter(|_| mode != Mode::Exclusive);
        waiting_ahead.or_else(|| self.predecessor())
    }
}

/// The holders that block a request whose wait time is over.
pub fn busy(own: &[String], queues: &[QueueSnapshot], base: u64) -> Busy {
    let views = views(queues, own);
    let blocks = |view: &&RequestView<'_>| view.predecessor().is_some() || !view.queue.hold_backs.is_empty();
    let RequestView { queue, own } = *views.iter().find(blocks).unwrap_or(&views[0]);
    let held = queue.holders().filter(|entry| entry.path != own).map(|entry| entry.holder_view(base));
    let kept = queue.hold_backs.iter().filter_map(|hold_back| hold_back.holder_view());
    Busy {
        name: queue.name.clone(),
        held: held.chain(kept).take(LockView::BUSY).collect(),
        waiting: queue.waiters().filter(|entry| entry.path != own).count(),
    }
}
