//! The connections to the service.
//!
//! Whoever has a request under way on one drives it as well: a task for each connection would have to be woken twice for each
//! request, and to wake a task costs more than all else that is done here.

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

use super::body::{BoxError, Sent};

/// How long a connection is kept that nobody uses.
const KEPT: Duration = Duration::from_secs(30);
/// How often it is looked for those, and for connections that the service has closed.
const LOOK: Duration = Duration::from_secs(1);

/// All connections to the service. Clones share them.
#[derive(Clone)]
pub struct Links(Arc<Inner>);

struct Inner {
    connector: HttpConnector,
    service: Uri,
    /// How long a request may be silent.
    most: Duration,
    /// Those that nobody uses, the one that was used last on top.
    unused: Mutex<Vec<Link>>,
}

/// One connection.
struct Link {
    sender: SendRequest<Sent>,
    /// `None` when it is closed.
    work: Option<Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>>,
    /// It is left as it is from one request to the next, and set to a later time when it has rung: most requests need not touch it.
    timer: Pin<Box<Sleep>>,
    used: Instant,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum Trouble {
    /// Nothing was passed on.
    Unreached(BoxError),
    /// It was passed on, and the service broke off.
    Broken(hyper::Error),
    /// It was passed on, and nothing was heard for too long.
    Silent,
}

impl Links {
    pub fn new(service: Uri, connect_timeout: Duration, most: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(connect_timeout));
        let inner = Arc::new(Inner { connector, service, most, unused: Mutex::default() });
        tokio::spawn(clear(Arc::downgrade(&inner)));
        Links(inner)
    }

    /// Passes a request on, and waits for the head of the answer.
    pub async fn send(&self, mut request: Box<Request<Sent>>) -> Result<Response<Incoming>, Trouble> {
        loop {
            let unused = self.0.unused().pop();
            let fresh = unused.is_none();
            let mut link = match unused {
                Some(link) => link,
                None => self.connect().await.map_err(Trouble::Unreached)?,
            };
            match link.ask(request, self.0.most).await {
                Some(Ok(answer)) => {
                    self.put_back(link);
                    return Ok(answer);
                }
                // The service had closed it before anything was said: that happens to old connections, not to new ones.
                Some(Err(mut error)) => match error.take_message() {
                    Some(unsent) if !fresh => request = Box::new(unsent),
                    Some(_) => return Err(Trouble::Unreached(error.into_error().into())),
                    None => return Err(Trouble::Broken(error.into_error())),
                },
                None => return Err(Trouble::Silent),
            }
        }
    }

    async fn connect(&self) -> Result<Link, BoxError> {
        let stream = self.0.connector.clone().call(self.0.service.clone()).await?;
        let (sender, work) = http1::handshake(stream).await?;
        Ok(Link {
            sender,
            work: Some(Box::pin(work.with_upgrades())),
            timer: Box::pin(sleep(self.0.most)),
            used: Instant::now(),
        })
    }

    /// For the next one, now or when all of the answer has come.
    fn put_back(&self, mut link: Link) {
        if link.sender.is_ready() {
            // From now on it wakes nobody: the next request on it would wake us first of all.
            if !link.closed(&mut nobody()) {
                link.used = Instant::now();
                self.0.unused().push(link);
            }
        } else if link.work.is_some() {
            let links = self.clone();
            tokio::spawn(async move {
                if poll_fn(|cx| link.poll_ready(cx)).await {
                    links.put_back(link);
                }
            });
        }
    }
}

impl Inner {
    fn unused(&self) -> MutexGuard<'_, Vec<Link>> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Closes what nobody needs, and what the service has closed, for as long as there are links.
async fn clear(links: Weak<Inner>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(links) = links.upgrade() else { return };
        links.unused().retain_mut(|link| link.used.elapsed() < KEPT && !link.closed(&mut nobody()));
    }
}

/// For what is looked at, and not waited for.
fn nobody() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

impl Link {
    /// Does what there is to do. Says whether it is closed.
    fn closed(&mut self, cx: &mut Context<'_>) -> bool {
        if let Some(work) = &mut self.work
            && work.as_mut().poll(cx).is_ready()
        {
            self.work = None;
        }
        self.work.is_none()
    }

    /// Ready when the next request can be sent, or none can any more.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        if self.closed(cx) {
            return Poll::Ready(false);
        }
        self.sender.poll_ready(cx).map(|ready| ready.is_ok())
    }

    /// Sends a request and waits for the head of the answer. `None`: nothing was sent or heard for too long.
    async fn ask(
        &mut self,
        request: Box<Request<Sent>>,
        most: Duration,
    ) -> Option<Result<Response<Incoming>, TrySendError<Request<Sent>>>> {
        let progress = request.body().progress.clone();
        let mut answer = pin!(self.sender.try_send_request(*request));
        poll_fn(|cx| {
            // Whatever becomes of it comes from here, so that nobody need wake us for the answer.
            self.closed(cx);
            if let Poll::Ready(answer) = answer.as_mut().poll(&mut nobody()) {
                return Poll::Ready(Some(answer));
            }
            while self.timer.as_mut().poll(cx).is_ready() {
                let until = progress.last() + most;
                if until <= Instant::now() {
                    return Poll::Ready(None);
                }
                self.timer.as_mut().reset(until);
            }
            Poll::Pending
        })
        .await
    }
}
