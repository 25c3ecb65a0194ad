//! The service: finds, runs and replays requests with an `Idempotency-Key`.

use std::fmt;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Either, Full, LengthLimitError, Limited};
use lockkeeper_core::Error;
use tower_service::Service;
use tracing::Instrument;

use super::key;
use super::layer::IdempotencyRules;
use super::problem::IdempotencyProblem;
use super::stored_response::StoredResponse;
use crate::recipes::once::{Once, OnceStart, RunPermit, Stored, nested};

pub(super) type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// The body that the inner service receives: the client's own, or, for a request with a key, the one that
/// the layer has read.
pub type RequestBody<B> = Either<B, Full<Bytes>>;
/// The body that the client receives: the service's own, or a stored one.
pub type IdempotentBody<R> = Either<R, Full<Bytes>>;

/// A service whose requests with an `Idempotency-Key` are done once. Made by
/// [`IdempotencyLayer`](super::IdempotencyLayer).
#[derive(Clone)]
pub struct Idempotency<S> {
    pub(super) inner: S,
    pub(super) rules: IdempotencyRules,
}

impl<S: fmt::Debug> fmt::Debug for Idempotency<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Idempotency({:?})", self.inner)
    }
}

impl<S, B, R> Service<Request<B>> for Idempotency<S>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BodyError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BodyError>,
{
    type Response = Response<IdempotentBody<R>>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // Call the clone that `poll_ready` has made ready.
        let fresh = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, fresh);
        let rules = self.rules.clone();
        Box::pin(async move {
            match prepare(&rules, request).await {
                PreparedRequest::Pass(request) => {
                    inner.call(request).await.map(|response| response.map(Either::Left))
                }
                PreparedRequest::Answer(answer) => Ok(answer.response().map(Either::Right)),
                PreparedRequest::Run { request, once, permit } => {
                    // Spawn a task: a client that hangs up retries, and should find the work running, not
                    // dropped.
                    let run = run(inner, rules, *request, once, permit).in_current_span();
                    let answer = match tokio::spawn(run).await {
                        Ok(answer) => answer?,
                        Err(ended) if ended.is_panic() => std::panic::resume_unwind(ended.into_panic()),
                        Err(_) => IdempotencyProblem::Unknown.answer(),
                    };
                    Ok(answer.response().map(Either::Right))
                }
            }
        })
    }
}

/// The decision of the layer about a request.
enum PreparedRequest<B> {
    /// Pass it on: it has no key, or keys do not count for it.
    Pass(Request<RequestBody<B>>),
    /// Answer without calling the service.
    Answer(StoredResponse),
    /// Call the service under the permit.
    Run { request: Box<Request<RequestBody<B>>>, once: Once, permit: Box<RunPermit> },
}

impl<B> From<IdempotencyProblem> for PreparedRequest<B> {
    fn from(problem: IdempotencyProblem) -> Self {
        PreparedRequest::Answer(problem.answer())
    }
}

async fn prepare<B>(rules: &IdempotencyRules, request: Request<B>) -> PreparedRequest<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BodyError>,
{
    let (mut parts, body) = request.into_parts();
    let key = match rules.concern(&parts.method).then(|| key::of(&parts.headers)) {
        None => return PreparedRequest::Pass(Request::from_parts(parts, Either::Left(body))),
        Some(Ok(None)) if rules.requires() => return IdempotencyProblem::Missing.into(),
        Some(Ok(None)) => return PreparedRequest::Pass(Request::from_parts(parts, Either::Left(body))),
        Some(Ok(Some(key))) => key,
        Some(Err(why)) => return IdempotencyProblem::Malformed(why).into(),
    };
    // Read the body before the claim: a client that sends slowly must not hold a lock.
    let body = match read(body, rules.body_limit).await {
        Ok(body) => body,
        Err(problem) => return problem.into(),
    };
    let Some(once) = rules.once(&key, &parts, &body) else {
        tracing::error!(
            "refused a request with an Idempotency-Key and no tenant: attach the layer inside of the one that checks credentials"
        );
        return IdempotencyProblem::NoScope.into();
    };
    match once.clone().claim().await {
        Ok(OnceStart::Run(permit)) => {
            parts.extensions.insert(permit.fence());
            let request = Box::new(Request::from_parts(parts, Either::Right(Full::new(body))));
            PreparedRequest::Run { request, once, permit }
        }
        Ok(OnceStart::Done(done)) => PreparedRequest::Answer(replay(done.result)),
        Err(Error::Busy(_)) => IdempotencyProblem::Running.into(),
        Err(Error::Invalid(_)) if once.has_other_fingerprint().await.unwrap_or(false) => {
            IdempotencyProblem::Reused.into()
        }
        // The work was done, and its result could not be stored.
        Err(Error::Unknown(why)) => {
            tracing::error!(%why, "no stored response for an Idempotency-Key whose work was done; answering 504");
            IdempotencyProblem::Unknown.into()
        }
        Err(error) => {
            tracing::error!(%error, "cannot look up an Idempotency-Key; answering 503");
            IdempotencyProblem::Unavailable.into()
        }
    }
}

async fn read<B>(body: B, most: usize) -> Result<Bytes, IdempotencyProblem>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BodyError>,
{
    // Refuse by the declared length, before the body is sent.
    if body.size_hint().lower() > most as u64 {
        return Err(IdempotencyProblem::TooLarge(most));
    }
    match Limited::new(body, most).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(IdempotencyProblem::TooLarge(most)),
        Err(_) => Err(IdempotencyProblem::Broken),
    }
}

fn replay(stored: Stored) -> StoredResponse {
    match StoredResponse::parse(stored.bytes) {
        Ok(answer) => answer.again(),
        Err(error) => {
            tracing::error!(%error, "cannot read a stored response; answering 503");
            IdempotencyProblem::Unavailable.answer()
        }
    }
}

/// Calls the service under the lease, and stores the response before any client receives it.
async fn run<S, B, R>(
    mut inner: S,
    rules: IdempotencyRules,
    request: Request<RequestBody<B>>,
    once: Once,
    permit: Box<RunPermit>,
) -> Result<StoredResponse, S::Error>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>>,
    R: Body<Data = Bytes>,
    R::Error: Into<BodyError>,
{
    let work = async { Ok(StoredResponse::of(inner.call(request).await?, rules.answer_limit).await) };
    let (status, answer) = match permit.guard().run(nested::scope(permit.cas_record(), work)).await {
        // No response: the permit is given back, and the next request runs.
        Ok(answer) => answer?,
        Err(error) => return Ok(late(&once, &error).await),
    };
    // The service's own status decides, also if its body broke off: a 503 says that the request had no
    // effect, and work with any other stored status was done and is not done again.
    let kept = !rules.forgets(status);
    let answer = if kept || answer.status == status { answer } else { StoredResponse::bare(status) };
    let stored = Stored { ok: kept, bytes: answer.bytes() };
    Ok(match permit.finish(stored).await {
        Ok(()) => answer,
        Err(error) => late(&once, &error).await,
    })
}

/// The response that clients receive if this one was not stored: the successor's, if there is one.
async fn late(once: &Once, error: &Error) -> StoredResponse {
    tracing::warn!(%error, "could not store the response to a request with an Idempotency-Key; answering with its successor's response, or 504");
    match once.result().await {
        Ok(Some(done)) => replay(done.result),
        _ => IdempotencyProblem::Unknown.answer(),
    }
}
