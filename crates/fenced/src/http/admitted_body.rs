//! The body of a response whose request counts as under way: read to its end, whatever its client does.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use lockkeeper_core::IgnorePoison;

use super::in_flight::WriteAdmission;

/// A response on its way to a client that may read it slowly.
pub(super) trait ClientResponse: Send + Sync {
    /// Breaks the response off for its client, and reads the rest in its place.
    fn detach(&self);
}

/// How a response is treated whose client does not read it to its end.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResponseRules {
    /// The request changes nothing: the response need not be read to its end.
    pub reads: bool,
    /// How long the client has to read it, once a newer fence is admitted.
    pub grace: Duration,
}

/// A body whose request counts as under way until it has ended. Dropped before, it is read to its end in the background: a service
/// may answer while it works, and a client that hangs up does not end that work. A request that only reads is cut off instead.
///
/// The same happens to a client that has not read the response to its end a [while](super::FenceLayer::wait) after a newer fence was
/// admitted: for the client it ends with an error.
pub struct AdmittedBody<R: Body + Send + Unpin + 'static>(Kind<R>);

enum Kind<R: Body + Send + Unpin + 'static> {
    /// Of a request without a fence.
    Unchecked(R),
    Counted(Arc<CountedBody<R>>),
}

/// Shared by the client's end of a body and the task that may detach it: a server does not poll a body whose client does not read.
struct CountedBody<R> {
    state: Mutex<SharedBodyState<R>>,
    reads: bool,
}

struct SharedBodyState<R> {
    /// `None` when it goes on in the background.
    body: Option<R>,
    /// `None` when it has ended.
    admission: Option<WriteAdmission>,
    /// The client was detached, and has not seen it yet.
    cut_off: bool,
    /// The client's task, while it waits for the next part.
    reader: Option<Waker>,
}

impl<R: Body + Send + Unpin + 'static> fmt::Debug for AdmittedBody<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = matches!(&self.0, Kind::Counted(counted) if counted.lock().admission.is_some());
        write!(f, "AdmittedBody(counted: {counted})")
    }
}

impl<R: Body + Send + Unpin + 'static> AdmittedBody<R> {
    pub(super) fn unchecked(body: R) -> Self {
        AdmittedBody(Kind::Unchecked(body))
    }

    pub(super) fn new(body: R, admission: WriteAdmission, rules: ResponseRules) -> Self {
        let its = admission.clone();
        let state =
            SharedBodyState { body: Some(body), admission: Some(admission), cut_off: false, reader: None };
        let counted = Arc::new(CountedBody { state: Mutex::new(state), reads: rules.reads });
        let weak: Weak<CountedBody<R>> = Arc::downgrade(&counted);
        its.begin_response(weak, rules.grace);
        AdmittedBody(Kind::Counted(counted))
    }
}

impl<R> CountedBody<R> {
    fn lock(&self) -> MutexGuard<'_, SharedBodyState<R>> {
        self.state.lock().ignore_poison()
    }
}

impl<R: Body + Send + Unpin + 'static> CountedBody<R> {
    /// Takes the body from the client, unless it has ended, and goes on with it in the background.
    fn take_over(&self, state: &mut SharedBodyState<R>) -> bool {
        let Some(admission) = state.admission.take() else { return false };
        let Some(mut body) = state.body.take_if(|body| !body.is_end_stream()) else { return false };
        if !self.reads
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                while let Some(Ok(_)) = body.frame().await {}
                drop(body);
                drop(admission);
            });
        }
        true
    }
}

impl<R: Body + Send + Unpin + 'static> ClientResponse for CountedBody<R> {
    fn detach(&self) {
        let mut state = self.lock();
        state.cut_off = self.take_over(&mut state);
        let reader = state.reader.take();
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

impl<R: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static> Body for AdmittedBody<R> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let counted = match &mut self.0 {
            Kind::Unchecked(body) => return Pin::new(body).poll_frame(cx).map_err(Into::into),
            Kind::Counted(counted) => counted,
        };
        let mut state = counted.lock();
        if std::mem::take(&mut state.cut_off) {
            let why =
                "a request with a newer fence waits, and the rest of this response was not read in time";
            return Poll::Ready(Some(Err(why.into())));
        }
        let Some(body) = &mut state.body else { return Poll::Ready(None) };
        let frame = Pin::new(body).poll_frame(cx);
        match &frame {
            Poll::Pending => state.reader = Some(cx.waker().clone()),
            Poll::Ready(Some(Ok(_))) => {}
            Poll::Ready(None | Some(Err(_))) => state.admission = None,
        }
        frame.map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Unchecked(body) => body.is_end_stream(),
            Kind::Counted(counted) => {
                let state = counted.lock();
                !state.cut_off && state.body.as_ref().is_none_or(Body::is_end_stream)
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Unchecked(body) => body.size_hint(),
            Kind::Counted(counted) => {
                counted.lock().body.as_ref().map_or_else(SizeHint::default, Body::size_hint)
            }
        }
    }
}

type BoxError = Box<dyn Error + Send + Sync>;

impl<R: Body + Send + Unpin + 'static> Drop for AdmittedBody<R> {
    fn drop(&mut self) {
        if let Kind::Counted(counted) = &self.0
            && !std::thread::panicking()
        {
            counted.take_over(&mut counted.lock());
        }
    }
}
