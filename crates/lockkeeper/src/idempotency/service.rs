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

use super::answer::Answer;
use super::key;
use super::layer::Rules;
use super::problem::Problem;
use crate::recipes::once::{Claim, Once, Stored, Turn, nested};

pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The body that the inner service gets: the client's own, or, of a request with a key, one that was read already.
pub type RequestBody<B> = Either<B, Full<Bytes>>;
/// The body that the client gets: the service's own, or one that was kept.
pub type AnswerBody<R> = Either<R, Full<Bytes>>;

/// A service whose requests with an `Idempotency-Key` are done once. Made by [`IdempotencyLayer`](super::IdempotencyLayer).
#[derive(Clone)]
pub struct Idempotency<S> {
    pub(super) inner: S,
    pub(super) rules: Rules,
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
    B::Error: Into<BoxError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    type Response = Response<AnswerBody<R>>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The one that said it is ready goes with the request.
        let fresh = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, fresh);
        let rules = self.rules.clone();
        Box::pin(async move {
            match prepare(&rules, request).await {
                Next::Pass(request) => inner.call(request).await.map(|response| response.map(Either::Left)),
                Next::Answer(answer) => Ok(answer.response().map(Either::Right)),
                Next::Run { request, once, turn } => {
                    // A task of its own: who hangs up asks again, and is to find the work going on, not broken off.
                    let run = run(inner, rules, *request, once, turn).in_current_span();
                    let answer = match tokio::spawn(run).await {
                        Ok(answer) => answer?,
                        Err(ended) if ended.is_panic() => std::panic::resume_unwind(ended.into_panic()),
                        Err(_) => Problem::Unknown.answer(),
                    };
                    Ok(answer.response().map(Either::Right))
                }
            }
        })
    }
}

/// What is to become of a request.
enum Next<B> {
    /// It has no key, or keys do not count for it.
    Pass(Request<RequestBody<B>>),
    /// There is an answer without running anything.
    Answer(Answer),
    /// It is ours to do.
    Run { request: Box<Request<RequestBody<B>>>, once: Once, turn: Box<Turn> },
}

impl<B> From<Problem> for Next<B> {
    fn from(problem: Problem) -> Self {
        Next::Answer(problem.answer())
    }
}

async fn prepare<B>(rules: &Rules, request: Request<B>) -> Next<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let (mut parts, body) = request.into_parts();
    let key = match rules.concern(&parts.method).then(|| key::of(&parts.headers)) {
        None => return Next::Pass(Request::from_parts(parts, Either::Left(body))),
        Some(Ok(None)) if rules.requires() => return Problem::Missing.into(),
        Some(Ok(None)) => return Next::Pass(Request::from_parts(parts, Either::Left(body))),
        Some(Ok(Some(key))) => key,
        Some(Err(why)) => return Problem::Malformed(why).into(),
    };
    // All of it before anything is claimed: a client that is slow to send holds nothing.
    let body = match read(body, rules.body_limit).await {
        Ok(body) => body,
        Err(problem) => return problem.into(),
    };
    let Some(once) = rules.once(&key, &parts, &body) else {
        tracing::error!(
            "no scope for a request with an Idempotency-Key: attach the layer inside of what checks credentials"
        );
        return Problem::NoScope.into();
    };
    match once.clone().claim().await {
        Ok(Claim::Turn(turn)) => {
            parts.extensions.insert(turn.fence());
            let request = Box::new(Request::from_parts(parts, Either::Right(Full::new(body))));
            Next::Run { request, once, turn }
        }
        Ok(Claim::Done(done)) => Next::Answer(replay(done.result)),
        Err(Error::Busy(_)) => Problem::Running.into(),
        Err(Error::Invalid(_)) if once.stands_for_another().await.unwrap_or(false) => Problem::Reused.into(),
        // Done, without a result that could be kept.
        Err(Error::Unknown(why)) => {
            tracing::error!(%why, "an Idempotency-Key has no answer");
            Problem::Unknown.into()
        }
        Err(error) => {
            tracing::error!(%error, "an Idempotency-Key cannot be looked up");
            Problem::Unavailable.into()
        }
    }
}

async fn read<B>(body: B, most: usize) -> Result<Bytes, Problem>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    // What says beforehand that it is too large need not be sent.
    if body.size_hint().lower() > most as u64 {
        return Err(Problem::TooLarge(most));
    }
    match Limited::new(body, most).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Problem::TooLarge(most)),
        Err(_) => Err(Problem::Broken),
    }
}

fn replay(stored: Stored) -> Answer {
    match Answer::parse(stored.bytes) {
        Ok(answer) => answer.again(),
        Err(error) => {
            tracing::error!(%error, "a kept answer cannot be read");
            Problem::Unavailable.answer()
        }
    }
}

/// Does it under the lease, and keeps the answer before anybody hears it.
async fn run<S, B, R>(
    mut inner: S,
    rules: Rules,
    request: Request<RequestBody<B>>,
    once: Once,
    turn: Box<Turn>,
) -> Result<Answer, S::Error>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>>,
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    let work = async { Ok(Answer::of(inner.call(request).await?, rules.answer_limit).await) };
    let (status, answer) = match turn.guard().run(nested::scope(turn.cell(), work)).await {
        // No answer at all: the turn is given back, and the next one runs.
        Ok(answer) => answer?,
        Err(error) => return Ok(late(&once, &error).await),
    };
    // The service's own status decides, also where its body cannot be had: a 503 says that nothing came of it, and whatever
    // is not forgotten was done, and is not done again.
    let kept = !rules.forgets(status);
    let answer = if kept || answer.status == status { answer } else { Answer::bare(status) };
    let stored = Stored { ok: kept, bytes: answer.bytes() };
    Ok(match turn.finish(stored).await {
        Ok(()) => answer,
        Err(error) => late(&once, &error).await,
    })
}

/// Our answer does not count, or nobody knows. If a successor left one, that is the answer.
async fn late(once: &Once, error: &Error) -> Answer {
    tracing::warn!(%error, "the answer to a request with an Idempotency-Key was not kept");
    match once.result().await {
        Ok(Some(done)) => replay(done.result),
        _ => Problem::Unknown.answer(),
    }
}
