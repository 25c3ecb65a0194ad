//! Telling what happens. Scripts publish only while somebody watches: a flag in every group says so, and goes by itself.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::try_join_all;
use lockkeeper_core::{Event, EventKind, EventStream, Fence, Result, Wall};
use lockkeeper_host::Feed;
use redis::cmd;
use tokio::sync::Notify;

use crate::entry;
use crate::fault::Failure;
use crate::layout::Layout;
use crate::store::Shared;

/// How long a flag stands, and how often it is set anew.
const FLAG: Duration = Duration::from_secs(30);
const REFRESH: Duration = Duration::from_secs(10);

#[derive(Default)]
pub struct Watch {
    desk: Mutex<Desk>,
    ring: Notify,
}

#[derive(Default)]
struct Desk {
    feed: Feed,
    subscribed: bool,
}

impl Watch {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection is gone, and perhaps some events with it.
    pub fn deaf(&self) {
        let mut desk = self.desk();
        desk.subscribed = false;
        desk.feed.miss();
        self.ring.notify_one();
    }

    pub fn tell(&self, layout: &Layout, text: &[u8]) {
        if let Some(event) = parse(layout, text) {
            self.desk().feed.tell(&event);
        }
    }
}

impl Shared {
    pub(crate) async fn watch(&self, prefix: &str) -> Result<EventStream> {
        let events = self.watch.desk().feed.add(prefix);
        self.listen_and_flag().await?;
        self.watch.ring.notify_one();
        Ok(events)
    }

    async fn listen_and_flag(&self) -> Result<(), Failure> {
        if !self.watch.desk().subscribed {
            self.fleet.call(0, cmd("SUBSCRIBE").arg(self.events_channel())).await?;
            self.watch.desk().subscribed = true;
        }
        let channel = &self.events_channel();
        try_join_all(self.layout.groups().map(|group| async move {
            let mut set = cmd("SET");
            set.arg(format!("{}watched", self.layout.base(group))).arg(channel);
            set.arg("PX").arg(crate::hold::millis(FLAG));
            self.fleet.call(group.slot(), &set).await
        }))
        .await?;
        Ok(())
    }
}

/// Keeps the flags up for as long as somebody watches.
pub async fn attend(shared: Arc<Shared>) {
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
        let pause = match shared.listen_and_flag().await {
            Ok(()) => REFRESH,
            Err(failure) => {
                tracing::debug!(?failure, "cannot watch for now, will try again");
                shared.options.poll
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = shared.watch.ring.notified() => {}
        }
    }
}

/// `KIND FENCE MICROSECONDS LENGTH KEY…REST`.
fn parse(layout: &Layout, text: &[u8]) -> Option<Event> {
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
    let holder = (!by_operator).then(|| entry::holder(rest));
    Some(Event { at: Wall::from_micros(at.parse().ok()?), name: layout.name(key)?, kind, holder })
}
