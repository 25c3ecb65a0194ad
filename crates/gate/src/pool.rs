//! The pool of connections to the service.
//!
//! The task of a request also drives the connection that the request is sent on. A task per connection would have to be woken
//! twice for each request, and waking a task costs more than everything else that the gate does for a request.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::client::legacy::connect::HttpConnector;
use tokio::time::{Instant, Sleep, sleep};
use tower_service::Service;

use crate::body::{ForwardedBody, ProxyBodyError, Upload};

/// How long the pool keeps an unused connection open.
const MAX_IDLE: Duration = Duration::from_secs(30);
/// How often the pool looks for unused connections that are too old, and for those that the service has closed.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// All connections to the service. Clones share them.
#[derive(Clone)]
pub struct UpstreamPool(Arc<UpstreamPoolState>);

struct UpstreamPoolState {
    connector: HttpConnector,
    service: Uri,
    /// How long a request may make no progress until the response begins.
    timeout: Duration,
    /// The unused connections; the one that was used last is on top.
    unused: Mutex<Vec<PooledConnection>>,
}

/// One connection to the service.
struct PooledConnection {
    sender: SendRequest<ForwardedBody>,
    /// hyper's side of the connection, which reads and writes. `None`: it is closed.
    driver: Option<Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>>,
    /// Not reset for each request, but set to a later time when it fires: most requests end before that.
    timer: Pin<Box<Sleep>>,
    last_used: Instant,
    /// The body of the request that is being sent.
    upload: Option<Upload>,
}

/// Why the service gave no response.
#[derive(Debug)]
pub enum ForwardError {
    /// Nothing was sent to the service.
    NotSent(ProxyBodyError),
    /// The request was sent, and the service closed the connection.
    Disconnected(hyper::Error),
    /// The request was sent, and neither side made progress for too long; or its body was cut off for a newer request.
    TimedOut,
}

impl UpstreamPool {
    pub fn new(service: Uri, connect_timeout: Duration, timeout: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(connect_timeout));
        let state = Arc::new(UpstreamPoolState { connector, service, timeout, unused: Mutex::default() });
        tokio::spawn(sweep(Arc::downgrade(&state)));
        UpstreamPool(state)
    }

    /// Sends a request, and waits for the head of the response.
    pub async fn send(
        &self,
        mut request: Box<Request<ForwardedBody>>,
    ) -> Result<Response<Incoming>, ForwardError> {
        loop {
            let unused = self.0.unused().pop();
            let fresh = unused.is_none();
            let mut connection = match unused {
                Some(connection) => connection,
                None => self.connect().await.map_err(ForwardError::NotSent)?,
            };
            match connection.send(request, self.0.timeout).await {
                Some(Ok(response)) => {
                    self.put_back(connection);
                    return Ok(response);
                }
                // The service had closed the connection before the request was sent. That is normal for an old connection, so
                // the request goes to another one; for a new connection it is an error.
                Some(Err(mut error)) => match error.take_message() {
                    Some(unsent) if !fresh => request = Box::new(unsent),
                    Some(_) => return Err(ForwardError::NotSent(error.into_error().into())),
                    None => return Err(ForwardError::Disconnected(error.into_error())),
                },
                None => return Err(ForwardError::TimedOut),
            }
        }
    }

    async fn connect(&self) -> Result<PooledConnection, ProxyBodyError> {
        let stream = self.0.connector.clone().call(self.0.service.clone()).await?;
        let (sender, driver) = http1::handshake(stream).await?;
        Ok(PooledConnection {
            sender,
            driver: Some(Box::pin(driver.with_upgrades())),
            timer: Box::pin(sleep(self.0.timeout)),
            last_used: Instant::now(),
            upload: None,
        })
    }

    /// Returns a connection to the pool, now or when the service has sent the whole response.
    fn put_back(&self, mut connection: PooledConnection) {
        if connection.sender.is_ready() {
            // Polled with a waker that does nothing: otherwise the next request on this connection would wake this task.
            if !connection.drive(&mut no_wake()) {
                connection.last_used = Instant::now();
                connection.upload = None;
                self.0.unused().push(connection);
            }
        } else if connection.driver.is_some() {
            let pool = self.clone();
            tokio::spawn(async move {
                if poll_fn(|cx| connection.poll_ready(cx)).await {
                    pool.put_back(connection);
                }
            });
        }
    }
}

impl UpstreamPoolState {
    fn unused(&self) -> MutexGuard<'_, Vec<PooledConnection>> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Drops unused connections that are too old or that the service has closed, for as long as the pool exists.
async fn sweep(pool: Weak<UpstreamPoolState>) {
    loop {
        tokio::time::sleep(SWEEP_INTERVAL).await;
        let Some(pool) = pool.upgrade() else { return };
        pool.unused().retain_mut(|connection| {
            connection.last_used.elapsed() < MAX_IDLE && !connection.drive(&mut no_wake())
        });
    }
}

/// A context for polling once, without being woken later.
fn no_wake() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

impl PooledConnection {
    /// Reads and writes as far as possible. Returns whether the connection is closed.
    fn drive(&mut self, cx: &mut Context<'_>) -> bool {
        if let Some(driver) = &mut self.driver
            && driver.as_mut().poll(cx).is_ready()
        {
            self.driver = None;
        }
        self.driver.is_none()
    }

    /// Ready with `true` when the next request can be sent, with `false` when the connection is closed.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        if self.drive(cx) || self.is_cut_off(cx) {
            return Poll::Ready(false);
        }
        self.sender.poll_ready(cx).map(|ready| ready.is_ok())
    }

    /// Whether the rest of the body must not be sent: then the connection must be dropped.
    fn is_cut_off(&mut self, cx: &mut Context<'_>) -> bool {
        self.upload.as_mut().is_some_and(|upload| upload.is_cut_off(cx))
    }

    /// Sends a request and waits for the head of the response. `None`: neither side made progress for `timeout`, or a newer request
    /// waited too long for the rest of the body.
    async fn send(
        &mut self,
        request: Box<Request<ForwardedBody>>,
        timeout: Duration,
    ) -> Option<Result<Response<Incoming>, TrySendError<Request<ForwardedBody>>>> {
        let upload = self.upload.insert(request.body().upload());
        let progress = upload.progress.clone();
        let mut response = pin!(self.sender.try_send_request(*request));
        poll_fn(|cx| {
            // The response can only arrive through the driver, which this task polls itself: it needs no wake-up for it.
            self.drive(cx);
            if let Poll::Ready(response) = response.as_mut().poll(&mut no_wake()) {
                return Poll::Ready(Some(response));
            }
            if self.is_cut_off(cx) {
                return Poll::Ready(None);
            }
            while self.timer.as_mut().poll(cx).is_ready() {
                let deadline = progress.last() + timeout;
                if deadline <= Instant::now() {
                    return Poll::Ready(None);
                }
                self.timer.as_mut().reset(deadline);
            }
            Poll::Pending
        })
        .await
    }
}
