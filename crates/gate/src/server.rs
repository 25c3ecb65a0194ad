//! The server side of the gate: accepts client connections, checks and forwards their requests, and drains at the end.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use http::{Request, Response};
use http_body_util::Either;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use lockkeeper_fenced::http::{AnswerBody, Checked, FenceLayer, LOCK_FENCE, Problem};
use rustix::net::sockopt::set_tcp_user_timeout;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower_layer::Layer;
use tower_service::Service;

use crate::forward::{ForwardBody, Forwarder};
use crate::header_timeout::HeaderTimeout;
use crate::headers;
use crate::inline_wake::InlineWake;
use crate::metrics::GateMetrics;
use crate::options::GateOptions;
use crate::resource::ResourceSelector;
use crate::upstream::UpstreamUrl;

/// The pause between two looks at the requests in flight while draining, and after a connection could not be accepted.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The most bytes of a request's head.
const HEAD_BYTES: usize = 64 << 10;
/// The most requests at a time on one HTTP/2 connection.
const HTTP2_STREAMS: u32 = 200;

/// A reverse proxy that checks the fence of every request before it forwards it.
pub struct GateServer {
    marks: FenceLayer,
    forwarder: Forwarder,
    http: auto::Builder<TokioExecutor>,
    metrics: Arc<GateMetrics>,
    connection_permits: Arc<Semaphore>,
    options: GateOptions,
}

impl GateServer {
    /// A gate to the service at `upstream`, which checks fences against `marks`. Must be called within a tokio runtime.
    pub fn new(upstream: UpstreamUrl, marks: FenceLayer, options: GateOptions) -> Self {
        let metrics = Arc::<GateMetrics>::default();
        let forwarder = Forwarder::new(upstream, &options, metrics.clone());
        let mut http = auto::Builder::new(TokioExecutor::new());
        let idle = options.idle_timeout;
        // hyper has one time-out for a head that does not come and for a connection that is not used.
        http.http1().header_read_timeout(idle).max_buf_size(HEAD_BYTES);
        http.http2().timer(TokioTimer::new()).keep_alive_interval(idle).max_concurrent_streams(HTTP2_STREAMS);
        let connection_permits = Arc::new(Semaphore::new(options.max_connections));
        GateServer { marks, forwarder, http, metrics, connection_permits, options }
    }

    /// The counters of this gate, for [`serve_admin`](crate::serve_admin).
    pub fn metrics(&self) -> Arc<GateMetrics> {
        self.metrics.clone()
    }

    /// Accepts connections until `shutdown` completes for the first time. Then closes the listener and waits for the requests
    /// in flight, for at most [`drain_timeout`](GateOptions::drain_timeout), or until `shutdown` completes again.
    ///
    /// Returns how many requests were still in flight: the caller's process ends, and so cuts them off.
    pub async fn serve(self, listener: TcpListener, mut shutdown: impl AsyncFnMut()) -> u64 {
        let graceful = GracefulShutdown::new();
        tokio::select! {
            never = self.accept(listener, &graceful) => never,
            () = shutdown() => {}
        }
        // The listener is closed: the kernel refuses new clients, and a load balancer sends them to another gate.
        self.metrics.draining.store(true, Ordering::Relaxed);
        let drained = async {
            graceful.shutdown().await;
            // Websockets, and requests whose clients have closed their connection.
            while self.metrics.requests.count() > 0 {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        tokio::select! {
            () = drained => {}
            () = tokio::time::sleep(self.options.drain_timeout) => {}
            () = shutdown() => {}
        }
        self.metrics.requests.count()
    }

    async fn accept(&self, listener: TcpListener, graceful: &GracefulShutdown) -> ! {
        loop {
            let permits = self.connection_permits.clone();
            let Ok(permit) = permits.acquire_owned().await else { std::future::pending().await };
            let (stream, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // No open files left, or the client has gone away. An immediate retry would fail again.
                    tracing::warn!(%error, "a client connection was not accepted; trying again in 20 ms");
                    tokio::time::sleep(POLL_INTERVAL).await;
                    continue;
                }
            };
            let _ = stream.set_nodelay(true);
            // While a client does not read, hyper does not poll the response's body, so no timer of ours runs. The kernel ends
            // the connection instead.
            let most = u32::try_from(self.options.idle_timeout.as_millis()).unwrap_or(u32::MAX);
            let _ = set_tcp_user_timeout(&stream, most);
            let service = ClientService::new(self, peer, permit);
            let header_timeout = service.header_timeout.clone();
            let mut http = self.http.clone();
            http.http1().timer(header_timeout.clone());
            let connection = http.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
            let connection = InlineWake::new(graceful.watch(connection));
            let open = self.metrics.connections.increment();
            tokio::spawn(async move {
                tokio::select! {
                    biased;
                    // The client sees why its connection ended; the gate need not log it.
                    _ = connection => {}
                    () = header_timeout.expired() => {}
                }
                drop(open);
            });
        }
    }
}

/// The service of one client connection: checks, forwards and counts its requests.
struct ClientService {
    service: Checked<Forwarder>,
    resource: ResourceSelector,
    metrics: Arc<GateMetrics>,
    header_timeout: HeaderTimeout,
}

impl ClientService {
    fn new(gate: &GateServer, peer: SocketAddr, permit: OwnedSemaphorePermit) -> ClientService {
        // An IPv4 client of an IPv6 socket is an IPv4 client.
        let service = gate.marks.layer(gate.forwarder.for_client(peer.ip().to_canonical(), permit));
        ClientService {
            service,
            resource: gate.options.resource.clone(),
            metrics: gate.metrics.clone(),
            header_timeout: HeaderTimeout::new(gate.options.idle_timeout),
        }
    }
}

impl hyper::service::Service<Request<Incoming>> for ClientService {
    type Response = Response<AnswerBody<ForwardBody>>;
    type Error = Infallible;
    type Future = CountedResponse;

    fn call(&self, request: Request<Incoming>) -> CountedResponse {
        let started = Instant::now();
        self.header_timeout.stop();
        let fenced = request.headers().contains_key(LOCK_FENCE);
        let (parts, body) = request.into_parts();
        let ambiguity = headers::find_ambiguity(&parts, self.resource.header());
        let response = match ambiguity.or_else(|| self.resource.find_ambiguity(&parts)) {
            Some(why) => {
                let refused = Problem::Ambiguous(why).response().map(Either::Right);
                Box::pin(async { Ok(refused) })
            }
            None => self.service.clone().call(Request::from_parts(parts, body)),
        };
        CountedResponse { response, fenced, started, metrics: self.metrics.clone() }
    }
}

/// A response that the metrics count when its head is there.
struct CountedResponse {
    response: BoxFuture<'static, Result<Response<AnswerBody<ForwardBody>>, Infallible>>,
    fenced: bool,
    started: Instant,
    metrics: Arc<GateMetrics>,
}

impl Future for CountedResponse {
    type Output = Result<Response<AnswerBody<ForwardBody>>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let response = std::task::ready!(self.response.as_mut().poll(cx))?;
        let problem = response.extensions().get::<Problem>();
        self.metrics.count_response(problem, self.fenced, self.started.elapsed());
        Poll::Ready(Ok(response))
    }
}
