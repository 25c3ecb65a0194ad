//! Telling what happens. While somebody watches, whoever changes a lock says so in the same transaction, in a node of its
//! own; those who watch read these nodes in order. That somebody watches is written beside the base of the fences, which
//! every transaction checks: so from the moment on at which a watch began, nothing is left out.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{Event, EventKind, EventStream, Fence, Holder, LockName, Names, Result};
use lockkeeper_host::Feed;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use zookeeper_client as zk;

use crate::base::{Base, fence_at};
use crate::fault::Failure;
use crate::link::{Done, Session};
use crate::script::{Op, stand};
use crate::store::Shared;

/// How long a watch is told to last, and after how much of it that is told anew.
const LASTS: Duration = Duration::from_secs(120);
/// How long what happened stays to be read.
const STAYS: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Word {
    Granted,
    Released,
    Expired,
    Broken,
    Revoked,
    Waiting,
    Left,
}

/// What is in the node of an event.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Told {
    name: LockName,
    word: Word,
    /// If it is another one than that of the write itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fence: Option<Fence>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    holder: Option<Holder>,
}

#[derive(Default)]
pub struct Watch {
    desk: Mutex<Desk>,
    ring: Notify,
}

#[derive(Default)]
struct Desk {
    feed: Feed,
    /// The number of the next event. `None`: nobody listens.
    next: Option<u64>,
}

impl Watch {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Whether somebody watches, as far as the transactions of now are concerned.
    pub fn is_watched(&self) -> bool {
        self.base().watched > self.link.tide().unwrap_or(0)
    }

    /// The step that tells of something, if somebody watches.
    pub fn event(
        &self,
        name: &LockName,
        word: Word,
        fence: Option<Fence>,
        holder: Option<&Holder>,
    ) -> Option<Op> {
        self.is_watched().then(|| {
            self.told(&Told { name: name.clone(), word, fence, reason: None, holder: holder.cloned() })
        })
    }

    /// The same for what somebody did to the lock, and why.
    pub fn event_because(&self, name: &LockName, word: Word, reason: &str) -> Option<Op> {
        let reason = Some(reason.to_owned());
        let told = Told { name: name.clone(), word, fence: None, reason, holder: None };
        self.is_watched().then(|| self.told(&told))
    }

    fn told(&self, told: &Told) -> Op {
        stand(format!("{}/e-", self.layout.events()), serde_json::to_vec(told).unwrap_or_default())
    }

    /// Tells of something that changes nothing. Nobody waits for it.
    pub async fn tell(self: &Arc<Self>, names: &Names, word: Word, holder: &Holder) {
        let ops: Vec<Op> =
            names.iter().filter_map(|name| self.event(name, word, None, Some(holder))).collect();
        if let (false, Ok(session)) = (ops.is_empty(), self.link.session().await) {
            _ = self.write(&session, &ops).await;
        }
    }

    /// Whether what was refused may be tried again, with what is known now. `before`: what it was made with.
    pub async fn base_moved(&self, session: &Session, before: Base) -> Result<bool, Failure> {
        self.learn_base(session, false).await?;
        Ok(before != self.base())
    }

    /// Makes the node that events are below, if one is needed and somebody has taken it away: without it nothing could be told,
    /// and so nothing done. It stays, though it is empty now and then: those who watched last are gone by then.
    pub async fn make_events(&self, session: &Session) -> Result<(), Failure> {
        if self.is_watched() {
            session.make_all(&self.layout.events(), self.link.acls()).await?;
        }
        Ok(())
    }

    /// Events are there for a while only.
    pub fn forget_events_later(self: &Arc<Self>, done: &Done) {
        let events = self.layout.events();
        let paths: Vec<String> =
            done.created().filter(|path| path.starts_with(&events)).map(str::to_owned).collect();
        if paths.is_empty() {
            return;
        }
        let shared = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(STAYS).await;
            let Ok(session) = shared.link.session().await else { return };
            for path in paths {
                _ = session.delete(&path).await;
            }
        });
    }

    pub async fn watch(self: &Arc<Self>, prefix: &str) -> Result<EventStream> {
        let session = self.link.session().await?;
        session.make_all(&self.layout.events(), self.link.acls()).await?;
        let mut next = self.next_event(&session).await?;
        self.say_that_we_watch(&session).await?;
        let mut desk = self.watch.desk();
        let events = desk.feed.add(prefix);
        next = desk.next.unwrap_or(next);
        desk.next = Some(next);
        self.watch.ring.notify_one();
        Ok(events)
    }

    async fn next_event(&self, session: &Session) -> Result<u64, Failure> {
        let found = Failure::gone(session.children(&self.layout.events()).await)?;
        let last = found.iter().flat_map(|(children, _)| children).filter_map(|child| number(child)).max();
        Ok(last.map_or(0, |last| last + 1))
    }

    async fn say_that_we_watch(&self, session: &Session) -> Result<(), Failure> {
        loop {
            let (base, time) = (self.base(), self.ensemble_time(session).await?);
            let until = time + LASTS.as_millis() as u64;
            let said = session.set(&self.layout.base(base.number), until.to_string().as_bytes(), -1).await;
            if Failure::gone(said)?.is_some() {
                return self.learn_base(session, false).await;
            }
            self.learn_base(session, false).await?;
        }
    }

    /// Reads what happened since the last time, and passes it on.
    async fn pass_on(&self, session: &Session, children: Vec<String>) -> Result<(), Failure> {
        let mut fresh: Vec<(u64, String)> =
            children.into_iter().filter_map(|child| Some((number(&child)?, child))).collect();
        fresh.sort();
        let next = self.watch.desk().next.unwrap_or(0);
        for (number, child) in fresh.into_iter().filter(|(number, _)| *number >= next) {
            let path = format!("{}/{child}", self.layout.events());
            let found = Failure::gone(session.get(&path).await)?;
            let mut desk = self.watch.desk();
            let expected = desk.next.replace(number + 1);
            let told =
                found.and_then(|(data, stat)| Some((serde_json::from_slice::<Told>(&data).ok()?, stat)));
            if expected.is_some_and(|expected| expected != number) || told.is_none() {
                desk.feed.miss();
            }
            let Some((told, stat)) = told else { continue };
            let fence =
                told.fence.map_or_else(|| fence_at(self.base().number, stat.czxid), Ok).unwrap_or(Fence::MAX);
            let kind = match told.word {
                Word::Granted => EventKind::Granted { fence },
                Word::Released => EventKind::Released { fence },
                Word::Expired => EventKind::Expired { fence },
                Word::Broken => EventKind::Broken { fence, reason: told.reason.unwrap_or_default() },
                Word::Revoked => EventKind::Revoked { fence, reason: told.reason.unwrap_or_default() },
                Word::Waiting => EventKind::Waiting,
                Word::Left => EventKind::Left,
            };
            desk.feed.tell(&Event { at: self.clock.wall(), name: told.name, kind, holder: told.holder });
        }
        Ok(())
    }

    /// One round: reads what there is, and waits for more.
    async fn listen(&self, session: &Session) -> Result<(), Failure> {
        let events = self.layout.events();
        let found = session.hear(session.client.list_and_watch_children(&events)).await;
        let (children, watcher) = match found {
            Err(failure) if failure.is(&zk::Error::NoNode) => {
                // Everything was deleted.
                session.make_all(&events, self.link.acls()).await?;
                let mut desk = self.watch.desk();
                desk.feed.miss();
                desk.next = Some(0);
                return Ok(());
            }
            found => found?,
        };
        self.pass_on(session, children).await?;
        tokio::select! {
            _ = watcher.changed() => {}
            () = tokio::time::sleep(self.options.poll) => {}
        }
        let watched_long = self.base().watched > self.link.tide().unwrap_or(0) + LASTS.as_millis() as u64 / 2;
        if watched_long { Ok(()) } else { self.say_that_we_watch(session).await }
    }
}

fn number(child: &str) -> Option<u64> {
    child.strip_prefix("e-")?.parse().ok()
}

/// Listens while somebody watches.
pub async fn attend(shared: Arc<Shared>) {
    loop {
        let listens = {
            let mut desk = shared.watch.desk();
            desk.feed.tidy();
            if !desk.feed.any() {
                desk.next = None;
            }
            desk.next.is_some()
        };
        if !listens {
            shared.watch.ring.notified().await;
            continue;
        }
        let round = match shared.link.session().await {
            Ok(session) => shared.listen(&session).await,
            Err(failure) => Err(failure),
        };
        if let Err(failure) = round {
            tracing::debug!(?failure, "could not listen, will try again");
            tokio::time::sleep(PAUSE).await;
        }
    }
}
