//! The layer and its options: [`IdempotencyLayer`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{Method, StatusCode};
use sha2::{Digest, Sha256};
use tower_layer::Layer;

use super::service::Idempotency;
use crate::keeper::Lockkeeper;
use crate::recipes::once::Once;

/// A tower layer that honours `Idempotency-Key`, as the [module](super) describes. Clones share everything.
#[derive(Clone)]
pub struct IdempotencyLayer(pub(super) IdempotencyRules);

/// Returns the tenant of a request; `None` if it cannot.
type Scope = dyn Fn(&Parts) -> Option<String> + Send + Sync;

#[derive(Clone)]
pub(super) struct IdempotencyRules {
    keeper: Lockkeeper,
    scope: Arc<Scope>,
    forget: Arc<dyn Fn(StatusCode) -> bool + Send + Sync>,
    methods: Arc<[Method]>,
    required: bool,
    ttl: Duration,
    keep: Duration,
    wait: Duration,
    pub body_limit: usize,
    pub answer_limit: usize,
    for_correctness: bool,
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdempotencyLayer({:?})", self.0.keeper)
    }
}

impl IdempotencyLayer {
    /// Stores keys and responses in the store of `keeper`. `scope` returns the tenant of a request, such as
    /// an account; equal keys of two tenants are different keys. There is no default, because a wrong one
    /// would give a customer another customer's response. `None` or an empty text is answered with 500
    /// before the service is called, because a layer outside the one that checks credentials finds no
    /// tenant.
    ///
    /// Attach the layer *inside* the layers that check credentials and limit rates, so that `scope` can
    /// trust what it reads and their refusals are not stored; and *outside* the layers that change the
    /// path.
    pub fn new(
        keeper: &Lockkeeper,
        scope: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        IdempotencyLayer(IdempotencyRules {
            keeper: keeper.clone(),
            scope: Arc::new(scope),
            forget: Arc::new(|status| matches!(status.as_u16(), 429 | 503 | 504)),
            methods: [Method::POST, Method::PATCH].into(),
            required: false,
            ttl: Duration::from_secs(30),
            keep: Duration::from_secs(24 * 60 * 60),
            wait: Duration::ZERO,
            body_limit: 1 << 20,
            answer_limit: 1 << 20,
            for_correctness: false,
        })
    }

    /// Refuses requests without a key (400). By default they pass to the service each time.
    #[must_use]
    pub fn required(mut self) -> Self {
        self.0.required = true;
        self
    }

    /// The methods for which keys count: POST and PATCH by default. HTTP defines the others as repeatable
    /// or safe.
    #[must_use]
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.0.methods = methods.into_iter().collect();
        self
    }

    /// Which responses are not stored, so that the next request with the key runs again. By default 429,
    /// 503 and 504, which say that the request had no effect or an unknown one, and that the client should
    /// retry. All others are stored.
    ///
    /// A 500 is stored, as at Stripe: it does not say how far the work came, and to repeat its first half
    /// under the same key is what the key should prevent. If your service undoes failed work, or checks the
    /// fence: `forget(|status| status.is_server_error())`.
    #[must_use]
    pub fn forget(mut self, which: impl Fn(StatusCode) -> bool + Send + Sync + 'static) -> Self {
        self.0.forget = Arc::new(which);
        self
    }

    /// How long the store waits for a renewal before another process runs the request: 30 s by default.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.0.ttl = ttl;
        self
    }

    /// How long responses are stored: a day by default. After that the key can be used again.
    #[must_use]
    pub fn keep(mut self, keep: Duration) -> Self {
        self.0.keep = keep;
        self
    }

    /// How long a request waits for the response of a running one before 409. By default not at all.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.0.wait = wait;
        self
    }

    /// The largest body of a request with a key, which the layer reads before it calls the service: 1 MiB
    /// by default. A larger one is answered with 413.
    #[must_use]
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.0.body_limit = bytes;
        self
    }

    /// The largest body of a response to a request with a key: 1 MiB by default, 63 MiB at most. A larger
    /// one cannot be replayed, so every client receives the same 500. The work is not done again.
    #[must_use]
    pub fn answer_limit(mut self, bytes: usize) -> Self {
        self.0.answer_limit = bytes.min(63 << 20);
        self
    }

    /// Refuses requests (503) on a store that can forget a record.
    #[must_use]
    pub fn for_correctness(mut self) -> Self {
        self.0.for_correctness = true;
        self
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = Idempotency<S>;

    fn layer(&self, inner: S) -> Idempotency<S> {
        Idempotency { inner, rules: self.0.clone() }
    }
}

impl IdempotencyRules {
    /// Whether keys count for this method.
    pub fn concern(&self, method: &Method) -> bool {
        self.methods.contains(method)
    }

    pub fn requires(&self) -> bool {
        self.required
    }

    pub fn forgets(&self, status: StatusCode) -> bool {
        (self.forget)(status)
    }

    /// The [`Once`] of a request; `None` if the request has no tenant.
    pub fn once(&self, key: &str, parts: &Parts, body: &[u8]) -> Option<Once> {
        let scope = (self.scope)(parts).filter(|scope| !scope.is_empty())?;
        // The hash has a fixed length, so no two pairs of tenant and key share a name; and a tenant's name
        // may be long.
        let scope: String = Sha256::digest(scope).iter().map(|byte| format!("{byte:02x}")).collect();
        let path = parts.uri.path_and_query().map_or("", |path| path.as_str());
        let request = [parts.method.as_str().as_bytes(), b"\n", path.as_bytes(), b"\n", body].concat();
        let once = self.keeper.once(format!("http/{scope}/{key}"));
        let once = once.fingerprint(request).ttl(self.ttl).keep(self.keep).wait(self.wait);
        Some(if self.for_correctness { once.for_correctness() } else { once })
    }
}
