//! Watches: events that the scripts publish. They publish only while a flag key with a ttl in the group says that a client watches.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::future::join_all;
use lockkeeper_core::{Event, EventKind, EventStream, Fence, IgnorePoison, Result, WallTime};
use lockkeeper_store_kit::EventHub;
use redis::cmd;
use tokio::sync::Notify;

use crate::codec;
use crate::error::Failure;
use crate::keys::{KeyGroup, Keys};
use crate::runner::ScriptRunner;

/// How long a flag stands, and how often it is set anew.
const FLAG_TTL: Duration = Duration::from_secs(30);
const REFRESH: Duration = Duration::from_secs(10);

/// The watchers of this process.
pub(crate) struct Watchers {
    runner: Arc<ScriptRunner>,
    state: Mutex<State>,
    /// Held by the task that subscribes: two at once would cancel each other's subscriptions.
    subscribing: tokio::sync::Mutex<()>,
    wake: Notify,
}

#[derive(Default)]
struct State {
    hub: EventHub,
    subscribed: bool,
    /// How often a connection was lost, and perhaps the subscription with it.
    losses: u64,
}

impl Watchers {
    pub fn new(runner: Arc<ScriptRunner>) -> Self {
        Watchers {
            runner,
            state: Mutex::default(),
            subscribing: tokio::sync::Mutex::default(),
            wake: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }

    /// The connection is gone, and perhaps some events with it.
    pub fn on_disconnect(&self) {
        let mut state = self.state();
        state.subscribed = false;
        state.losses += 1;
        state.hub.miss();
        self.wake.notify_one();
    }

    pub fn emit(&self, text: &[u8]) {
        if let Some(event) = parse(&self.runner.keys, text) {
            self.state().hub.emit(&event);
        }
    }

    pub(crate) async fn watch_prefix(&self, prefix: &str) -> Result<EventStream> {
        let events = self.state().hub.add(prefix);
        self.subscribe_and_flag().await?;
        self.wake.notify_one();
        Ok(events)
    }

    /// Subscribes at one node, because messages of a cluster reach all of them, and sets the flags of all groups. A node that does not
    /// reply silences no other: this fails only if no group has its flag.
    async fn subscribe_and_flag(&self) -> Result<(), Failure> {
        self.subscribe().await?;
        let outcomes = join_all(self.runner.keys.groups().map(|group| self.set_flag(group))).await;
        let (groups, failures) = (outcomes.len(), outcomes.into_iter().filter_map(Result::err));
        let failures: Vec<Failure> = failures.collect();
        match failures.first() {
            Some(failure) if failures.len() == groups => return Err(failure.clone()),
            Some(failure) => {
                tracing::debug!(?failure, groups = failures.len(), "these groups publish no events for now");
                self.state().hub.miss();
            }
            None => {}
        }
        Ok(())
    }

    async fn subscribe(&self) -> Result<(), Failure> {
        let _subscribing = self.subscribing.lock().await;
        let (subscribed, losses) = {
            let state = self.state();
            (state.subscribed, state.losses)
        };
        if !subscribed {
            self.runner.router.subscribe_at_one(&self.runner.events_channel()).await?;
            let mut state = self.state();
            state.subscribed = state.losses == losses;
        }
        Ok(())
    }

    async fn set_flag(&self, group: KeyGroup) -> Result<(), Failure> {
        let mut set = cmd("SET");
        set.arg(format!("{}watched", self.runner.keys.group_prefix(group))).arg(self.runner.events_channel());
        set.arg("PX").arg(crate::statements::millis(FLAG_TTL));
        self.runner.router.call(group.slot(), &set).await.map(drop)
    }
}

/// Sets the flags again while this process has a watcher.
pub async fn run(watchers: Arc<Watchers>) {
    loop {
        let any = {
            let mut state = watchers.state();
            state.hub.sweep();
            state.hub.any()
        };
        if !any {
            watchers.wake.notified().await;
            continue;
        }
        let pause = match watchers.subscribe_and_flag().await {
            Ok(()) => REFRESH,
            Err(failure) => {
                tracing::debug!(?failure, "cannot watch for now, will try again");
                watchers.runner.options.poll
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = watchers.wake.notified() => {}
        }
    }
}

/// `KIND FENCE MICROSECONDS LENGTH KEY…REST`.
fn parse(keys: &Keys, text: &[u8]) -> Option<Event> {
    let mut parts = text.splitn(5, |byte| *byte == b' ');
    let mut word = || std::str::from_utf8(parts.next()?).ok();
    let (kind, fence, at, len) = (word()?, word()?, word()?, word()?);
    let (key, rest) = parts.next()?.split_at_checked(len.parse().ok()?)?;
    let fence = || Fence::new(fence.parse().ok()?).ok();
    let kind = match kind {
        "granted" => EventKind::Granted { fence: fence()? },
        "released" => EventKind::Released { fence: fence()? },
        "expired" => EventKind::Expired { fence: fence()? },
        "broken" => EventKind::Broken { fence: fence()?, reason: String::from_utf8_lossy(rest).into_owned() },
        "revoked" => {
            EventKind::Revoked { fence: fence()?, reason: String::from_utf8_lossy(rest).into_owned() }
        }
        "waiting" => EventKind::Waiting,
        "left" => EventKind::Left,
        _ => return None,
    };
    let by_operator = matches!(kind, EventKind::Broken { .. } | EventKind::Revoked { .. });
    let holder = (!by_operator).then(|| codec::decode_holder(rest));
    Some(Event { at: WallTime::from_micros(at.parse().ok()?), name: keys.lock_name(key)?, kind, holder })
}
