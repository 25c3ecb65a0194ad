//! Watches: events that the scripts publish. They publish only while a flag key with a ttl in the group says that a client watches.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::try_join_all;
use lockkeeper_core::{Event, EventKind, EventStream, Fence, Result, WallTime};
use lockkeeper_store_kit::EventHub;
use redis::cmd;
use tokio::sync::Notify;

use crate::codec;
use crate::error::Failure;
use crate::keys::Keys;
use crate::runner::ScriptRunner;

/// How long a flag stands, and how often it is set anew.
const FLAG_TTL: Duration = Duration::from_secs(30);
const REFRESH: Duration = Duration::from_secs(10);

/// The watchers of this process.
pub(crate) struct Watchers {
    runner: Arc<ScriptRunner>,
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Default)]
struct State {
    hub: EventHub,
    subscribed: bool,
}

impl Watchers {
    pub fn new(runner: Arc<ScriptRunner>) -> Self {
        Watchers { runner, state: Mutex::default(), wake: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection is gone, and perhaps some events with it.
    pub fn on_disconnect(&self) {
        let mut state = self.state();
        state.subscribed = false;
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

    async fn subscribe_and_flag(&self) -> Result<(), Failure> {
        if !self.state().subscribed {
            self.runner.router.call(0, cmd("SUBSCRIBE").arg(self.runner.events_channel())).await?;
            self.state().subscribed = true;
        }
        let channel = &self.runner.events_channel();
        try_join_all(self.runner.keys.groups().map(|group| async move {
            let mut set = cmd("SET");
            set.arg(format!("{}watched", self.runner.keys.group_prefix(group))).arg(channel);
            set.arg("PX").arg(crate::statements::millis(FLAG_TTL));
            self.runner.router.call(group.slot(), &set).await
        }))
        .await?;
        Ok(())
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
