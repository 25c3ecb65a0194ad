//! The bodies of requests and responses, with time-outs: a peer that stops sending must not keep other clients waiting.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use lockkeeper_fenced::http::Loss;
use tokio::time::{Instant, Sleep, sleep};

use crate::metrics::GaugeGuard;

/// Why a body broke off.
pub type ProxyBodyError = Box<dyn std::error::Error + Send + Sync>;

/// When the client last sent a part of a request's body. Shared by the body and the task that waits for the response.
#[derive(Clone, Debug)]
pub struct BodyProgress {
    started: Instant,
    micros: Arc<AtomicU64>,
}

impl BodyProgress {
    pub fn new() -> Self {
        BodyProgress { started: Instant::now(), micros: Arc::default() }
    }

    fn record(&self) {
        let micros = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.micros.store(micros, Ordering::Relaxed);
    }

    /// The time of the last part; before the first part, the time at which the request arrived.
    pub fn last(&self) -> Instant {
        self.started + Duration::from_micros(self.micros.load(Ordering::Relaxed))
    }
}

/// The body of a request on its way to the service.
pub struct ForwardedBody {
    body: Incoming,
    pub progress: BodyProgress,
    /// Present if the request has a fence.
    loss: Option<Loss>,
    /// How long the rest may take once a request with a newer fence waits.
    overtaken_grace: Duration,
    /// Completes at the end of that time. Created late: most bodies arrive in one piece and need no timer.
    cut_off: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl ForwardedBody {
    pub fn new(body: Incoming, loss: Option<Loss>, overtaken_grace: Duration) -> Self {
        ForwardedBody { body, progress: BodyProgress::new(), loss, overtaken_grace, cut_off: None }
    }

    /// Whether the rest of the body has taken too long. Without this, a client with an older fence that sends a byte now and
    /// then would keep clients with newer fences waiting for as long as it likes.
    fn is_cut_off(&mut self, cx: &mut Context<'_>) -> bool {
        let (Some(loss), grace) = (&self.loss, self.overtaken_grace) else { return false };
        let cut_off = self.cut_off.get_or_insert_with(|| {
            let loss = loss.clone();
            Box::pin(async move {
                loss.overtaken().await;
                sleep(grace).await;
            })
        });
        cut_off.as_mut().poll(cx).is_ready()
    }
}

impl Body for ForwardedBody {
    type Data = Bytes;
    type Error = ProxyBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ProxyBodyError>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else {
            if self.is_cut_off(cx) {
                return Poll::Ready(Some(Err(
                    "a request with a newer fence waits, and the client did not send the rest of the body in time"
                        .into(),
                )));
            }
            return Poll::Pending;
        };
        self.progress.record();
        // Once the marks are lost, another gate may have forwarded a newer fence: the service must not get a whole request.
        if self.loss.as_ref().is_some_and(Loss::happened) {
            return Poll::Ready(Some(Err("the gate lost the lock of the marks".into())));
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of the service's response, with an idle time-out.
pub struct ResponseBody {
    body: Incoming,
    idle_timeout: Duration,
    /// Created late: most bodies arrive in one piece and need no timer.
    timer: Option<Pin<Box<Sleep>>>,
    waiting: bool,
    /// Counts the request as in flight until its response has ended, not only until it has begun.
    _in_flight: GaugeGuard,
}

impl ResponseBody {
    pub fn new(body: Incoming, idle_timeout: Duration, in_flight: GaugeGuard) -> Self {
        ResponseBody { body, idle_timeout, timer: None, waiting: false, _in_flight: in_flight }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = ProxyBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ProxyBodyError>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            this.waiting = false;
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let timer = this.timer.get_or_insert_with(|| Box::pin(sleep(this.idle_timeout)));
        if !this.waiting {
            this.waiting = true;
            timer.as_mut().reset(Instant::now() + this.idle_timeout);
        }
        match timer.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Some(Err("the service sent nothing for too long".into()))),
            Poll::Pending => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
