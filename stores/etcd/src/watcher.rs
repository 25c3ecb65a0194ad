//! Watches on keys: one stream for all watches of the process. A stream that ends is reopened, and every watch resumes
//! at the revision after its last event. If etcd has compacted that revision, the watch reports that events may be
//! lost.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::connection::Connection;
use crate::proto::{KeyEvent, WatchCancel, WatchCreate, WatchRequest, WatchRequestKind, WatchResponse};

const RECONNECT_DELAY: Duration = Duration::from_millis(200);
/// How many messages a watch takes from its channel at once.
const MAX_RECEIVED: usize = 256;

/// A report of a watch.
#[derive(Debug)]
pub enum WatchEvent {
    /// Events in order.
    Events(Vec<KeyEvent>),
    /// Events may be lost: read the state, and watch again.
    Lost,
}

struct ActiveWatch {
    create: WatchCreate,
    events: mpsc::UnboundedSender<WatchEvent>,
}

enum WatchCommand {
    Create(ActiveWatch),
    Cancel(i64),
}

/// Creates watches on the shared stream.
pub struct KeyWatcher {
    commands: mpsc::UnboundedSender<WatchCommand>,
    last: AtomicI64,
}

pub struct WatchCommands(mpsc::UnboundedReceiver<WatchCommand>);

pub fn channel() -> (KeyWatcher, WatchCommands) {
    let (commands, commands_rx) = mpsc::unbounded_channel();
    (KeyWatcher { commands, last: AtomicI64::new(0) }, WatchCommands(commands_rx))
}

/// A watch. Dropping it cancels it.
pub struct WatchHandle<'a> {
    key_watcher: &'a KeyWatcher,
    id: i64,
    received: mpsc::UnboundedReceiver<WatchEvent>,
}

impl KeyWatcher {
    /// Watches from `create.start_revision` on.
    pub fn watch(&self, create: WatchCreate) -> WatchHandle<'_> {
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let (events, received) = mpsc::unbounded_channel();
        let create = WatchCreate { watch_id: id, ..create };
        _ = self.commands.send(WatchCommand::Create(ActiveWatch { create, events }));
        WatchHandle { key_watcher: self, id, received }
    }
}

impl WatchHandle<'_> {
    pub async fn next(&mut self) -> WatchEvent {
        self.received.recv().await.unwrap_or(WatchEvent::Lost)
    }

    /// All events so far in order, and whether events may be lost after them.
    pub async fn all(&mut self) -> (Vec<KeyEvent>, bool) {
        let (mut received, mut events) = (Vec::new(), Vec::new());
        let mut lost = self.received.recv_many(&mut received, MAX_RECEIVED).await == 0;
        for one in received {
            match one {
                WatchEvent::Events(more) => events.extend(more),
                WatchEvent::Lost => lost = true,
            }
        }
        (events, lost)
    }
}

impl Drop for WatchHandle<'_> {
    fn drop(&mut self) {
        _ = self.key_watcher.commands.send(WatchCommand::Cancel(self.id));
    }
}

/// Keeps the stream open while there is a watch.
pub async fn run(connection: Arc<Connection>, WatchCommands(mut commands): WatchCommands) {
    let mut watches: HashMap<i64, ActiveWatch> = HashMap::new();
    loop {
        while watches.is_empty() {
            match commands.recv().await {
                Some(WatchCommand::Create(watch)) => _ = watches.insert(watch.create.watch_id, watch),
                Some(WatchCommand::Cancel(_)) => {}
                None => return,
            }
        }
        if !run_stream(&connection, &mut commands, &mut watches).await {
            return;
        }
        tokio::time::sleep(RECONNECT_DELAY).await;
    }
}

/// Runs one stream until it ends. False: the store is closed.
async fn run_stream(
    connection: &Connection,
    commands: &mut mpsc::UnboundedReceiver<WatchCommand>,
    watches: &mut HashMap<i64, ActiveWatch>,
) -> bool {
    let (send, requests) = mpsc::unbounded_channel();
    let send_request = |request| _ = send.send(WatchRequest { request: Some(request) });
    for watch in watches.values() {
        send_request(WatchRequestKind::Create(watch.create.clone()));
    }
    let mut failed_channels = connection.failed_channels();
    let Ok(channel) = connection.channel().await else { return true };
    let requests = UnboundedReceiverStream::new(requests);
    let mut replies: tonic::Streaming<WatchResponse> =
        match connection.stream(&channel, "/etcdserverpb.Watch/Watch", requests).await {
            Ok(replies) => replies,
            Err(failure) => {
                tracing::debug!(
                    ?failure,
                    "the watch stream could not be opened; failing over to the next member"
                );
                // Another member, or a new login, may succeed.
                connection.fail_over(&channel).await;
                connection.forget_login();
                return true;
            }
        };
    loop {
        tokio::select! {
            command = commands.recv() => match command {
                Some(WatchCommand::Create(watch)) => {
                    send_request(WatchRequestKind::Create(watch.create.clone()));
                    watches.insert(watch.create.watch_id, watch);
                }
                Some(WatchCommand::Cancel(watch_id)) => {
                    if watches.remove(&watch_id).is_some() {
                        send_request(WatchRequestKind::Cancel(WatchCancel { watch_id }));
                    }
                }
                None => return false,
            },
            reply = replies.next() => match reply {
                Some(Ok(reply)) => {
                    // An expired login cancels watches one by one.
                    if reply.canceled && reply.watch_id < 0 {
                        connection.forget_login();
                        return true;
                    }
                    deliver(watches, reply);
                }
                other => {
                    tracing::debug!(?other, "the watch stream has ended; reopening it on the next member");
                    connection.fail_over(&channel).await;
                    connection.forget_login();
                    return true;
                }
            },
            _ = failed_channels.changed() => return true,
        }
    }
}

fn deliver(watches: &mut HashMap<i64, ActiveWatch>, reply: WatchResponse) {
    let id = reply.watch_id;
    let Some(watch) = watches.get_mut(&id) else { return };
    if reply.created && watch.create.start_revision == 0 {
        // The watch begins now, even if the stream ends before its first event.
        watch.create.start_revision = reply.header.map_or(0, |header| header.revision + 1);
    }
    // Not the revision of the response header: etcd sends old events to a slow watch in pieces, and the header has
    // etcd's own current revision.
    if let Some(last) = reply.events.iter().filter_map(|event| Some(event.kv.as_ref()?.mod_revision)).max() {
        watch.create.start_revision = watch.create.start_revision.max(last + 1);
        _ = watch.events.send(WatchEvent::Events(reply.events));
    }
    if reply.canceled {
        _ = watch.events.send(WatchEvent::Lost);
        watches.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Header, Kv};

    /// The revision at which a watch resumes on the next stream after this response.
    fn resumes_at(start_revision: i64, reply: WatchResponse) -> i64 {
        let create = WatchCreate { start_revision, watch_id: 1, ..WatchCreate::default() };
        let events = mpsc::unbounded_channel().0;
        let mut watches = HashMap::from([(1, ActiveWatch { create, events })]);
        let header = Some(Header { revision: 3000, ..Header::default() });
        deliver(&mut watches, WatchResponse { header, watch_id: 1, ..reply });
        watches[&1].create.start_revision
    }

    #[test]
    fn a_watch_resumes_after_its_last_event() {
        let event =
            |mod_revision| KeyEvent { kv: Some(Kv { mod_revision, ..Kv::default() }), ..KeyEvent::default() };
        let piece = WatchResponse { events: vec![event(1001), event(1999)], ..WatchResponse::default() };
        assert_eq!(resumes_at(1000, piece), 2000, "more pieces follow");
        let created = WatchResponse { created: true, ..WatchResponse::default() };
        assert_eq!(resumes_at(0, created.clone()), 3001, "it begins now");
        assert_eq!(resumes_at(1000, created), 1000, "it has no event yet");
    }
}
