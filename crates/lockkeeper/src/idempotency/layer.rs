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

/// Honours `Idempotency-Key`, as the [module](super) says. Clones share everything.
#[derive(Clone)]
pub struct IdempotencyLayer(pub(super) Rules);

/// What says whose key a request has; `None` if it cannot.
type Scope = dyn Fn(&Parts) -> Option<String> + Send + Sync;

#[derive(Clone)]
pub(super) struct Rules {
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
    /// Keeps keys and answers in the store of `keeper`. `scope` says whose key it is: an account, a tenant. Equal keys of two
    /// scopes never meet. There is no default, because with a wrong one a customer would get another customer's answer; and
    /// `None`, or an empty text, is refused with 500 before anything is done, because a layer on the wrong side of the one
    /// that checks credentials finds nothing there.
    ///
    /// Attach it *inside* what checks credentials and limits rates, so that `scope` can trust what it reads and a refusal of
    /// theirs is not kept; and *outside* what changes the path.
    pub fn new(
        keeper: &Lockkeeper,
        scope: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        IdempotencyLayer(Rules {
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

    /// Refuses requests without a key (400). By default they pass, and are done as often as they come.
    #[must_use]
    pub fn required(mut self) -> Self {
        self.0.required = true;
        self
    }

    /// For which methods keys count: POST and PATCH by default. The others may be repeated by their own definition.
    #[must_use]
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.0.methods = methods.into_iter().collect();
        self
    }

    /// Which answers are forgotten: the next request under the key runs again. By default 429, 503 and 504, which say that
    /// nothing came of it, or nobody knows, and that the client should ask again. Everything else is kept.
    ///
    /// A 500 is kept, as at Stripe: it does not say how far the work had come, and to do the first half of it again under the
    /// same key would be the surprise that the key is there to prevent. If your service undoes what failed, or checks
    /// the fence: `forget(|status| status.is_server_error())`.
    #[must_use]
    pub fn forget(mut self, which: impl Fn(StatusCode) -> bool + Send + Sync + 'static) -> Self {
        self.0.forget = Arc::new(which);
        self
    }

    /// How long the silence of a process may last before a request is run anew by another: 30 s by default.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.0.ttl = ttl;
        self
    }

    /// How long answers are kept: a day by default. After that a key is as good as new.
    #[must_use]
    pub fn keep(mut self, keep: Duration) -> Self {
        self.0.keep = keep;
        self
    }

    /// How long to wait for the answer of a request that is under way, before 409. By default not at all.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.0.wait = wait;
        self
    }

    /// The largest body of a request with a key, which is read before anything is done: 1 MiB by default. More is 413.
    #[must_use]
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.0.body_limit = bytes;
        self
    }

    /// The largest body of an answer to a request with a key: 1 MiB by default, 63 MiB at most. A larger one cannot be given
    /// again, so it is given to nobody: all get the same 500. It is not done again.
    #[must_use]
    pub fn answer_limit(mut self, bytes: usize) -> Self {
        self.0.answer_limit = bytes.min(63 << 20);
        self
    }

    /// Refuses (503) to work on a store that can forget what was done.
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

impl Rules {
    /// Whether a key counts here.
    pub fn concern(&self, method: &Method) -> bool {
        self.methods.contains(method)
    }

    pub fn requires(&self) -> bool {
        self.required
    }

    pub fn forgets(&self, status: StatusCode) -> bool {
        (self.forget)(status)
    }

    /// What is done once for a request; `None` if it does not say whose key it is.
    pub fn once(&self, key: &str, parts: &Parts, body: &[u8]) -> Option<Once> {
        let scope = (self.scope)(parts).filter(|scope| !scope.is_empty())?;
        // The hash has a fixed length, so no two pairs of scope and key share a name; and a scope may be as long as it likes.
        let scope: String = Sha256::digest(scope).iter().map(|byte| format!("{byte:02x}")).collect();
        let path = parts.uri.path_and_query().map_or("", |path| path.as_str());
        let request = [parts.method.as_str().as_bytes(), b"\n", path.as_bytes(), b"\n", body].concat();
        let once = self.keeper.once(format!("http/{scope}/{key}"));
        let once = once.fingerprint(request).ttl(self.ttl).keep(self.keep).wait(self.wait);
        Some(if self.for_correctness { once.for_correctness() } else { once })
    }
}
