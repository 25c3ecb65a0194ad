//! The bodies of requests and responses, with time-outs: a peer that stops sending must not keep other clients waiting.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use lockkeeper_fenced::http::Loss;
use tokio::time::{Instant, Sleep, sleep};

use crate::metrics::GaugeGuard;

/// Why a body broke off.
pub type ProxyBodyError = Box<dyn std::error::Error + Send + Sync>;

/// How far the body of a request has come. Shared by the body and the task that sends it to the service.
#[derive(Clone, Debug)]
pub struct BodyProgress {
    started: Instant,
    state: Arc<BodyState>,
}

#[derive(Debug, Default)]
struct BodyState {
    /// When the client sent the last part, in microseconds after `started`.
    micros: AtomicU64,
    /// The body has been handed over to its end, or is gone.
    over: AtomicBool,
}

impl BodyProgress {
    fn new() -> Self {
        BodyProgress { started: Instant::now(), state: Arc::default() }
    }

    fn record(&self) {
        let micros = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.state.micros.store(micros, Ordering::Relaxed);
    }

    fn end(&self) {
        self.state.over.store(true, Ordering::Relaxed);
    }

    /// Whether nothing of the body is to come.
    pub fn is_over(&self) -> bool {
        self.state.over.load(Ordering::Relaxed)
    }

    /// The time of the last part; before the first part, the time at which the request arrived.
    pub fn last(&self) -> Instant {
        self.started + Duration::from_micros(self.state.micros.load(Ordering::Relaxed))
    }
}

/// The body of a request on its way to the service.
pub struct ForwardedBody {
    body: Incoming,
    progress: BodyProgress,
    /// Present if the request has a fence.
    loss: Option<Loss>,
    /// How long the rest may take once a request with a newer fence waits.
    overtaken_grace: Duration,
}

impl ForwardedBody {
    pub fn new(body: Incoming, loss: Option<Loss>, overtaken_grace: Duration) -> Self {
        let progress = BodyProgress::new();
        if body.is_end_stream() {
            progress.end();
        }
        ForwardedBody { body, progress, loss, overtaken_grace }
    }

    /// The upload of this body, for the task that sends it.
    pub fn upload(&self) -> Upload {
        let limit = self.loss.clone().map(|loss| (loss, self.overtaken_grace));
        Upload { progress: self.progress.clone(), limit, cut_off: None }
    }
}

impl Drop for ForwardedBody {
    fn drop(&mut self) {
        self.progress.end();
    }
}

/// A body on its way, as the task sees it that sends it.
///
/// The task decides when the upload has taken too long, and not the body: hyper does not ask the body while it waits for the service to
/// read, so a client with an older fence and a service that reads slowly would keep clients with newer fences waiting.
pub struct Upload {
    pub progress: BodyProgress,
    limit: Option<(Loss, Duration)>,
    /// Completes when the rest has taken too long. Created late: most bodies arrive in one piece and need no timer.
    cut_off: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Upload {
    /// Whether a request with a newer fence waits, and the rest of this body has not come in time, from whichever side. The connection
    /// to the service must be closed then: the service gets no whole request.
    pub fn is_cut_off(&mut self, cx: &mut Context<'_>) -> bool {
        if self.progress.is_over() {
            // Nothing is left to wait for, and no newer request should wake this task.
            self.cut_off = None;
            return false;
        }
        let Some((loss, grace)) = &self.limit else { return false };
        let cut_off = self.cut_off.get_or_insert_with(|| {
            let (loss, grace) = (loss.clone(), *grace);
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
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        self.progress.record();
        // Once the marks are lost, another gate may have forwarded a newer fence: the service must not get a whole request.
        if self.loss.as_ref().is_some_and(Loss::happened) {
            return Poll::Ready(Some(Err("the gate lost the lock of the marks".into())));
        }
        if frame.is_none() || self.body.is_end_stream() {
            self.progress.end();
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
