//! Inspect and list: the view of a lock and of all locks.

use std::sync::Arc;

use futures_util::future::join_all;
use lockkeeper_core::{LockName, LockPage, LockView, Page, Result};

use crate::catch_up::CatchUp;
use crate::client::ZooKeeperClient;
use crate::error::Failure;
use crate::fence_base::FenceBase;
use crate::hold_back::HoldBacks;
use crate::keys;
use crate::queue::{QueueEntry, QueueSnapshot};
use crate::read_queue::QueueReader;
use crate::session::Session;

/// How many queues are read at a time.
const READ_BATCH: usize = 64;

/// Builds the views.
pub struct Inspector {
    pub client: Arc<ZooKeeperClient>,
    pub base: Arc<FenceBase>,
    pub catch_up: Arc<CatchUp>,
    pub hold_backs: Arc<HoldBacks>,
    pub queues: Arc<QueueReader>,
}

impl Inspector {
    pub async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        let session = self.client.connection.session().await?;
        self.sync_and_check_base(&session).await?;
        Ok(self.read_view(&session, name).await?)
    }

    /// Makes the server catch up, and checks that the fence base is current.
    async fn sync_and_check_base(&self, session: &Arc<Session>) -> Result<(), Failure> {
        let base = self.client.keys.base(self.base.get().number);
        let (caught_up, found) = tokio::join!(self.catch_up.catch_up(session), session.get(&base));
        caught_up?;
        match found {
            Ok(_) => Ok(()),
            Err(failure) if failure.is(&zookeeper_client::Error::NoNode) => {
                self.base.refresh(session, false).await
            }
            Err(failure) => Err(failure),
        }
    }

    async fn read_view(&self, session: &Session, name: &LockName) -> Result<Option<LockView>, Failure> {
        let mut queue = self.queues.list_queue(session, name).await?;
        // The first entries, re-entries wherever they are, and as many waiters as a view shows.
        self.queues
            .read_entries(session, &mut queue, |i, entry| i <= LockView::QUEUE_SHOWN || entry.owned)
            .await?;
        self.hold_backs.read(session, &mut queue).await?;
        Ok(self.to_view(&queue))
    }

    fn to_view(&self, queue: &QueueSnapshot) -> Option<LockView> {
        let base = self.base.get().number;
        let mut held: Vec<_> = queue.holders().map(|entry| entry.holder_view(base)).collect();
        held.extend(queue.hold_backs.iter().filter_map(|hold_back| hold_back.holder_view()));
        let delayed = queue
            .hold_backs
            .iter()
            .filter(|hold_back| !hold_back.lingers())
            .map(|hold_back| hold_back.left_ms.max(1))
            .max();
        let waiting = queue.waiters().count();
        let shown: Vec<_> =
            queue.waiters().take(LockView::QUEUE_SHOWN).map(QueueEntry::waiter_view).collect();
        let nothing = held.is_empty() && waiting == 0 && delayed.is_none();
        let name = queue.name.clone();
        (!nothing).then_some(LockView { name, held, queue: shown, waiting, delayed_ms: delayed })
    }

    pub async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        let session = self.client.connection.session().await?;
        self.sync_and_check_base(&session).await?;
        let found = Failure::if_exists(session.children(self.client.keys.root()).await)?;
        let children = found.map_or(Vec::new(), |(children, _)| children);
        let mut names: Vec<LockName> = children.iter().filter_map(|child| keys::decode(child)).collect();
        names.retain(|name| {
            name.as_str().starts_with(prefix) && page.after.as_ref().is_none_or(|after| name > after)
        });
        names.sort();
        let mut locks: Vec<LockView> = Vec::new();
        // Empty queue nodes stay for a while: they are no locks.
        for batch in names.chunks(READ_BATCH) {
            for view in join_all(batch.iter().map(|name| self.read_view(&session, name))).await {
                locks.extend(view?);
            }
            if locks.len() > page.size() {
                break;
            }
        }
        let more = locks.len() > page.size();
        locks.truncate(page.size());
        let next = if more { locks.last().map(|view| view.name.clone()) } else { None };
        Ok(LockPage { locks, next })
    }
}
