//! Telling what happens. The functions tell only while somebody watches: the state says until when, and that ends by itself.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{Error, Event, EventKind, EventStream, Fence, LockName, Result, Wall};
use lockkeeper_host::Feed;
use serde::Deserialize;
use tokio::sync::Notify;

use crate::entry;
use crate::script::WATCHED;
use crate::store::Shared;

/// How long the functions tell, and how often they are told to go on.
const SPAN: Duration = Duration::from_secs(30);
const REFRESH: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(crate) struct Watch {
    desk: Mutex<Desk>,
    ring: Notify,
}

#[derive(Default)]
struct Desk {
    feed: Feed,
    listening: bool,
}

#[derive(Deserialize)]
struct Told {
    at: u64,
    name: String,
    kind: String,
    fence: Option<u64>,
    holder: Option<String>,
    reason: Option<String>,
}

impl Watch {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No messages come any more, and perhaps some were lost.
    pub fn deaf(&self) {
        let mut desk = self.desk();
        desk.listening = false;
        desk.feed.miss();
        self.ring.notify_one();
    }

    pub fn tell(&self, text: &str) {
        if let Some(event) = read(text) {
            self.desk().feed.tell(&event);
        }
    }
}

impl Shared {
    pub(crate) async fn watch(&self, prefix: &str) -> Result<EventStream> {
        if !self.hears() {
            return Err(Error::Unsupported(
                "watching needs messages, and none come through the pooler: name the database itself".into(),
            ));
        }
        let events = self.watch.desk().feed.add(prefix);
        self.watch_on().await?;
        self.watch.ring.notify_one();
        Ok(events)
    }

    /// Listens, and lets the functions go on telling.
    async fn watch_on(&self) -> Result<()> {
        if !self.watch.desk().listening {
            if !self.listen(&self.events_channel()).await {
                return Err(Error::Unavailable("the connection for messages cannot be made".into()));
            }
            self.watch.desk().listening = true;
        }
        self.link.rows(&WATCHED, &[&entry::micros(SPAN)]).await?;
        Ok(())
    }
}

/// Keeps the functions telling for as long as somebody watches.
pub(crate) async fn attend(shared: Arc<Shared>) {
    loop {
        let any = {
            let mut desk = shared.watch.desk();
            desk.feed.tidy();
            desk.feed.any()
        };
        if !any {
            shared.watch.ring.notified().await;
            continue;
        }
        let pause = match shared.watch_on().await {
            Ok(()) => REFRESH,
            Err(error) => {
                tracing::debug!(%error, "cannot watch for now, will try again");
                shared.options.poll
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = shared.watch.ring.notified() => {}
        }
    }
}

fn read(text: &str) -> Option<Event> {
    let told: Told = serde_json::from_str(text).ok()?;
    let fence = || Fence::new(told.fence?).ok();
    let kind = match told.kind.as_str() {
        "granted" => EventKind::Granted { fence: fence()? },
        "released" => EventKind::Released { fence: fence()? },
        "expired" => EventKind::Expired { fence: fence()? },
        "broken" => EventKind::Broken { fence: fence()?, reason: told.reason.unwrap_or_default() },
        "revoked" => EventKind::Revoked { fence: fence()?, reason: told.reason.unwrap_or_default() },
        "waiting" => EventKind::Waiting,
        "left" => EventKind::Left,
        _ => return None,
    };
    let holder = told.holder.as_deref().and_then(entry::holder);
    Some(Event { at: Wall::from_micros(told.at), name: LockName::new(told.name).ok()?, kind, holder })
}
