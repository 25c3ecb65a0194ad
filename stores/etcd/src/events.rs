//! Events for watchers: one etcd watch on the whole prefix, while this process has a watcher.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use lockkeeper_core::{Event, EventKind, EventStream, Holder, IgnorePoison, LockName, Result};
use lockkeeper_store_kit::EventHub;
use lockkeeper_store_kit::admission::AdmissionEntry;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::client::EtcdClient;
use crate::codec::{EntryState, EntryValue};
use crate::fence_base::{FenceBase, fence_at};
use crate::proto::{self, Kv, WatchCreate};
use crate::queue::QueueEntry;
use crate::statements::{get, range_end_of, txn};
use crate::watcher::KeyWatcher;

/// Why a transaction ended or revoked a hold. The same transaction writes it, because a deleted key does not say why
/// it was deleted.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "lowercase")]
pub enum ChangeCause {
    Expired {
        names: Vec<LockName>,
    },
    Broken {
        names: Vec<LockName>,
        reason: String,
        /// More follows in another transaction. Only the last part emits the event.
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

impl ChangeCause {
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// The watchers of this process.
pub struct Watchers {
    client: Arc<EtcdClient>,
    base: Arc<FenceBase>,
    key_watcher: Arc<KeyWatcher>,
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Default)]
struct State {
    hub: EventHub,
    /// The revision to start at when no etcd watch is open.
    start_at: i64,
    is_watching: bool,
}

impl Watchers {
    pub fn new(client: Arc<EtcdClient>, base: Arc<FenceBase>, key_watcher: Arc<KeyWatcher>) -> Self {
        Watchers { client, base, key_watcher, state: Mutex::default(), wake: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }

    pub async fn watch(&self, prefix: &str) -> Result<EventStream> {
        let request = txn(Vec::new(), vec![get(&self.client.keys.fence_base())], Vec::new());
        let revision = self.client.batch.send(request, Vec::new()).await?.revision;
        let mut state = self.state();
        let events = state.hub.add(prefix);
        if !state.is_watching {
            (state.is_watching, state.start_at) = (true, revision + 1);
            self.wake.notify_one();
        }
        Ok(events)
    }

    /// Keeps an etcd watch open while this process has a watcher.
    pub async fn run(self: Arc<Self>) {
        loop {
            let start_at = {
                let mut state = self.state();
                state.hub.sweep();
                state.is_watching = state.hub.any();
                state.is_watching.then_some(state.start_at)
            };
            let Some(start_revision) = start_at else {
                self.wake.notified().await;
                continue;
            };
            let key = self.client.keys.starting_with("");
            let range_end = range_end_of(&key);
            let create =
                WatchCreate { key, range_end, start_revision, prev_kv: true, ..WatchCreate::default() };
            let mut handle = self.key_watcher.watch(create);
            loop {
                let (events, lost) = handle.all().await;
                self.emit_events(events).await;
                let mut state = self.state();
                if lost {
                    state.hub.miss();
                    // Starts at the current revision.
                    state.start_at = 0;
                    break;
                }
                state.hub.sweep();
                if !state.hub.any() {
                    break;
                }
            }
        }
    }

    /// Emits the events of several transactions. All of them have already happened, so each lease is looked up once
    /// for all.
    async fn emit_events(&self, events: Vec<proto::KeyEvent>) {
        let mut leases = HashMap::new();
        let mut rest = &events[..];
        while let Some(first) = rest.first().and_then(revision) {
            let (now, later) =
                rest.split_at(rest.iter().take_while(|event| revision(event) == Some(first)).count());
            self.emit_transaction(now, first, &mut leases).await;
            rest = later;
        }
    }

    /// Emits the events of one transaction.
    async fn emit_transaction(
        &self,
        events: &[proto::KeyEvent],
        revision: i64,
        leases: &mut HashMap<i64, bool>,
    ) {
        let cause = events.iter().filter(|event| event.kind == 0).filter_map(|event| event.kv.as_ref());
        let cause = cause
            .filter(|kv| kv.key == self.client.keys.change_cause())
            .find_map(|kv| serde_json::from_slice(&kv.value).ok());
        for event in events {
            if let Some((name, kind, holder)) = self.interpret(event, cause.as_ref(), leases).await {
                self.emit(name, kind, Some(holder));
            }
        }
        let Ok(fence) = fence_at(self.base.get(), revision) else { return };
        match cause {
            Some(ChangeCause::Broken { names, reason, part: false }) => {
                for name in names {
                    self.emit(name, EventKind::Broken { fence, reason: reason.clone() }, None);
                }
            }
            Some(ChangeCause::Revoked { names, reason, part: false }) => {
                for name in names {
                    self.emit(name, EventKind::Revoked { fence, reason: reason.clone() }, None);
                }
            }
            _ => {}
        }
    }

    fn emit(&self, name: LockName, kind: EventKind, holder: Option<Holder>) {
        self.state().hub.emit(&Event { at: self.client.clock.wall(), name, kind, holder });
    }

    async fn interpret(
        &self,
        event: &proto::KeyEvent,
        cause: Option<&ChangeCause>,
        leases: &mut HashMap<i64, bool>,
    ) -> Option<(LockName, EventKind, Holder)> {
        let kv = event.kv.as_ref()?;
        let keys = &self.client.keys;
        let (name, _) = keys.parse_entry_key(&kv.key)?;
        let read = |kv: &Kv| QueueEntry::read(keys, &name, kv.clone()).filter(|entry| entry.value.is_some());
        let entry_before = event.prev_kv.as_ref().and_then(read);
        let state_before =
            entry_before.as_ref().and_then(|entry| entry.value.as_ref()).map(|value| value.state);
        let entry_after = if event.kind == 0 { read(kv) } else { None };
        let state = entry_after.as_ref().and_then(|entry| entry.value.as_ref()).map(|value| value.state);
        let entry = entry_after.or(entry_before)?;
        let holder = entry.value.as_ref().map(|value: &EntryValue| value.holder.clone())?;
        let fence = entry.fence(self.base.get());
        let ended = match cause {
            Some(ChangeCause::Expired { names }) if names.contains(&name) => {
                Some(EventKind::Expired { fence })
            }
            Some(ChangeCause::Broken { names, .. }) if names.contains(&name) => None,
            _ if state.is_none()
                && state_before == Some(EntryState::Granted)
                && self.has_lease_ended(&entry, leases).await =>
            {
                Some(EventKind::Expired { fence })
            }
            _ => Some(EventKind::Released { fence }),
        };
        let kind = match (state_before, state) {
            (None | Some(EntryState::Waiting), Some(EntryState::Granted)) => EventKind::Granted { fence },
            (None, Some(EntryState::Waiting)) => EventKind::Waiting,
            (Some(EntryState::Waiting), None) => EventKind::Left,
            (Some(EntryState::Granted), None | Some(EntryState::Lingering | EntryState::Delayed)) => ended?,
            _ => return None,
        };
        Some((name, kind, holder))
    }

    /// Whether a key that was deleted without a stored cause went with its lease.
    async fn has_lease_ended(&self, entry: &QueueEntry, leases: &mut HashMap<i64, bool>) -> bool {
        if let Some(ended) = leases.get(&entry.lease) {
            return *ended;
        }
        let ended = matches!(self.client.connection.lease_time_left(entry.lease).await, Ok(None));
        leases.insert(entry.lease, ended);
        ended
    }
}

fn revision(event: &proto::KeyEvent) -> Option<i64> {
    event.kv.as_ref().map(|kv| kv.mod_revision)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If this fails, the stored format has changed: raise `FORMAT` in `codec.rs`, and add a fixture.
    #[test]
    fn causes_match_the_golden_fixture() {
        let golden = include_str!("../tests/golden/v1-causes.txt");
        let name = |text: &str| LockName::new(text).unwrap();
        let causes = [
            ChangeCause::Expired { names: vec![name("a"), name("b")] },
            ChangeCause::Broken { names: vec![name("a")], reason: "stuck".into(), part: true },
            ChangeCause::Revoked { names: vec![name("a")], reason: "maintenance".into(), part: false },
        ];
        for (cause, line) in causes.iter().zip(golden.lines()) {
            assert_eq!(String::from_utf8(cause.to_bytes()).unwrap(), line);
            let read: ChangeCause = serde_json::from_str(line).unwrap();
            assert_eq!(format!("{read:?}"), format!("{cause:?}"));
        }
        assert_eq!(golden.lines().count(), causes.len());
    }
}
