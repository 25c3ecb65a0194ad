//! Watching: the events that the SQL functions emit. They emit events only while a client watches: `state` says until when, and each
//! watching client extends that.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper_core::{
    Error, Event, EventKind, EventStream, Fence, IgnorePoison, LockName, Result, WallTime,
};
use lockkeeper_host::random_128;
use lockkeeper_store_kit::EventHub;
use serde::Deserialize;
use tokio::sync::Notify;

use crate::codec;
use crate::config::Options;
use crate::connection::Connection;
use crate::listener::NotificationListener;
use crate::session::first;
use crate::statements::KEEP_WATCHING;

/// How long the functions emit events after a client has asked for it, and how often clients do.
const WATCH_DURATION: Duration = Duration::from_secs(30);
const REFRESH: Duration = Duration::from_secs(10);
/// How often the client tries to listen before it reports an error.
const TRIES: usize = 3;

/// The watchers of this process.
pub(crate) struct Watchers {
    options: Arc<Options>,
    connection: Arc<Connection>,
    listener: Arc<NotificationListener>,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    hub: EventHub,
    /// The channel on which the functions emit events, as far as the client knows.
    channel: Option<String>,
    listening: bool,
    /// How often a listening connection has ended.
    disconnects: u64,
    /// Whether the client has let the functions emit events since the first watcher came.
    emitting: bool,
}

/// An event as the SQL function `emit` writes it.
#[derive(Deserialize)]
struct EventJson {
    at: u64,
    name: String,
    kind: String,
    fence: Option<u64>,
    holder: Option<String>,
    reason: Option<String>,
}

impl Watchers {
    pub fn new(
        options: Arc<Options>,
        connection: Arc<Connection>,
        listener: Arc<NotificationListener>,
    ) -> Self {
        Watchers { options, connection, listener, state: Mutex::default(), changed: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }

    /// The listening connection has ended, and events may have been lost.
    pub fn on_disconnect(&self) {
        let mut state = self.state();
        state.listening = false;
        state.disconnects += 1;
        state.hub.miss();
        self.changed.notify_one();
    }

    /// Passes a notification of this channel on to the watchers.
    pub fn emit(&self, channel: &str, payload: &str) {
        let mut state = self.state();
        if state.channel.as_deref() == Some(channel)
            && let Some(event) = parse_event(payload)
        {
            state.hub.emit(&event);
        }
    }

    /// The functions emit events on this channel from now on; `without_a_gap`: they did so until now. Returns whether the client listens on
    /// it, and how often a connection has ended.
    fn set_channel(&self, channel: &str, without_a_gap: bool) -> (bool, u64) {
        let mut state = self.state();
        let other = state.channel.as_deref() != Some(channel);
        // The clock was set forward, the client's request came too late, or the tables were created again.
        if state.emitting && (other || !without_a_gap) {
            state.hub.miss();
        }
        if other {
            (state.channel, state.listening) = (Some(channel.to_owned()), false);
        }
        state.emitting = true;
        (state.listening, state.disconnects)
    }

    /// The client listens on the channel, unless its connection has ended since, which is reported once only, or the functions use another
    /// channel by now.
    fn set_listening(&self, channel: &str, disconnects: u64) -> bool {
        let mut state = self.state();
        state.listening |= state.disconnects == disconnects && state.channel.as_deref() == Some(channel);
        state.listening
    }

    pub async fn watch(&self, prefix: &str) -> Result<EventStream> {
        if !self.listener.works() {
            return Err(Error::Unsupported(
                "watching needs notifications, and none come through the pooler: name the database itself"
                    .into(),
            ));
        }
        let events = self.state().hub.add(prefix);
        self.keep_watching().await?;
        self.changed.notify_one();
        Ok(events)
    }

    /// Lets the functions emit events for [`WATCH_DURATION`], and listens.
    async fn keep_watching(&self) -> Result<()> {
        let digits = codec::hex(&random_128());
        let rows = self.connection.rows(&KEEP_WATCHING, &[&codec::micros(WATCH_DURATION), &digits]).await?;
        let channel = event_channel(&first::<String>(&rows, 0)?)?;
        let (mut listening, mut disconnects) = self.set_channel(&channel, first(&rows, 1)?);
        // The end of an older connection may be reported meanwhile.
        for _ in 0..TRIES {
            if listening {
                return Ok(());
            }
            listening = self.listener.listen(&channel).await && self.set_listening(&channel, disconnects);
            disconnects = self.state().disconnects;
        }
        match listening {
            true => Ok(()),
            false => Err(Error::Unavailable("the connection for notifications cannot be made".into())),
        }
    }
}

/// The channel of events with these digits. They come from a table, and become a part of SQL text, so they are checked.
fn event_channel(digits: &str) -> Result<String> {
    let plain =
        digits.len() <= 40 && digits.bytes().all(|byte| byte.is_ascii_digit() || byte.is_ascii_lowercase());
    if plain { Ok(format!("lockkeeper_events_{digits}")) } else { Err(codec::unexpected_reply()) }
}

/// Lets the functions emit events for as long as this process has watchers.
pub(crate) async fn run(watchers: Arc<Watchers>) {
    loop {
        let any = {
            let mut state = watchers.state();
            state.hub.sweep();
            state.emitting &= state.hub.any();
            state.hub.any()
        };
        if !any {
            watchers.changed.notified().await;
            continue;
        }
        let pause = match watchers.keep_watching().await {
            Ok(()) => REFRESH,
            Err(error) => {
                tracing::debug!(%error, "cannot watch for now; trying again");
                watchers.options.poll
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = watchers.changed.notified() => {}
        }
    }
}

fn parse_event(text: &str) -> Option<Event> {
    let event: EventJson = serde_json::from_str(text).ok()?;
    let fence = || Fence::new(event.fence?).ok();
    let kind = match event.kind.as_str() {
        "granted" => EventKind::Granted { fence: fence()? },
        "released" => EventKind::Released { fence: fence()? },
        "expired" => EventKind::Expired { fence: fence()? },
        "broken" => EventKind::Broken { fence: fence()?, reason: event.reason.unwrap_or_default() },
        "revoked" => EventKind::Revoked { fence: fence()?, reason: event.reason.unwrap_or_default() },
        "waiting" => EventKind::Waiting,
        "left" => EventKind::Left,
        _ => return None,
    };
    let holder = event.holder.as_deref().and_then(codec::holder);
    Some(Event { at: WallTime::from_micros(event.at), name: LockName::new(event.name).ok()?, kind, holder })
}
