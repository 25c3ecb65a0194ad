//! Batching: requests of many tasks are sent in one statement. The first request is sent at once; requests that arrive while a statement is
//! in flight are sent together. Each request has a reply of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{join, join_all};
use futures_util::stream::FuturesUnordered;
use lockkeeper_core::BootInstant;
use lockkeeper_store_kit::WaiterTtls;
use tokio::sync::{mpsc, oneshot};
use tokio_postgres::Row;

use crate::codec::micros;
use crate::config::Options;
use crate::connection::Connection;
use crate::error::Failure;
use crate::session::{Param, PgSession};
use crate::statements::{
    ACQUIRE_FAST, ACQUIRE_NAMES, RELEASE_FAST, RELEASE_NAMES, RUN_REQUEST, RUN_REQUESTS,
};

/// How many batches are in flight at once: one that the server works on, and one on its way to it.
const MAX_IN_FLIGHT: usize = 2;
/// How many requests are in one batch: few enough that others do not wait long for the rows.
const MAX_BATCH: usize = 64;

/// The kind of a request, as the SQL function `run_request` knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    /// Acquires a lock if it is free.
    TryOnce = 0,
    /// Acquires a lock, or enqueues.
    Enqueue = 1,
    /// Releases a lock, or leaves the queue.
    Release = 2,
    /// Acquires a lock for a waiter that is in the queue.
    Woken = 3,
}

/// One request, as the SQL functions take it.
#[derive(Clone)]
pub(crate) struct RequestParams {
    pub kind: RequestKind,
    /// Whether to send only the fast path, if the request is sent alone. The reply is empty if the fast path did not apply.
    pub fast_path: bool,
    pub names: Vec<String>,
    pub attempt: Vec<u8>,
    pub ttl: Option<i64>,
    pub terms: Option<String>,
    pub holder: Option<String>,
}

/// The reply to a request.
pub(crate) struct RequestReply {
    /// When the request was sent, or a little earlier.
    pub sent_at: BootInstant,
    /// Empty: the fast path did not apply and did nothing; the caller sends the full request.
    pub text: String,
    /// The rest of the lease, if it is shorter than the ttl.
    pub lease: Option<Duration>,
}

struct BatchItem {
    params: RequestParams,
    reply: oneshot::Sender<Result<RequestReply, Failure>>,
    _unanswered: UnansweredCount,
}

/// Takes requests, and sends them alone or in batches.
pub(crate) struct BatchSender {
    items: mpsc::UnboundedSender<BatchItem>,
    /// How many requests have no reply yet.
    unanswered: Arc<AtomicUsize>,
    context: Arc<BatchContext>,
}

/// Counts one request for as long as it lives.
struct UnansweredCount(Arc<AtomicUsize>);

impl Drop for UnansweredCount {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The values that every statement of a batch needs.
pub(crate) struct BatchContext {
    pub options: Arc<Options>,
    pub connection: Arc<Connection>,
    /// The id of this process in the database.
    pub client: String,
    /// The ttls of this process's waiters, which limit how long its queue entries are kept.
    pub ttls: Arc<WaiterTtls>,
}

/// The task that sends batches.
pub(crate) struct BatchTask {
    items: mpsc::UnboundedReceiver<BatchItem>,
    context: Arc<BatchContext>,
}

pub(crate) fn batch(context: BatchContext) -> (BatchSender, BatchTask) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let context = Arc::new(context);
    let sender = BatchSender { items: sender, unanswered: Arc::default(), context: context.clone() };
    (sender, BatchTask { items: receiver, context })
}

impl BatchSender {
    /// Submits a request. Requests are sent in the order in which they are submitted.
    pub fn submit(&self, params: RequestParams) -> PendingReply {
        let (reply, receiver) = oneshot::channel();
        self.unanswered.fetch_add(1, Ordering::AcqRel);
        let count = UnansweredCount(self.unanswered.clone());
        // If the store is closed, so is the channel of the reply.
        _ = self.items.send(BatchItem { params, reply, _unanswered: count });
        PendingReply(receiver)
    }

    /// `Some` if no request is unanswered; the caller's request counts from then on.
    fn try_alone(&self) -> Option<UnansweredCount> {
        let first = self.unanswered.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        first.then(|| UnansweredCount(self.unanswered.clone()))
    }

    /// Sends one request: directly if no other is unanswered, else in a batch. The request is on its way after the first poll, so
    /// requests that are submitted later are sent later.
    pub async fn send(&self, params: RequestParams) -> Result<RequestReply, Failure> {
        let context = &self.context;
        if let Some(session) = context.connection.prepared_session()
            && let Some(_count) = self.try_alone()
        {
            let sent_at = context.options.clock.now();
            match context.execute(&session, &[&params], params.fast_path).await {
                // The batch repairs the schema, or connects again.
                Err(failure) if failure.is_missing() || matches!(failure, Failure::ConnectionEnded) => {}
                Ok(rows) if params.fast_path && rows.is_empty() => {
                    return Ok(RequestReply { sent_at, text: String::new(), lease: None });
                }
                rows => return parse_reply(sent_at, rows?.first()),
            }
        }
        self.submit(params).reply().await
    }
}

/// The reply to a submitted request. A request is not sent if this is dropped before.
pub(crate) struct PendingReply(oneshot::Receiver<Result<RequestReply, Failure>>);

impl PendingReply {
    pub async fn reply(self) -> Result<RequestReply, Failure> {
        self.0.await.unwrap_or_else(|_| Err(Failure::NotSent("the store is closed".into())))
    }
}

impl BatchTask {
    /// Sends batches for as long as the store is open. All on one connection, in the order of submission: so a release never overtakes
    /// its acquire.
    pub async fn run(mut self) {
        let mut in_flight = FuturesUnordered::new();
        let mut waiting = Vec::new();
        loop {
            tokio::select! {
                biased;
                Some(()) = in_flight.next(), if !in_flight.is_empty() => {}
                count = self.items.recv_many(&mut waiting, MAX_BATCH), if in_flight.len() < MAX_IN_FLIGHT => {
                    if count == 0 {
                        return;
                    }
                    let batch = std::mem::take(&mut waiting);
                    // The task connects before it sends a batch, so that batches are sent in order. A batch in flight may be the one
                    // that reconnects, and only proceeds while it is polled.
                    let connecting = self.context.connection.session();
                    tokio::pin!(connecting);
                    let connected = loop {
                        tokio::select! {
                            connected = &mut connecting => break connected,
                            Some(()) = in_flight.next(), if !in_flight.is_empty() => {}
                        }
                    };
                    match connected {
                        Ok(session) => in_flight.push(send_batch(self.context.clone(), session, batch)),
                        Err(failure) => batch.into_iter().for_each(|item| _ = item.reply.send(Err(failure.clone()))),
                    }
                }
            }
        }
    }
}

/// A waiter that a release has handed the lock gets its fence and how many microseconds of the lease are left.
fn parse_reply(sent_at: BootInstant, row: Option<&Row>) -> Result<RequestReply, Failure> {
    let text: String = row.and_then(|row| row.try_get(0).ok()).ok_or_else(Failure::unexpected_reply)?;
    let handed_over = text.split_once(' ').and_then(|(fence, left)| {
        fence.parse::<i64>().ok()?;
        Some((fence.to_owned(), Duration::from_micros(left.parse().ok()?)))
    });
    Ok(match handed_over {
        Some((fence, left)) => RequestReply { sent_at, text: fence, lease: Some(left) },
        None => RequestReply { sent_at, text, lease: None },
    })
}

/// Sends one statement for all requests of one name, and one for each request of several names.
async fn send_batch(context: Arc<BatchContext>, session: PgSession, mut batch: Vec<BatchItem>) {
    // A request whose caller has gone away is not sent.
    batch.retain(|item| !item.reply.is_closed());
    let (mut single, several): (Vec<BatchItem>, Vec<BatchItem>) =
        batch.into_iter().partition(|item| item.params.names.len() == 1);
    // In the order of names, as every client does; requests of one name in the order of submission.
    single.sort_by(|a, b| a.params.names.cmp(&b.params.names));
    let (context, session) = (&context, &session);
    let alone = several.into_iter().map(|item| send_statement(context, session, vec![item]));
    let together = async {
        if !single.is_empty() {
            send_statement(context, session, single).await;
        }
    };
    join(together, join_all(alone)).await;
}

async fn send_statement(context: &BatchContext, session: &PgSession, mut batch: Vec<BatchItem>) {
    let mut sent_at = context.options.clock.now();
    let mut rows = context.execute_items(session, &batch).await;
    let mut repaired = false;
    while let Err(failure) = &rows {
        match failure {
            // Not sent: the next round makes a new connection.
            Failure::ConnectionEnded => batch.retain(|item| !item.reply.is_closed()),
            // The schema was dropped, and the statement did nothing; a new connection creates the schema again.
            failure if failure.is_missing() && !std::mem::replace(&mut repaired, true) => {
                context.connection.repair_schema()
            }
            _ => break,
        }
        if batch.is_empty() {
            return;
        }
        rows = match context.connection.session().await {
            Ok(session) => {
                sent_at = context.options.clock.now();
                context.execute_items(&session, &batch).await
            }
            Err(failure) => Err(failure),
        };
    }
    let rows = match rows {
        Ok(rows) if rows.len() == batch.len() => Ok(rows),
        Ok(_) => Err(Failure::unexpected_reply()),
        Err(failure) => Err(failure),
    };
    let mut rows = rows.map(Vec::into_iter);
    for BatchItem { reply, .. } in batch {
        let one = match &mut rows {
            Ok(rows) => parse_reply(sent_at, rows.next().as_ref()),
            Err(failure) => Err(failure.clone()),
        };
        _ = reply.send(one);
    }
}

impl BatchContext {
    async fn execute_items(&self, session: &PgSession, batch: &[BatchItem]) -> Result<Vec<Row>, Failure> {
        let requests: Vec<&RequestParams> = batch.iter().map(|item| &item.params).collect();
        self.execute(session, &requests, false).await
    }

    async fn execute(
        &self,
        session: &PgSession,
        batch: &[&RequestParams],
        fast_path: bool,
    ) -> Result<Vec<Row>, Failure> {
        let claim = &micros(self.ttls.entry_life(self.options.claim, self.options.poll));
        let (client, epoch) = (&self.client, &session.epoch());
        let requests = || batch.iter();
        if let [RequestParams { kind, names, attempt, ttl, terms, holder, .. }] = batch {
            let (number, enqueue) = (&(*kind as i32), &(*kind != RequestKind::TryOnce));
            return match (&names[..], kind) {
                ([name], _) => {
                    let params: [Param<'_>; 9] =
                        [client, epoch, claim, number, name, attempt, ttl, terms, holder];
                    let sql = match kind {
                        _ if !fast_path => &RUN_REQUEST,
                        RequestKind::Release => &RELEASE_FAST,
                        _ => &ACQUIRE_FAST,
                    };
                    session.rows(sql, &params).await
                }
                (_, RequestKind::Release) => session.rows(&RELEASE_NAMES, &[names, attempt]).await,
                _ => {
                    let params: [Param<'_>; 9] =
                        [client, epoch, claim, enqueue, names, attempt, ttl, terms, holder];
                    session.rows(&ACQUIRE_NAMES, &params).await
                }
            };
        }
        let kinds: Vec<i32> = requests().map(|request| request.kind as i32).collect();
        let names: Vec<&str> = requests().map(|request| request.names[0].as_str()).collect();
        let attempts: Vec<&[u8]> = requests().map(|request| &request.attempt[..]).collect();
        let ttls: Vec<Option<i64>> = requests().map(|request| request.ttl).collect();
        let terms: Vec<Option<&str>> = requests().map(|request| request.terms.as_deref()).collect();
        let holders: Vec<Option<&str>> = requests().map(|request| request.holder.as_deref()).collect();
        let params: [Param<'_>; 9] =
            [client, epoch, claim, &kinds, &names, &attempts, &ttls, &terms, &holders];
        session.rows(&RUN_REQUESTS, &params).await
    }
}
