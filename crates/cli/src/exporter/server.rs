//! Serves the numbers of a store over HTTP: `/metrics` and `/healthz`. A crowd of clients costs the store one look.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Semaphore};

use super::scrape::{StoreNumbers, StoreScraper};

/// The most connections at a time. Further clients wait in the kernel's accept queue.
const CONNECTIONS: usize = 64;
/// How long a client may take to send the head of a request, and how long a connection may be unused.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a response may take altogether. A client that does not read must not keep its connection.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// The pause after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(50);

/// The last look at the store. Looks come one after another, and a look serves everyone who asks within its age.
#[derive(Debug)]
pub struct ScrapeCache {
    max_age: Duration,
    state: Mutex<(StoreScraper, Option<(Instant, StoreNumbers)>)>,
}

impl ScrapeCache {
    pub fn new(scraper: StoreScraper, max_age: Duration) -> Arc<Self> {
        Arc::new(ScrapeCache { max_age, state: Mutex::new((scraper, None)) })
    }

    /// The numbers of the last look, or of a new one if that is too old.
    async fn numbers(self: Arc<Self>) -> StoreNumbers {
        let (scraper, last) = &mut *self.state.lock().await;
        if let Some((at, numbers)) = last
            && at.elapsed() < self.max_age
        {
            return numbers.clone();
        }
        let numbers = scraper.scrape().await;
        *last = Some((Instant::now(), numbers.clone()));
        numbers
    }
}

/// Serves until the returned future is dropped.
pub async fn serve(listener: TcpListener, cache: Arc<ScrapeCache>) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(permit) = connections.clone().acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let cache = cache.clone();
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).keep_alive(false);
        let respond = service_fn(move |request| respond(request, cache.clone()));
        let connection = http.serve_connection(TokioIo::new(stream), respond);
        tokio::spawn(async move {
            let _ = tokio::time::timeout(RESPONSE_TIMEOUT, connection).await;
            drop(permit);
        });
    }
}

async fn respond(
    request: Request<Incoming>,
    cache: Arc<ScrapeCache>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    // A task of its own: a client that goes away does not end a look that others wait for.
    let numbers = async || tokio::spawn(cache.numbers()).await;
    const TEXT: &str = "text/plain; charset=utf-8";
    let (status, kind, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/metrics") => match numbers().await {
            Ok(numbers) => (StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", numbers.text),
            Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, TEXT, "the look at the store failed\n".into()),
        },
        (&Method::GET | &Method::HEAD, "/healthz") => match numbers().await.map(|numbers| numbers.down) {
            Ok(None) => (StatusCode::OK, TEXT, "ok\n".into()),
            _ => (StatusCode::SERVICE_UNAVAILABLE, TEXT, "the store is unreachable\n".into()),
        },
        (_, "/metrics" | "/healthz") => (StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET\n".into()),
        _ => (StatusCode::NOT_FOUND, TEXT, "not found: try /metrics or /healthz\n".into()),
    };
    let response = Response::builder().status(status).header(header::CONTENT_TYPE, kind);
    Ok(response.body(Full::from(text)).unwrap_or_default())
}
