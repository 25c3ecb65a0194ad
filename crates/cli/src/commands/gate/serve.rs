//! Taking connections, and the way to a quiet end.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use http::{HeaderName, Request, Response};
use http_body_util::Either;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use lockkeeper_fenced::http::{AnswerBody, Checked, FenceLayer, LOCK_FENCE, Problem};
use rustix::net::sockopt::set_tcp_user_timeout;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower_layer::Layer;
use tower_service::Service;

use super::at_once::AtOnce;
use super::forward::{Answer, Forward};
use super::headers;
use super::metrics::Metrics;
use super::patience::Patience;
use crate::signals::Signals;

/// How often it is looked whether all is over. Nobody waits for this but an operator.
const LOOK: Duration = Duration::from_millis(20);

/// Asks for as many open files as may be had, and says how many there are.
pub fn raise_file_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    // None means that there is no limit.
    getrlimit(Resource::Nofile).current.unwrap_or(1 << 20)
}

/// How many connections there is room for: each may need a second one, to the service.
pub fn room(files: u64) -> usize {
    usize::try_from(files.saturating_sub(64) / 2).unwrap_or(usize::MAX).clamp(1, 1 << 20)
}

/// All that serving needs.
pub struct Gate {
    layer: FenceLayer,
    forward: Forward,
    server: auto::Builder<TokioExecutor>,
    pub metrics: Arc<Metrics>,
    room: Arc<Semaphore>,
    idle: Duration,
    resource: Option<HeaderName>,
}

impl Gate {
    pub fn new(gate: &super::Gate, layer: FenceLayer, connections: usize) -> Self {
        let metrics = Arc::<Metrics>::default();
        let forward = Forward::new(gate, metrics.clone());
        let mut server = auto::Builder::new(TokioExecutor::new());
        // A head that does not come, and a connection that is not used, look the same from here.
        server.http1().header_read_timeout(gate.idle).max_buf_size(64 << 10);
        server.http2().timer(TokioTimer::new()).keep_alive_interval(gate.idle).max_concurrent_streams(200);
        let (room, resource) = (Arc::new(Semaphore::new(connections)), gate.resource.header().cloned());
        Gate { layer, forward, server, metrics, room, idle: gate.idle, resource }
    }

    /// Serves until a signal comes, and then until all that is under way has ended, or the time is over. Returns how many
    /// were cut off. A second signal cuts at once.
    pub async fn until_drained(self, listener: TcpListener, signals: &mut Signals, drain: Duration) -> u64 {
        let graceful = GracefulShutdown::new();
        tokio::select! {
            never = self.accept(listener, &graceful) => never,
            _ = signals.end() => {}
        }
        // The listener is closed: who comes now goes to another gate, or is told that nobody is here.
        self.metrics.draining.store(true, Ordering::Relaxed);
        let ended = async {
            graceful.shutdown().await;
            // Websockets, and requests whose clients have hung up.
            while self.metrics.requests.count() > 0 {
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::select! {
            () = ended => {}
            () = tokio::time::sleep(drain) => {}
            _ = signals.end() => {}
        }
        self.metrics.requests.count()
    }

    async fn accept(&self, listener: TcpListener, graceful: &GracefulShutdown) -> ! {
        loop {
            let Ok(room) = self.room.clone().acquire_owned().await else { std::future::pending().await };
            let (stream, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // No files left, or the client is gone already. Neither gets better by trying at once.
                    tracing::warn!(%error, "a connection cannot be taken");
                    tokio::time::sleep(LOOK).await;
                    continue;
                }
            };
            let _ = stream.set_nodelay(true);
            // While a client does not read, nobody asks for more of its answer, and so nobody sees that it is silent: the kernel does.
            let most = u32::try_from(self.idle.as_millis()).unwrap_or(u32::MAX);
            let _ = set_tcp_user_timeout(&stream, most);
            let front = Front::new(self, peer, room);
            let patience = front.patience.clone();
            let mut server = self.server.clone();
            server.http1().timer(patience.clone());
            let connection = server.serve_connection_with_upgrades(TokioIo::new(stream), front).into_owned();
            let connection = AtOnce::new(graceful.watch(connection));
            let open = self.metrics.connections.one();
            tokio::spawn(async move {
                tokio::select! {
                    biased;
                    // Whatever ends a connection, its client knows.
                    _ = connection => {}
                    () = patience.over() => {}
                }
                drop(open);
            });
        }
    }
}

/// What one connection talks to: the checked service, and the counters.
struct Front {
    service: Checked<Forward>,
    /// The header that names the resource, if one does.
    resource: Option<HeaderName>,
    metrics: Arc<Metrics>,
    patience: Patience,
}

impl Front {
    fn new(gate: &Gate, peer: SocketAddr, room: OwnedSemaphorePermit) -> Front {
        // An IPv4 client of an IPv6 socket is an IPv4 client.
        let service = gate.layer.layer(gate.forward.of(peer.ip().to_canonical(), room));
        let resource = gate.resource.clone();
        Front { service, resource, metrics: gate.metrics.clone(), patience: Patience::new(gate.idle) }
    }
}

impl hyper::service::Service<Request<Incoming>> for Front {
    type Response = Response<AnswerBody<Answer>>;
    type Error = Infallible;
    type Future = Counted;

    fn call(&self, request: Request<Incoming>) -> Counted {
        let began = Instant::now();
        self.patience.heard();
        let fenced = request.headers().contains_key(LOCK_FENCE);
        let (parts, body) = request.into_parts();
        let answer = match headers::ambiguity(&parts, self.resource.as_ref()) {
            Some(why) => {
                let refused = Problem::Ambiguous(why).response().map(Either::Right);
                Box::pin(async { Ok(refused) })
            }
            None => self.service.clone().call(Request::from_parts(parts, body)),
        };
        Counted { answer, fenced, began, metrics: self.metrics.clone() }
    }
}

/// An answer that is counted when it begins.
struct Counted {
    answer: BoxFuture<'static, Result<Response<AnswerBody<Answer>>, Infallible>>,
    fenced: bool,
    began: Instant,
    metrics: Arc<Metrics>,
}

impl Future for Counted {
    type Output = Result<Response<AnswerBody<Answer>>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = std::task::ready!(self.answer.as_mut().poll(cx))?;
        let problem = answer.extensions().get::<Problem>();
        self.metrics.answered(problem, self.fenced, self.began.elapsed());
        Poll::Ready(Ok(answer))
    }
}
