//! Events: what a watch reports.
//!
//! While a client watches, each transaction that changes a lock also creates an event node, and the watchers read
//! those nodes in order. The end of the watch is stored in the fence base node, whose version every such transaction
//! checks. So a transaction that does not know of a new watch is rejected, and no event is missed after a watch has
//! begun.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{Event, EventKind, EventStream, Fence, Holder, LockName, Names, Result};
use lockkeeper_store_kit::EventHub;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use zookeeper_client as zk;

use crate::connection::{MultiReply, Session};
use crate::error::Failure;
use crate::fence_base::{FenceBase, fence_at};
use crate::statements::{TxnOp, create_ephemeral};
use crate::store::StoreInner;

/// For how long a watch is announced. It is announced again after half of that.
const ANNOUNCED_FOR: Duration = Duration::from_secs(120);
/// How long event nodes are kept.
const KEEP_EVENTS: Duration = Duration::from_secs(30);
const RETRY_DELAY: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventTag {
    Granted,
    Released,
    Expired,
    Broken,
    Revoked,
    Waiting,
    Left,
}

/// The content of an event node.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct StoredEvent {
    name: LockName,
    #[serde(rename = "event")]
    tag: EventTag,
    /// The fence, if it is not made from the zxid of the event node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fence: Option<Fence>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    holder: Option<Holder>,
}

#[derive(Default)]
pub struct Watchers {
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
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StoreInner {
    /// Whether a client watches, as far as this process knows.
    pub fn is_watched(&self) -> bool {
        self.base().watched > self.connection.known_ensemble_time().unwrap_or(0)
    }

    /// The operation that creates an event node, if a client watches.
    pub fn event(
        &self,
        name: &LockName,
        tag: EventTag,
        fence: Option<Fence>,
        holder: Option<&Holder>,
    ) -> Option<TxnOp> {
        self.is_watched().then(|| {
            self.event_op(&StoredEvent {
                name: name.clone(),
                tag,
                fence,
                reason: None,
                holder: holder.cloned(),
            })
        })
    }

    /// The same for a break or a revocation, with its reason.
    pub fn event_with_reason(&self, name: &LockName, tag: EventTag, reason: &str) -> Option<TxnOp> {
        let reason = Some(reason.to_owned());
        let event = StoredEvent { name: name.clone(), tag, fence: None, reason, holder: None };
        self.is_watched().then(|| self.event_op(&event))
    }

    fn event_op(&self, event: &StoredEvent) -> TxnOp {
        create_ephemeral(format!("{}/e-", self.keys.events()), serde_json::to_vec(event).unwrap_or_default())
    }

    /// Emits an event that changes no lock, without waiting for success.
    pub async fn emit_event(self: &Arc<Self>, names: &Names, tag: EventTag, holder: &Holder) {
        let ops: Vec<TxnOp> =
            names.iter().filter_map(|name| self.event(name, tag, None, Some(holder))).collect();
        if let (false, Ok(session)) = (ops.is_empty(), self.connection.session().await) {
            _ = self.write(&session, &ops).await;
        }
    }

    /// Reads the fence base again after a rejected transaction. True: it differs from `before`, and the transaction
    /// can be retried.
    pub async fn base_changed(&self, session: &Session, before: FenceBase) -> Result<bool, Failure> {
        self.refresh_base(session, false).await?;
        Ok(before != self.base())
    }

    /// Creates the parent of the event nodes if a client watches and an administrator has deleted it: without the
    /// parent every transaction with an event fails. The node is persistent, because it may be empty while a watch is
    /// announced.
    pub async fn ensure_events_node(&self, session: &Session) -> Result<(), Failure> {
        if self.is_watched() {
            session.create_with_parents(&self.keys.events(), self.connection.acls()).await?;
        }
        Ok(())
    }

    /// Deletes the event nodes of a transaction after a while.
    pub fn delete_events_later(self: &Arc<Self>, done: &MultiReply) {
        let events = self.keys.events();
        let paths: Vec<String> =
            done.created().filter(|path| path.starts_with(&events)).map(str::to_owned).collect();
        if paths.is_empty() {
            return;
        }
        let shared = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(KEEP_EVENTS).await;
            let Ok(session) = shared.connection.session().await else { return };
            for path in paths {
                _ = session.delete(&path).await;
            }
        });
    }

    pub async fn watch(self: &Arc<Self>, prefix: &str) -> Result<EventStream> {
        let session = self.connection.session().await?;
        session.create_with_parents(&self.keys.events(), self.connection.acls()).await?;
        let mut next = self.next_event(&session).await?;
        self.announce_watch(&session).await?;
        let mut state = self.watchers.state();
        let events = state.hub.add(prefix);
        next = state.next.unwrap_or(next);
        state.next = Some(next);
        self.watchers.changed.notify_one();
        Ok(events)
    }

    async fn next_event(&self, session: &Session) -> Result<u64, Failure> {
        let found = Failure::if_exists(session.children(&self.keys.events()).await)?;
        let last = found.iter().flat_map(|(children, _)| children).filter_map(|child| number(child)).max();
        Ok(last.map_or(0, |last| last + 1))
    }

    async fn announce_watch(&self, session: &Session) -> Result<(), Failure> {
        loop {
            let (base, time) = (self.base(), self.ensemble_time(session).await?);
            let until = time + ANNOUNCED_FOR.as_millis() as u64;
            let written = session.set(&self.keys.base(base.number), until.to_string().as_bytes(), -1).await;
            if Failure::if_exists(written)?.is_some() {
                return self.refresh_base(session, false).await;
            }
            self.refresh_base(session, false).await?;
        }
    }

    /// Reads new events, and delivers them to the watchers of this process.
    async fn deliver_events(&self, session: &Session, children: Vec<String>) -> Result<(), Failure> {
        let mut fresh: Vec<(u64, String)> =
            children.into_iter().filter_map(|child| Some((number(&child)?, child))).collect();
        fresh.sort();
        let next = self.watchers.state().next.unwrap_or(0);
        for (number, child) in fresh.into_iter().filter(|(number, _)| *number >= next) {
            let path = format!("{}/{child}", self.keys.events());
            let found = Failure::if_exists(session.get(&path).await)?;
            let mut state = self.watchers.state();
            let expected = state.next.replace(number + 1);
            let event = found
                .and_then(|(data, stat)| Some((serde_json::from_slice::<StoredEvent>(&data).ok()?, stat)));
            if expected.is_some_and(|expected| expected != number) || event.is_none() {
                state.hub.miss();
            }
            let Some((event, stat)) = event else { continue };
            let fence = event
                .fence
                .map_or_else(|| fence_at(self.base().number, stat.czxid), Ok)
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
            state.hub.emit(&Event { at: self.clock.wall(), name: event.name, kind, holder: event.holder });
        }
        Ok(())
    }

    /// Delivers the events that exist, then waits for a change.
    async fn listen_once(&self, session: &Session) -> Result<(), Failure> {
        let events = self.keys.events();
        let found = session.call(session.client.list_and_watch_children(&events)).await;
        let (children, watcher) = match found {
            Err(failure) if failure.is(&zk::Error::NoNode) => {
                // An administrator has deleted everything.
                session.create_with_parents(&events, self.connection.acls()).await?;
                let mut state = self.watchers.state();
                state.hub.miss();
                state.next = Some(0);
                return Ok(());
            }
            found => found?,
        };
        self.deliver_events(session, children).await?;
        tokio::select! {
            _ = watcher.changed() => {}
            () = tokio::time::sleep(self.options.poll) => {}
        }
        let watched_long = self.base().watched
            > self.connection.known_ensemble_time().unwrap_or(0) + ANNOUNCED_FOR.as_millis() as u64 / 2;
        if watched_long { Ok(()) } else { self.announce_watch(session).await }
    }
}

fn number(child: &str) -> Option<u64> {
    child.strip_prefix("e-")?.parse().ok()
}

/// Delivers events while this process has watchers.
pub async fn run(shared: Arc<StoreInner>) {
    loop {
        let is_watched = {
            let mut state = shared.watchers.state();
            state.hub.sweep();
            if !state.hub.any() {
                state.next = None;
            }
            state.next.is_some()
        };
        if !is_watched {
            shared.watchers.changed.notified().await;
            continue;
        }
        let round = match shared.connection.session().await {
            Ok(session) => shared.listen_once(&session).await,
            Err(failure) => Err(failure),
        };
        if let Err(failure) = round {
            tracing::debug!(?failure, "failed to read events; watchers get them later, retrying");
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }
}
