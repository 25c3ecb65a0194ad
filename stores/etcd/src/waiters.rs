//! The waiters of this process: the keys that a queued request watches.

use futures_util::future::select_all;
use lockkeeper_core::{LockRequest, Mode};
use lockkeeper_store_kit::admission::{AdmissionEntry, may_share};
use lockkeeper_store_kit::hash_owner;

use crate::admission::RequestView;
use crate::codec::EntryState;
use crate::keys::{KeyId, Keys};
use crate::proto::WatchCreate;
use crate::queue::QueueSnapshot;
use crate::statements::range_end_of;
use crate::watcher::KeyWatcher;

/// A request that waits in its queues.
pub struct WaitingRequest<'a> {
    pub request: &'a LockRequest,
    pub attempt: KeyId,
    /// The fence base.
    pub base: u64,
}

impl WaitingRequest<'_> {
    /// Waits for a change that may admit this request: usually the end of its predecessor.
    pub async fn wait_for_change(
        &self,
        keys: &Keys,
        key_watcher: &KeyWatcher,
        queues: &[QueueSnapshot],
        revision: i64,
    ) {
        let watches = self.watches_needed(keys, queues, revision);
        if watches.is_empty() {
            // No entry blocks it any more.
            return;
        }
        let mut handles: Vec<_> = watches.into_iter().map(|create| key_watcher.watch(create)).collect();
        let any = handles.iter_mut().map(|entry| {
            // Whatever the event is: the caller reads the queue again.
            Box::pin(entry.next())
        });
        select_all(any).await;
    }

    fn watches_needed(&self, keys: &Keys, queues: &[QueueSnapshot], revision: i64) -> Vec<WatchCreate> {
        const NO_PUTS: i32 = 0;
        let from = |key: Vec<u8>, range_end, filters| WatchCreate {
            key,
            range_end,
            start_revision: revision + 1,
            filters,
            ..WatchCreate::default()
        };
        let mut watches = Vec::new();
        let views: Vec<_> =
            queues.iter().map(|queue| RequestView { queue, attempt: &self.attempt }).collect();
        let blocked =
            views.iter().find_map(|view| Some((view.queue, view.find_blocker(self.request, self.base)?)));
        // Each name alone would admit the request, but not all together: its owner holds some of them in another way.
        // Or a hold that this same attempt released lingers.
        let blocked =
            blocked.or_else(|| queues.iter().find_map(|queue| Some((queue, queue.holders().last()?))));
        if let Some((queue, before)) = blocked {
            let counted = matches!(self.request.mode, Mode::Permit(_));
            watches.push(if counted && queue.holds(before) {
                // The first waiter for a permit: any of the holders may be the next to release.
                let prefix = keys.lock_prefix(&queue.name);
                from(prefix.clone(), range_end_of(&prefix), vec![NO_PUTS])
            } else {
                let filters =
                    if may_share(self.request.mode, before.mode()) { vec![] } else { vec![NO_PUTS] };
                from(before.key.clone(), Vec::new(), filters)
            });
        }
        // If another request of the same owner is granted, this one may re-enter ahead of the queue.
        if let Some(owner) = self.request.owner.as_ref().map(hash_owner) {
            let siblings =
                queues.iter().flat_map(|queue| &queue.all).filter(|entry| entry.owner() == Some(owner));
            let siblings =
                siblings.filter(|entry| entry.is(EntryState::Waiting) && entry.attempt != Some(self.attempt));
            watches.extend(siblings.take(8).map(|entry| from(entry.key.clone(), Vec::new(), Vec::new())));
        }
        watches
    }
}
