//! A body that may not be silent for too long: whoever stops sending would keep others waiting.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A body with an end to its patience. The timer is made only when there is something to wait for.
pub struct Idle<B> {
    body: B,
    most: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    waiting: bool,
}

impl<B> Idle<B> {
    pub fn new(body: B, most: Duration) -> Self {
        Idle { body, most, timer: None, waiting: false }
    }
}

impl<B: Body + Unpin> Body for Idle<B>
where
    B::Error: Into<BoxError>,
{
    type Data = B::Data;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
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
