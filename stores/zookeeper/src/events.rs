//! Events: what a watch reports.
//!
//! While a client watches, each transaction that changes a lock also creates an event node, and the watchers read
//! those nodes in order. The end of the watch is stored in the fence base node, whose version every such transaction
//! checks. So a transaction that does not know of a new watch is rejected, and no event is missed after a watch has
//! begun.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper_core::{Event, EventKind, EventStream, Fence, IgnorePoison, Result};
use lockkeeper_store_kit::EventHub;
use tokio::sync::Notify;
use zookeeper_client as zk;

use crate::client::ZooKeeperClient;
use crate::codec::{EventTag, StoredEvent};
use crate::error::Failure;
use crate::fence_base::{FenceBase, fence_at};
use crate::session::Session;

/// For how long a watch is announced. It is announced again after half of that.
const ANNOUNCED_FOR: Duration = Duration::from_secs(120);
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// The watchers of this process.
pub struct Watchers {
    client: Arc<ZooKeeperClient>,
    base: Arc<FenceBase>,
    /// How often the events are read without a notification.
    poll: Duration,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    hub: EventHub,
    /// The sequence number of the next event. `None`: this process has no watcher.
    next: Option<u64>,
}

impl Watchers {
    pub fn new(client: Arc<ZooKeeperClient>, base: Arc<FenceBase>, poll: Duration) -> Self {
        Watchers { client, base, poll, state: Mutex::default(), changed: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }

    pub async fn watch(&self, prefix: &str) -> Result<EventStream> {
        let session = self.client.connection.session().await?;
        session.create_with_parents(&self.client.keys.events(), self.client.connection.acls()).await?;
        let mut next = self.next_event(&session).await?;
        self.announce_watch(&session).await?;
        let mut state = self.state();
        let events = state.hub.add(prefix);
        next = state.next.unwrap_or(next);
        state.next = Some(next);
        self.changed.notify_one();
        Ok(events)
    }

    async fn next_event(&self, session: &Session) -> Result<u64, Failure> {
        let found = Failure::if_exists(session.children(&self.client.keys.events()).await)?;
        let last = found.iter().flat_map(|(children, _)| children).filter_map(|child| number(child)).max();
        Ok(last.map_or(0, |last| last + 1))
    }

    async fn announce_watch(&self, session: &Session) -> Result<(), Failure> {
        loop {
            let (base, time) = (self.base.get(), self.client.ensemble_time(session).await?);
            let until = time + ANNOUNCED_FOR.as_millis() as u64;
            let written =
                session.set(&self.client.keys.base(base.number), until.to_string().as_bytes(), -1).await;
            if Failure::if_exists(written)?.is_some() {
                return self.base.refresh(session, false).await;
            }
            self.base.refresh(session, false).await?;
        }
    }

    /// Reads new events, and delivers them to the watchers of this process.
    async fn deliver_events(&self, session: &Session, children: Vec<String>) -> Result<(), Failure> {
        let mut fresh: Vec<(u64, String)> =
            children.into_iter().filter_map(|child| Some((number(&child)?, child))).collect();
        fresh.sort();
        let next = self.state().next.unwrap_or(0);
        for (number, child) in fresh.into_iter().filter(|(number, _)| *number >= next) {
            let path = format!("{}/{child}", self.client.keys.events());
            let found = Failure::if_exists(session.get(&path).await)?;
            let mut state = self.state();
            let expected = state.next.replace(number + 1);
            let event = found
                .and_then(|(data, stat)| Some((serde_json::from_slice::<StoredEvent>(&data).ok()?, stat)));
            if expected.is_some_and(|expected| expected != number) || event.is_none() {
                state.hub.miss();
            }
            let Some((event, stat)) = event else { continue };
            let fence = event
                .fence
                .map_or_else(|| fence_at(self.base.get().number, stat.czxid), Ok)
                .unwrap_or(Fence::MAX);
            let kind = match event.tag {
                EventTag::Granted => EventKind::Granted { fence },
                EventTag::Released => EventKind::Released { fence },
                EventTag::Expired => EventKind::Expired { fence },
                EventTag::Broken => EventKind::Broken { fence, reason: event.reason.unwrap_or_default() },
                EventTag::Revoked => EventKind::Revoked { fence, reason: event.reason.unwrap_or_default() },
                EventTag::Waiting => EventKind::Waiting,
                EventTag::Left => EventKind::Left,
            };
            state.hub.emit(&Event {
                at: self.client.clock.wall(),
                name: event.name,
                kind,
                holder: event.holder,
            });
        }
        Ok(())
    }

    /// Delivers the events that exist, then waits for a change.
    async fn listen_once(&self, session: &Session) -> Result<(), Failure> {
        let events = self.client.keys.events();
        let found = session.call(session.client.list_and_watch_children(&events)).await;
        let (children, watcher) = match found {
            Err(failure) if failure.is(&zk::Error::NoNode) => {
                // An administrator has deleted everything.
                session.create_with_parents(&events, self.client.connection.acls()).await?;
                let mut state = self.state();
                state.hub.miss();
                state.next = Some(0);
                return Ok(());
            }
            found => found?,
        };
        self.deliver_events(session, children).await?;
        tokio::select! {
            _ = watcher.changed() => {}
            () = tokio::time::sleep(self.poll) => {}
        }
        let watched_long = self.base.get().watched
            > self.client.connection.known_ensemble_time().unwrap_or(0)
                + ANNOUNCED_FOR.as_millis() as u64 / 2;
        if watched_long { Ok(()) } else { self.announce_watch(session).await }
    }

    /// Delivers events while this process has watchers.
    pub async fn run(self: Arc<Self>) {
        loop {
            let is_watched = {
                let mut state = self.state();
                state.hub.sweep();
                if !state.hub.any() {
                    state.next = None;
                }
                state.next.is_some()
            };
            if !is_watched {
                self.changed.notified().await;
                continue;
            }
            let round = match self.client.connection.session().await {
                Ok(session) => self.listen_once(&session).await,
                Err(failure) => Err(failure),
            };
            if let Err(failure) = round {
                tracing::debug!(?failure, "failed to read events; watchers get them later, retrying");
                tokio::time::sleep(RETRY_DELAY).await;
            }
        }
    }
}

fn number(child: &str) -> Option<u64> {
    child.strip_prefix("e-")?.parse().ok()
}
