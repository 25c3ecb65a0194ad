//! Bodies, and how long they may be silent: whoever stops sending would keep others waiting.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use lockkeeper_fenced::http::Loss;
use tokio::time::{Instant, Sleep, sleep};

use super::metrics::One;

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// When something was last sent, seen from both sides.
#[derive(Clone, Debug)]
pub struct Progress {
    began: Instant,
    micros: Arc<AtomicU64>,
}

impl Progress {
    pub fn new() -> Self {
        Progress { began: Instant::now(), micros: Arc::default() }
    }

    fn note(&self) {
        let micros = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.micros.store(micros, Ordering::Relaxed);
    }

    /// When that was; at first, when the request came.
    pub fn last(&self) -> Instant {
        self.began + Duration::from_micros(self.micros.load(Ordering::Relaxed))
    }
}

/// The body of a request, which notes when a part of it was sent.
pub struct Sent {
    body: Incoming,
    pub progress: Progress,
    /// Of a request with a fence.
    loss: Option<Loss>,
    /// How long the rest may take once a newer fence waits.
    grace: Duration,
    /// The end of that time. Most bodies come in one piece, and need none.
    cut: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Sent {
    pub fn new(body: Incoming, loss: Option<Loss>, grace: Duration) -> Self {
        Sent { body, progress: Progress::new(), loss, grace, cut: None }
    }

    /// Whether the rest of the body has taken too long: a client with an older fence that sends a byte now and then would keep
    /// newer ones out for as long as it likes.
    fn is_cut(&mut self, cx: &mut Context<'_>) -> bool {
        let (Some(loss), grace) = (&self.loss, self.grace) else { return false };
        let cut = self.cut.get_or_insert_with(|| {
            let loss = loss.clone();
            Box::pin(async move {
                loss.overtaken().await;
                sleep(grace).await;
            })
        });
        cut.as_mut().poll(cx).is_ready()
    }
}

impl Body for Sent {
    type Data = bytes::Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<bytes::Bytes>, BoxError>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else {
            if self.is_cut(cx) {
                return Poll::Ready(Some(Err(
                    "a newer fence waits, and the rest of the body did not come".into()
                )));
            }
            return Poll::Pending;
        };
        self.progress.note();
        // The service must not get a whole request together when another gate may have let a newer one through.
        if self.loss.as_ref().is_some_and(Loss::happened) {
            return Poll::Ready(Some(Err("the lock of the marks was lost".into())));
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

/// The body of an answer, with an end to its patience.
pub struct Idle {
    body: Incoming,
    most: Duration,
    /// Most answers come in one piece, and need none.
    timer: Option<Pin<Box<Sleep>>>,
    waiting: bool,
    /// The request counts until its answer has ended, not until it has begun.
    _under_way: One,
}

impl Idle {
    pub fn new(body: Incoming, most: Duration, under_way: One) -> Self {
        Idle { body, most, timer: None, waiting: false, _under_way: under_way }
    }
}

impl Body for Idle {
    type Data = bytes::Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<bytes::Bytes>, BoxError>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            this.waiting = false;
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let timer = this.timer.get_or_insert_with(|| Box::pin(sleep(this.most)));
        if !this.waiting {
            this.waiting = true;
            timer.as_mut().reset(Instant::now() + this.most);
        }
        match timer.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Some(Err("nothing came for too long".into()))),
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
