//! Rate limits over real HTTP, with axum and a client that speaks bytes.
#![cfg(all(feature = "tower", feature = "memory"))]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::routing::get;
use http::request::Parts;
use lockkeeper::limit::{PER_HOUR, PER_MINUTE};
use lockkeeper::rate_limit::{OnStoreFailure, RateLimitLayer};
use lockkeeper::store::limit::{LimitOutcome, LimitRequest};
use lockkeeper::store::{AcquireOutcome, Expect, Grant, LockRequest, RenewOutcome, RequestKey, WriteOutcome};
use lockkeeper::{Error, LockName, Lockkeeper, ReleaseOutcome, Result, Store, SystemClock};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A store that can be unplugged.
struct Unplugged {
    store: Arc<dyn Store>,
    away: Arc<AtomicBool>,
}

#[async_trait]
impl lockkeeper::Limits for Unplugged {
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        if self.away.load(Ordering::SeqCst) {
            return Err(Error::Unavailable("unplugged".into()));
        }
        self.store.limit(request).await
    }
}

lockkeeper_testkit::forward_calls!(Unplugged, {
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.store.acquire(request).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.store.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.store.release(key).await
    }
});

lockkeeper_testkit::forward_records!(Unplugged, {
    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        self.store.write(key, value, expect, ttl).await
    }
});

struct HttpService {
    addr: std::net::SocketAddr,
    calls: Arc<AtomicU32>,
    away: Arc<AtomicBool>,
}

impl HttpService {
    async fn start(on_failure: OnStoreFailure) -> HttpService {
        let (calls, away) = (Arc::<AtomicU32>::default(), Arc::<AtomicBool>::default());
        let memory = Lockkeeper::open("memory:").await.unwrap();
        let store = Unplugged { store: memory.store().clone(), away: away.clone() };
        let keeper = Lockkeeper::with_store(Arc::new(store), Arc::new(SystemClock));
        let limit = move |parts: &Parts| match parts.headers.get("x-user") {
            Some(user) => {
                Some(keeper.limit(format!("user/{}", user.to_str().unwrap())).rate(2, PER_MINUTE).burst(3))
            }
            None if parts.uri.path() == "/health" => None,
            None => Some(keeper.limit("anonymous").rate(1, PER_HOUR)),
        };
        let layer = RateLimitLayer::new(limit, on_failure).policy("per-user");
        let counted = calls.clone();
        let handler = move || {
            counted.fetch_add(1, Ordering::SeqCst);
            std::future::ready("hello")
        };
        let app: Router =
            Router::new().route("/", get(handler.clone())).route("/health", get(handler)).layer(layer);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        HttpService { addr, calls, away }
    }

    /// The whole response, in small letters.
    async fn get(&self, path: &str, user: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(self.addr).await.unwrap();
        let user = if user.is_empty() { String::new() } else { format!("x-user: {user}\r\n") };
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{user}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response.to_lowercase()
    }

    fn calls(&self) -> u32 {
        self.calls.load(Ordering::SeqCst)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_above_the_rate_are_refused_and_all_are_told_their_limit() {
    let service = HttpService::start(OnStoreFailure::Refuse).await;
    for left in [2, 1, 0] {
        let response = service.get("/", "alice").await;
        assert!(response.starts_with("http/1.1 200"), "{response}");
        assert!(response.contains("ratelimit-policy: \"per-user\";q=2;w=60\r\n"), "{response}");
        assert!(response.contains(&format!("ratelimit: \"per-user\";r={left};t=")), "{response}");
        assert!(!response.contains("retry-after"), "{response}");
    }
    let refused = service.get("/", "alice").await;
    assert!(refused.starts_with("http/1.1 429"), "{refused}");
    for says in [
        "content-type: application/problem+json",
        "ratelimit-policy: \"per-user\";q=2;w=60",
        "ratelimit: \"per-user\";r=0;t=",
        "retry-after: ",
        "quota-exceeded",
        "\"violated-policies\":[\"per-user\"]",
        "\"status\":429",
    ] {
        assert!(refused.contains(says), "{says} is missing: {refused}");
    }
    let retry = refused.split("retry-after: ").nth(1).unwrap().split("\r\n").next().unwrap();
    assert!((1..=30).contains(&retry.parse::<u64>().unwrap()), "{retry}");
    assert_eq!(service.calls(), 3, "the service was called for a request that was refused");
    // Another user has a bucket of its own; a request without a limit always passes, and is told of none.
    assert!(service.get("/", "bob").await.starts_with("http/1.1 200"));
    for _ in 0..3 {
        let response = service.get("/health", "").await;
        assert!(response.starts_with("http/1.1 200") && !response.contains("ratelimit"), "{response}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_happens_without_the_store_is_as_it_was_chosen() {
    let open = HttpService::start(OnStoreFailure::LetThrough).await;
    let closed = HttpService::start(OnStoreFailure::Refuse).await;
    for service in [&open, &closed] {
        assert!(service.get("/", "").await.starts_with("http/1.1 200"));
        assert!(service.get("/", "").await.starts_with("http/1.1 429"));
        service.away.store(true, Ordering::SeqCst);
    }
    for _ in 0..3 {
        let response = open.get("/", "").await;
        assert!(response.starts_with("http/1.1 200") && !response.contains("ratelimit"), "{response}");
        let response = closed.get("/", "").await;
        assert!(response.starts_with("http/1.1 503") && response.contains("retry-after: 1"), "{response}");
        assert!(response.contains("urn:lockkeeper:rate-limit:unavailable"), "{response}");
    }
    assert_eq!((open.calls(), closed.calls()), (4, 1));
    // A key that no limit can have is no way around the limit.
    open.away.store(false, Ordering::SeqCst);
    let response = open.get("/", &"x".repeat(600)).await;
    assert!(response.starts_with("http/1.1 500"), "{response}");
    assert_eq!(open.calls(), 4);
}
