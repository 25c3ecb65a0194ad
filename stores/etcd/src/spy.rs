//! Watching keys: one stream for all watches of the process. A stream that ends is opened again, and every watch goes on
//! from the revision after the last one it has heard of; where that is compacted away, whoever watches is told to look.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::proto::{Event, WatchAsk, WatchCancel, WatchCreate, WatchRequest, WatchResponse};
use crate::store::Shared;

const PAUSE: Duration = Duration::from_millis(200);
/// How much is told at once to one who asks for all.
const MANY: usize = 256;

/// What a watch hears.
#[derive(Debug)]
pub enum Heard {
    /// These happened, in order.
    Events(Vec<Event>),
    /// Something may have been missed: look, and watch anew.
    Lost,
}

struct Watch {
    create: WatchCreate,
    tell: mpsc::UnboundedSender<Heard>,
}

enum Order {
    Begin(Watch),
    End(i64),
}

/// Where watches are asked for.
pub struct Spy {
    orders: mpsc::UnboundedSender<Order>,
    last: AtomicI64,
}

pub struct Orders(mpsc::UnboundedReceiver<Order>);

pub fn spy() -> (Spy, Orders) {
    let (orders, asked) = mpsc::unbounded_channel();
    (Spy { orders, last: AtomicI64::new(0) }, Orders(asked))
}

/// A watch. Dropping it ends it.
pub struct Watching<'a> {
    spy: &'a Spy,
    id: i64,
    heard: mpsc::UnboundedReceiver<Heard>,
}

impl Spy {
    /// Watches from `create.start_revision` on.
    pub fn watch(&self, create: WatchCreate) -> Watching<'_> {
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let (tell, heard) = mpsc::unbounded_channel();
        let create = WatchCreate { watch_id: id, ..create };
        _ = self.orders.send(Order::Begin(Watch { create, tell }));
        Watching { spy: self, id, heard }
    }
}

impl Watching<'_> {
    pub async fn next(&mut self) -> Heard {
        self.heard.recv().await.unwrap_or(Heard::Lost)
    }

    /// All that was heard until now, in order, and whether something may have been missed after it.
    pub async fn all(&mut self) -> (Vec<Event>, bool) {
        let (mut heard, mut events) = (Vec::new(), Vec::new());
        let mut lost = self.heard.recv_many(&mut heard, MANY).await == 0;
        for one in heard {
            match one {
                Heard::Events(more) => events.extend(more),
                Heard::Lost => lost = true,
            }
        }
        (events, lost)
    }
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        _ = self.spy.orders.send(Order::End(self.id));
    }
}

/// Keeps the stream, for as long as the store is open.
pub async fn attend(shared: Arc<Shared>, Orders(mut orders): Orders) {
    let mut watches: HashMap<i64, Watch> = HashMap::new();
    loop {
        while watches.is_empty() {
            match orders.recv().await {
                Some(Order::Begin(watch)) => _ = watches.insert(watch.create.watch_id, watch),
                Some(Order::End(_)) => {}
                None => return,
            }
        }
        if !serve(&shared, &mut orders, &mut watches).await {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Runs one stream until it ends. False: the store is closed.
async fn serve(
    shared: &Shared,
    orders: &mut mpsc::UnboundedReceiver<Order>,
    watches: &mut HashMap<i64, Watch>,
) -> bool {
    let (send, asks) = mpsc::unbounded_channel();
    let ask = |ask| _ = send.send(WatchRequest { ask: Some(ask) });
    for watch in watches.values() {
        ask(WatchAsk::Create(watch.create.clone()));
    }
    let mut dropped = shared.link.dropped();
    let Ok(session) = shared.link.session().await else { return true };
    let asks = UnboundedReceiverStream::new(asks);
    let mut answers: tonic::Streaming<WatchResponse> =
        match shared.link.stream(&session, "/etcdserverpb.Watch/Watch", asks).await {
            Ok(answers) => answers,
            Err(failure) => {
                tracing::debug!(?failure, "no stream for watches, will try again");
                // Another member, and another login, may do better.
                shared.link.give_up(&session).await;
                shared.link.forget_login();
                return true;
            }
        };
    loop {
        tokio::select! {
            order = orders.recv() => match order {
                Some(Order::Begin(watch)) => {
                    ask(WatchAsk::Create(watch.create.clone()));
                    watches.insert(watch.create.watch_id, watch);
                }
                Some(Order::End(watch_id)) => {
                    if watches.remove(&watch_id).is_some() {
                        ask(WatchAsk::Cancel(WatchCancel { watch_id }));
                    }
                }
                None => return false,
            },
            answer = answers.next() => match answer {
                Some(Ok(answer)) => {
                    // A login that ran out ends watches one by one.
                    if answer.canceled && answer.watch_id < 0 {
                        shared.link.forget_login();
                        return true;
                    }
                    pass_on(watches, answer);
                }
                other => {
                    tracing::debug!(?other, "the stream of watches has ended");
                    shared.link.give_up(&session).await;
                    shared.link.forget_login();
                    return true;
                }
            },
            _ = dropped.changed() => return true,
        }
    }
}

fn pass_on(watches: &mut HashMap<i64, Watch>, answer: WatchResponse) {
    let id = answer.watch_id;
    let Some(watch) = watches.get_mut(&id) else { return };
    if answer.created && watch.create.start_revision == 0 {
        // It begins now, also if it has heard of nothing when the stream ends.
        watch.create.start_revision = answer.header.map_or(0, |header| header.revision + 1);
    }
    // Not the revision of the answer: to a watch that is behind, etcd tells what happened in pieces, and that is where it is itself.
    if let Some(last) = answer.events.iter().filter_map(|event| Some(event.kv.as_ref()?.mod_revision)).max() {
        watch.create.start_revision = watch.create.start_revision.max(last + 1);
        _ = watch.tell.send(Heard::Events(answer.events));
    }
    if answer.canceled {
        _ = watch.tell.send(Heard::Lost);
        watches.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Header, Kv};

    /// Where a watch that was told this would go on, after another stream.
    fn goes_on(start_revision: i64, answer: WatchResponse) -> i64 {
        let create = WatchCreate { start_revision, watch_id: 1, ..WatchCreate::default() };
        let tell = mpsc::unbounded_channel().0;
        let mut watches = HashMap::from([(1, Watch { create, tell })]);
        let header = Some(Header { revision: 3000 });
        pass_on(&mut watches, WatchResponse { header, watch_id: 1, ..answer });
        watches[&1].create.start_revision
    }

    #[test]
    fn a_watch_goes_on_after_what_it_has_heard() {
        let event =
            |mod_revision| Event { kv: Some(Kv { mod_revision, ..Kv::default() }), ..Event::default() };
        let piece = WatchResponse { events: vec![event(1001), event(1999)], ..WatchResponse::default() };
        assert_eq!(goes_on(1000, piece), 2000, "there are more pieces");
        let created = WatchResponse { created: true, ..WatchResponse::default() };
        assert_eq!(goes_on(0, created.clone()), 3001, "it has begun");
        assert_eq!(goes_on(1000, created), 1000, "it has heard of nothing yet");
    }
}
