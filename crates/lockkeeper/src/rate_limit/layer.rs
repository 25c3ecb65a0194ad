//! The layer and its options: [`RateLimitLayer`].

use std::fmt;
use std::sync::Arc;

use http::request::Parts;
use tower_layer::Layer;

use super::service::RateLimited;
use crate::limit::RateLimit;

/// The treatment of requests while the store is unreachable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnStoreFailure {
    /// They pass without a limit (fail open): for a limit that protects from too much of a good thing.
    LetThrough,
    /// They are refused with 503 (fail closed): for a limit that something depends on, such as attempts at a password.
    Refuse,
}

/// A tower layer that refuses requests above a rate, as the [module](super) describes. Clones share everything.
#[derive(Clone)]
pub struct RateLimitLayer(pub(super) LimitRules);

/// Returns the limit of a request; `None` if it has none.
type LimitOf = dyn Fn(&Parts) -> Option<RateLimit> + Send + Sync;

#[derive(Clone)]
pub(super) struct LimitRules {
    pub limit: Arc<LimitOf>,
    pub on_failure: OnStoreFailure,
    pub policy: Arc<str>,
}

impl fmt::Debug for RateLimitLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RateLimitLayer({:?})", self.0.on_failure)
    }
}

impl RateLimitLayer {
    /// Limits each request by the limit that `limit` returns for it; `None` lets the request pass without a limit, for instance a health check.
    /// There is no default for `on_failure`, because only the service knows which of the two is the smaller harm.
    ///
    /// Attach the layer *inside* the layers that check credentials, so that `limit` can trust what it reads.
    pub fn new(
        limit: impl Fn(&Parts) -> Option<RateLimit> + Send + Sync + 'static,
        on_failure: OnStoreFailure,
    ) -> Self {
        RateLimitLayer(LimitRules { limit: Arc::new(limit), on_failure, policy: "default".into() })
    }

    /// The name of the policy in the headers: `default` by default. Everything but ASCII letters, digits, `-`, `_` and `.` is left out.
    #[must_use]
    pub fn policy(mut self, name: &str) -> Self {
        let name: String =
            name.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')).collect();
        self.0.policy = name.into();
        self
    }
}

impl<S> Layer<S> for RateLimitLayer {
    type Service = RateLimited<S>;

    fn layer(&self, inner: S) -> RateLimited<S> {
        RateLimited { inner, rules: self.0.clone() }
    }
}
