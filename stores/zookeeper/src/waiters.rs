//! How a waiting request waits: the nodes that it watches.

use std::future::pending;
use std::pin::Pin;
use std::time::Duration;

use futures_util::future::select_all;
use lockkeeper_core::Mode;
use lockkeeper_store_kit::admission::{AdmissionEntry, may_share};
use lockkeeper_store_kit::hash_owner;

use crate::acquire::{PendingAcquire, RETRY_DELAY};
use crate::admission;
use crate::queue::QueueSnapshot;
use crate::session::Session;

type Wakeup<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

impl PendingAcquire<'_> {
    /// Waits for a change that may admit this request: as a rule, the deletion of the entry ahead.
    pub async fn wait_for_change(&self, queues: &[QueueSnapshot]) {
        let Some(session) = &self.session else { return };
        let wakeups = self.wakeups(session, queues);
        if wakeups.is_empty() {
            // No entry is ahead any more.
            return;
        }
        // After any change the queue is read again.
        select_all(wakeups).await;
    }

    fn wakeups<'a>(&'a self, session: &'a Session, queues: &'a [QueueSnapshot]) -> Vec<Wakeup<'a>> {
        let mut wakeups: Vec<Wakeup<'a>> = Vec::new();
        for hold_back in queues.iter().flat_map(|queue| &queue.hold_backs) {
            wakeups.push(Box::pin(node_changed(session, &hold_back.path, None)));
            wakeups.push(Box::pin(tokio::time::sleep(Duration::from_millis(hold_back.left_ms + 1))));
        }
        let views = admission::views(queues, &self.own_nodes);
        let before =
            views.iter().filter_map(|view| Some((view.queue, view.entry_to_watch(self.request.mode)?)));
        // An exclusive request needs all queues, so it waits for one after the other. A request that can share a lock
        // may not be blocked by the entry ahead in one queue, but by an entry in another.
        let queues_at_once = if self.request.mode == Mode::Exclusive { 1 } else { usize::MAX };
        for (queue, before) in before.take(queues_at_once) {
            let counted = matches!(self.request.mode, Mode::Permit(_));
            wakeups.push(if counted && queue.holds(before) {
                // The first waiter for a permit: any of the permit holders may release next.
                Box::pin(self.queue_changed(session, queue))
            } else if may_share(self.request.mode, before.mode()) {
                Box::pin(node_changed(session, &before.path, before.written_zxid()))
            } else {
                Box::pin(node_deleted(session, &before.path))
            });
        }
        // A grant to another request of the same owner admits this one, past the waiters.
        if let Some(owner) = self.request.owner.as_ref().map(hash_owner) {
            let siblings =
                queues.iter().flat_map(|queue| &queue.entries).filter(|entry| entry.owner() == Some(owner));
            let siblings = siblings.filter(|entry| !self.own_nodes.contains(&entry.path));
            wakeups.extend(siblings.take(8).map(|entry| {
                Box::pin(node_changed(session, &entry.path, entry.written_zxid())) as Wakeup<'a>
            }));
        }
        wakeups
    }

    async fn queue_changed(&self, session: &Session, queue: &QueueSnapshot) {
        let dir = self.acquirer.client.keys.queue(&queue.name);
        let Some(_reservation) = session.reserve_watch(&dir) else { return pending().await };
        match session.call(session.client.get_and_watch_children(&dir)).await {
            // A change since the queue was read shows in the reply.
            Ok((_, stat, watcher)) if stat.pzxid == queue.children_zxid => _ = watcher.changed().await,
            Ok(_) => {}
            Err(_) => tokio::time::sleep(RETRY_DELAY).await,
        }
    }
}

/// Waits for the deletion of a node, and for nothing else. A queue entry has no children, so a watch of its children
/// reports only its deletion, and not its grant.
async fn node_deleted(session: &Session, path: &str) {
    let Some(_reservation) = session.reserve_watch(path) else { return pending().await };
    match session.call(session.client.list_and_watch_children(path)).await {
        Ok((_, watcher)) => _ = watcher.changed().await,
        Err(failure) if failure.is(&zookeeper_client::Error::NoNode) => {}
        Err(_) => tokio::time::sleep(RETRY_DELAY).await,
    }
}

/// Waits for the deletion of a node, or for another write than `read_zxid`, the one that the decision used. A write
/// between that read and this call shows in the reply: the watch does not report it.
async fn node_changed(session: &Session, path: &str, read_zxid: Option<i64>) {
    let Some(_reservation) = session.reserve_watch(path) else { return pending().await };
    match session.call(session.client.get_and_watch_data(path)).await {
        Ok((_, stat, _)) if read_zxid.is_some_and(|read_zxid| read_zxid != stat.mzxid) => {}
        Ok((_, _, watcher)) => _ = watcher.changed().await,
        Err(failure) if failure.is(&zookeeper_client::Error::NoNode) => {}
        Err(_) => tokio::time::sleep(RETRY_DELAY).await,
    }
}
