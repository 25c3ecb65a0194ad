//! The service: checks the fence of a request, passes it on, and counts it as in flight until its response
//! has ended.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use http_body::Body;
use http_body_util::{Either, Full};
use tower_service::Service;

use super::admitted_body::{AdmittedBody, ResponseRules};
use super::in_flight::WriteAdmission;
use super::layer::{FenceRules, only_reads};

/// A service that hears nothing of stale requests. Made by [`FenceLayer`](super::FenceLayer).
#[derive(Clone)]
pub struct Checked<S> {
    pub(super) inner: S,
    pub(super) rules: Arc<FenceRules>,
}

impl<S: fmt::Debug> fmt::Debug for Checked<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checked({:?})", self.inner)
    }
}

/// The body that the client gets: the service's, or that of a [`Problem`](super::Problem).
pub type AnswerBody<R> = Either<AdmittedBody<R>, Full<Bytes>>;

impl<S, B, R> Service<Request<B>> for Checked<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Send + 'static,
    R: Body<Data = Bytes> + Send + Unpin + 'static,
{
    type Response = Response<AnswerBody<R>>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let entered = match self.rules.presented(&parts) {
            Ok(Some((fence, resource))) => self.rules.enter(fence, &resource),
            Ok(None) => {
                let call = self.inner.call(Request::from_parts(parts, body));
                return Box::pin(async {
                    Ok(call.await?.map(|body| Either::Left(AdmittedBody::unchecked(body))))
                });
            }
            Err(problem) => Err(problem),
        };
        let admission = match entered {
            Ok(admission) => admission,
            Err(problem) => return Box::pin(async { Ok(problem.response().map(Either::Right)) }),
        };
        parts.extensions.insert(admission.clone());
        let read = ResponseRules { reads: only_reads(&parts), grace: self.rules.grace() };
        let request = Request::from_parts(parts, body);
        if self.rules.passes(&admission) {
            return Box::pin(finished(self.inner.call(request), admission, read));
        }
        // The one that said it is ready goes with the request.
        let fresh = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, fresh);
        let rules = self.rules.clone();
        Box::pin(async move {
            match rules.admit(&admission).await {
                Ok(()) => finished(inner.call(request), admission, read).await,
                Err(problem) => Ok(problem.response().map(Either::Right)),
            }
        })
    }
}

/// Calls the service, to the end.
fn finished<F, R, E>(
    call: F,
    admission: WriteAdmission,
    rules: ResponseRules,
) -> impl Future<Output = Result<Response<AnswerBody<R>>, E>> + Send
where
    F: Future<Output = Result<Response<R>, E>> + Send + 'static,
    R: Body + Send + Unpin + 'static,
    E: Send + 'static,
{
    let work = async move {
        let response = call.await?;
        Ok(response.map(|body| Either::Left(AdmittedBody::new(body, admission, rules))))
    };
    Finished { work: Some(Box::pin(work)), begun: false }
}

/// Work that goes on in the background when its caller drops it. A client that hangs up does not end what
/// the service has begun, and the next request must not begin before it has ended.
struct Finished<F: Future<Output: Send> + Send + 'static> {
    work: Option<Pin<Box<F>>>,
    begun: bool,
}

impl<F: Future<Output: Send> + Send + 'static> Future for Finished<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.begun = true;
        let Some(work) = &mut self.work else { return Poll::Pending };
        let answer = work.as_mut().poll(cx);
        if answer.is_ready() {
            self.work = None;
        }
        answer
    }
}

impl<F: Future<Output: Send> + Send + 'static> Drop for Finished<F> {
    fn drop(&mut self) {
        if let (Some(work), true, false) = (self.work.take(), self.begun, std::thread::panicking())
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(work);
        }
    }
}
