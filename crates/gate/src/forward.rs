//! Forwards an admitted request to the service, and the service's response to the client.

use std::net::IpAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{HeaderValue, Method, Request, Response, StatusCode, Version, header};
use http_body_util::{Either, Full};
use hyper::body::{Body, Incoming};
use hyper::upgrade::{self, OnUpgrade};
use lockkeeper_fenced::http::{Problem, WriteAdmission};
use tokio::sync::OwnedSemaphorePermit;
use tower_service::Service;

use crate::body::{ForwardedBody, ResponseBody};
use crate::headers;
use crate::metrics::GateMetrics;
use crate::options::GateOptions;
use crate::pool::{ForwardError, UpstreamPool};
use crate::tunnel::Tunnel;
use crate::upstream::UpstreamUrl;

/// The body of a response: the service's, or the gate's own.
pub type ForwardBody = Either<ResponseBody, Full<Bytes>>;

/// The service, as one client reaches it through the gate. Clones share the pool of connections.
#[derive(Clone)]
pub struct Forwarder {
    shared: Arc<ForwarderState>,
    client: Arc<ClientConnection>,
}

/// The client connection that a request came on.
pub struct ClientConnection {
    /// The client's address, for `X-Forwarded-For`.
    peer: HeaderValue,
    /// The permit of this connection. Held until the last request of the connection has ended, and its websocket.
    _permit: Option<OwnedSemaphorePermit>,
}

struct ForwarderState {
    pool: UpstreamPool,
    upstream: UpstreamUrl,
    metrics: Arc<GateMetrics>,
    idle_timeout: Duration,
    overtaken_grace: Duration,
}

impl Forwarder {
    pub fn new(upstream: UpstreamUrl, options: &GateOptions, metrics: Arc<GateMetrics>) -> Self {
        let pool = UpstreamPool::new(upstream.uri.clone(), options.connect_timeout, options.timeout);
        let shared = Arc::new(ForwarderState {
            pool,
            upstream,
            metrics,
            idle_timeout: options.idle_timeout,
            overtaken_grace: options.overtaken_grace,
        });
        let client = ClientConnection { peer: HeaderValue::from_static("unknown"), _permit: None };
        Forwarder { shared, client: Arc::new(client) }
    }

    /// The same service, for the client at `peer`.
    pub fn for_client(&self, peer: IpAddr, permit: OwnedSemaphorePermit) -> Self {
        let peer = HeaderValue::try_from(peer.to_string()).unwrap_or_else(|_| self.client.peer.clone());
        let client = Arc::new(ClientConnection { peer, _permit: Some(permit) });
        Forwarder { shared: self.shared.clone(), client }
    }
}

impl ForwarderState {
    /// The request as the service gets it, and the upgrade to a websocket that the client asks for, if it does.
    fn prepare(
        &self,
        mut request: Request<Incoming>,
        client: &Arc<ClientConnection>,
    ) -> Option<(Request<ForwardedBody>, Option<UpgradeRequest>)> {
        let upgrades = request.version() == Version::HTTP_11 && headers::is_websocket(request.headers());
        let loss = request.extensions().get::<WriteAdmission>().map(WriteAdmission::loss);
        let upgrade = upgrades.then(|| UpgradeRequest {
            client: upgrade::on(&mut request),
            connection: client.clone(),
            admission: request.extensions().get::<WriteAdmission>().cloned(),
        });
        let (mut parts, body) = request.into_parts();
        if !parts.headers.contains_key(header::HOST) {
            // HTTP/2 has the host in the URI alone, and HTTP/1.0 may have none.
            let host = parts.uri.authority().unwrap_or(&self.upstream.authority);
            parts.headers.insert(header::HOST, HeaderValue::from_str(host.as_str()).ok()?);
        }
        headers::strip_hop_by_hop(&mut parts.headers);
        headers::add_forwarded(&mut parts.headers, &client.peer);
        if upgrades {
            headers::set_upgrade(&mut parts.headers);
        }
        if !body.is_end_stream() && body.size_hint().exact().is_none() {
            // Without this header hyper sends no body with a GET.
            parts.headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        parts.uri = self.upstream.rewrite(parts.uri)?;
        parts.version = Version::HTTP_11;
        let body = ForwardedBody::new(body, loss, self.overtaken_grace);
        Some((Request::from_parts(parts, body), upgrade))
    }

    async fn forward(
        &self,
        request: Box<Request<ForwardedBody>>,
        upgrade: Option<UpgradeRequest>,
    ) -> Result<Response<ForwardBody>, Problem> {
        let in_flight = self.metrics.requests.increment();
        let response = self.pool.send(request).await.map_err(|error| self.problem(error))?;
        match (response.status(), upgrade) {
            (StatusCode::SWITCHING_PROTOCOLS, Some(upgrade)) if headers::is_websocket(response.headers()) => {
                let (response, service) = accept_upgrade(response);
                let UpgradeRequest { client, connection, admission } = upgrade;
                let tunnel = Tunnel { client, service, connection, admission, in_flight };
                tokio::spawn(tunnel.run(self.metrics.clone()));
                Ok(response)
            }
            // The service switched to a protocol that the client did not ask for.
            (StatusCode::SWITCHING_PROTOCOLS, _) => Err(Problem::Unknown),
            _ => {
                let wrap = |body| Either::Left(ResponseBody::new(body, self.idle_timeout, in_flight));
                let mut response = response.map(wrap);
                headers::strip_hop_by_hop(response.headers_mut());
                Ok(response)
            }
        }
    }

    fn problem(&self, error: ForwardError) -> Problem {
        let upstream = self.upstream.as_str();
        match error {
            ForwardError::NotSent(error) => {
                tracing::warn!(upstream, %error, "the service is unreachable; the request was not sent, and the client gets 502");
                Problem::Unreached
            }
            ForwardError::Disconnected(error) => {
                tracing::warn!(upstream, %error, "the service closed the connection before its response; the client gets 504");
                Problem::Unknown
            }
            ForwardError::TimedOut => Problem::Unknown,
        }
    }
}

/// A client's request for a websocket.
struct UpgradeRequest {
    client: OnUpgrade,
    connection: Arc<ClientConnection>,
    admission: Option<WriteAdmission>,
}

/// The response that tells the client that it has its websocket, and the service's end of it.
fn accept_upgrade(mut response: Response<Incoming>) -> (Response<ForwardBody>, OnUpgrade) {
    let service = upgrade::on(&mut response);
    let mut response = response.map(|_| Either::Right(Full::default()));
    headers::strip_hop_by_hop(response.headers_mut());
    headers::set_upgrade(response.headers_mut());
    (response, service)
}

fn empty_response(status: StatusCode) -> Response<ForwardBody> {
    let mut response = Response::new(Either::Right(Full::default()));
    *response.status_mut() = status;
    response
}

impl Service<Request<Incoming>> for Forwarder {
    type Response = Response<ForwardBody>;
    type Error = std::convert::Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        if request.method() == Method::CONNECT {
            return Box::pin(async { Ok(empty_response(StatusCode::METHOD_NOT_ALLOWED)) });
        }
        let Some((request, upgrade)) = self.shared.prepare(request, &self.client) else {
            return Box::pin(async { Ok(empty_response(StatusCode::BAD_REQUEST)) });
        };
        // Boxed, because it is moved several times on its way to the connection.
        let (shared, request) = (self.shared.clone(), Box::new(request));
        Box::pin(async move {
            let response = shared.forward(request, upgrade).await;
            Ok(response.unwrap_or_else(|problem| problem.response().map(Either::Right)))
        })
    }
}
