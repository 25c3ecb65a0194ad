//! Telling what happens: one watch on everything below the prefix, for as long as somebody listens.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lockkeeper_core::{Event, EventKind, EventStream, Holder, LockName, Result};
use lockkeeper_host::Feed;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::base::fence_at;
use crate::entry::{Entry, One, State};
use crate::proto::{self, Kv, WatchCreate};
use crate::script::{end_of, get, txn};
use crate::store::Shared;

/// Written in the transaction that takes something away: a key that is gone does not say why.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "lowercase")]
pub enum Why {
    Expired {
        names: Vec<LockName>,
    },
    Broken {
        names: Vec<LockName>,
        reason: String,
        /// The rest follows in another transaction, which is the one that is told.
        #[serde(default)]
        part: bool,
    },
    Revoked {
        names: Vec<LockName>,
        reason: String,
        #[serde(default)]
        part: bool,
    },
}

impl Why {
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}

#[derive(Default)]
pub struct Watch {
    desk: Mutex<Desk>,
    ring: Notify,
}

#[derive(Default)]
struct Desk {
    feed: Feed,
    /// Where to begin, while nothing is watched.
    from: i64,
    listens: bool,
}

impl Watch {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    pub async fn watch(&self, prefix: &str) -> Result<EventStream> {
        let look = txn(Vec::new(), vec![get(&self.layout.base())], Vec::new());
        let revision = self.lane.send(look, Vec::new()).await?.revision;
        let mut desk = self.watch.desk();
        let events = desk.feed.add(prefix);
        if !desk.listens {
            (desk.listens, desk.from) = (true, revision + 1);
            self.watch.ring.notify_one();
        }
        Ok(events)
    }

    /// All of these have happened, so what is asked about their leases now is asked once for all of them.
    async fn told(&self, events: Vec<proto::Event>) {
        let mut leases = HashMap::new();
        let mut rest = &events[..];
        while let Some(first) = rest.first().and_then(revision) {
            let (now, later) =
                rest.split_at(rest.iter().take_while(|event| revision(event) == Some(first)).count());
            self.told_together(now, first, &mut leases).await;
            rest = later;
        }
    }

    /// What one transaction did.
    async fn told_together(&self, events: &[proto::Event], revision: i64, leases: &mut HashMap<i64, bool>) {
        let why = events.iter().filter(|event| event.kind == 0).filter_map(|event| event.kv.as_ref());
        let why = why
            .filter(|kv| kv.key == self.layout.why())
            .find_map(|kv| serde_json::from_slice(&kv.value).ok());
        for event in events {
            if let Some((name, kind, holder)) = self.meaning(event, why.as_ref(), leases).await {
                self.tell(name, kind, Some(holder));
            }
        }
        let Ok(fence) = fence_at(self.base(), revision) else { return };
        match why {
            Some(Why::Broken { names, reason, part: false }) => {
                for name in names {
                    self.tell(name, EventKind::Broken { fence, reason: reason.clone() }, None);
                }
            }
            Some(Why::Revoked { names, reason, part: false }) => {
                for name in names {
                    self.tell(name, EventKind::Revoked { fence, reason: reason.clone() }, None);
                }
            }
            _ => {}
        }
    }

    fn tell(&self, name: LockName, kind: EventKind, holder: Option<Holder>) {
        self.watch.desk().feed.tell(&Event { at: self.clock.wall(), name, kind, holder });
    }

    async fn meaning(
        &self,
        event: &proto::Event,
        why: Option<&Why>,
        leases: &mut HashMap<i64, bool>,
    ) -> Option<(LockName, EventKind, Holder)> {
        let kv = event.kv.as_ref()?;
        let (name, _) = self.layout.name(&kv.key)?;
        let read = |kv: &Kv| One::read(&self.layout, &name, kv.clone()).filter(|one| one.entry.is_some());
        let before = event.prev_kv.as_ref().and_then(read);
        let had = before.as_ref().and_then(|one| one.entry.as_ref()).map(|entry| entry.state);
        let is = if event.kind == 0 { read(kv) } else { None };
        let state = is.as_ref().and_then(|one| one.entry.as_ref()).map(|entry| entry.state);
        let one = is.or(before)?;
        let holder = one.entry.as_ref().map(|entry: &Entry| entry.holder.clone())?;
        let fence = one.fence(self.base());
        let ended = match why {
            Some(Why::Expired { names }) if names.contains(&name) => Some(EventKind::Expired { fence }),
            Some(Why::Broken { names, .. }) if names.contains(&name) => None,
            _ if state.is_none() && had == Some(State::Granted) && self.lease_ended(&one, leases).await => {
                Some(EventKind::Expired { fence })
            }
            _ => Some(EventKind::Released { fence }),
        };
        let kind = match (had, state) {
            (None | Some(State::Waiting), Some(State::Granted)) => EventKind::Granted { fence },
            (None, Some(State::Waiting)) => EventKind::Waiting,
            (Some(State::Waiting), None) => EventKind::Left,
            (Some(State::Granted), None | Some(State::Lingering | State::Delayed)) => ended?,
            _ => return None,
        };
        Some((name, kind, holder))
    }

    /// Nobody said why a key went. If its lease is gone as well, it went with it.
    async fn lease_ended(&self, one: &One, leases: &mut HashMap<i64, bool>) -> bool {
        if let Some(ended) = leases.get(&one.lease) {
            return *ended;
        }
        let ended = matches!(self.link.look_at_lease(one.lease, false).await, Ok(None));
        leases.insert(one.lease, ended);
        ended
    }
}

fn revision(event: &proto::Event) -> Option<i64> {
    event.kv.as_ref().map(|kv| kv.mod_revision)
}

/// Listens while somebody watches.
pub async fn attend(shared: Arc<Shared>) {
    loop {
        let from = {
            let mut desk = shared.watch.desk();
            desk.feed.tidy();
            desk.listens = desk.feed.any();
            desk.listens.then_some(desk.from)
        };
        let Some(start_revision) = from else {
            shared.watch.ring.notified().await;
            continue;
        };
        let key = shared.layout.all("");
        let range_end = end_of(&key);
        let create = WatchCreate { key, range_end, start_revision, prev_kv: true, ..WatchCreate::default() };
        let mut watching = shared.spy.watch(create);
        loop {
            let (events, lost) = watching.all().await;
            shared.told(events).await;
            let mut desk = shared.watch.desk();
            if lost {
                desk.feed.miss();
                // From now on.
                desk.from = 0;
                break;
            }
            desk.feed.tidy();
            if !desk.feed.any() {
                break;
            }
        }
    }
}
