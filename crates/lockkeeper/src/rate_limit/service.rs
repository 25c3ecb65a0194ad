//! The service: takes a token for each request before it calls the inner service.

use std::fmt;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use http_body_util::{Either, Full};
use lockkeeper_core::Error;
use tower_service::Service;

use super::headers;
use super::layer::{LimitRules, OnStoreFailure};
use crate::limit::{RateLimit, TakeOutcome};

/// The body that the client receives: the service's own, or that of a refusal.
pub type LimitedBody<R> = Either<R, Full<Bytes>>;

/// A service that refuses requests above a rate. Made by [`RateLimitLayer`](super::RateLimitLayer).
#[derive(Clone)]
pub struct RateLimited<S> {
    pub(super) inner: S,
    pub(super) rules: LimitRules,
}

impl<S: fmt::Debug> fmt::Debug for RateLimited<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RateLimited({:?})", self.inner)
    }
}

impl<S, B, R> Service<Request<B>> for RateLimited<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
    R: Send,
{
    type Response = Response<LimitedBody<R>>;
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
            let (parts, body) = request.into_parts();
            let limit = (rules.limit)(&parts);
            let request = Request::from_parts(parts, body);
            let passed = match limit {
                Some(limit) => rules.check(limit).await,
                None => Ok(None),
            };
            let taken = match passed {
                Ok(taken) => taken,
                Err(response) => return Ok(response.map(Either::Right)),
            };
            let mut response = inner.call(request).await?.map(Either::Left);
            if let Some((limit, taken)) = taken {
                headers::add(response.headers_mut(), &rules.policy, &limit, &taken);
            }
            Ok(response)
        })
    }
}

/// The limit that let a request pass, and what the store said; `None` without one.
type Passed = Option<(RateLimit, TakeOutcome)>;

impl LimitRules {
    async fn check(&self, limit: RateLimit) -> Result<Passed, Response<Full<Bytes>>> {
        match limit.take(1).await {
            Ok(taken) if taken.allowed() => Ok(Some((limit, taken))),
            Ok(taken) => Err(headers::refused(&self.policy, &limit, &taken)),
            // A bad key may come from the client: it must not pass without a limit.
            Err(error @ (Error::Invalid(_) | Error::Unsupported(_))) => {
                tracing::error!(%error, "refused a request whose rate limit is invalid; answering 500");
                Err(headers::misconfigured())
            }
            Err(error) if self.on_failure == OnStoreFailure::LetThrough => {
                tracing::warn!(%error, "cannot take a token; letting the request through without a limit");
                Ok(None)
            }
            Err(error) => {
                tracing::warn!(%error, "cannot take a token; answering 503");
                Err(headers::unavailable())
            }
        }
    }
}
