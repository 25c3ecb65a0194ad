//! Passing a request on to the service, and its answer back.

use std::net::IpAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::uri::{Authority, PathAndQuery, Scheme, Uri};
use http::{HeaderValue, Method, Request, Response, StatusCode, Version, header};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::upgrade::{self, OnUpgrade};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use lockkeeper_fenced::http::{Admission, Problem};
use tower_service::Service;

use super::body::{Idle, Progress, Sent};
use super::headers;
use super::metrics::Metrics;
use super::tunnel::Tunnel;

/// The address of a client, among the extensions of its requests.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub IpAddr);

/// Where the service is.
#[derive(Clone, Debug)]
pub struct Upstream {
    pub text: String,
    authority: Authority,
    /// What comes before every path.
    base: String,
}

/// `--upstream`
pub fn upstream(text: &str) -> Result<Upstream, String> {
    let uri: Uri = text.parse().map_err(|_| "not a URL: write http://HOST:PORT".to_owned())?;
    let parts = uri.into_parts();
    match (&parts.scheme, parts.authority, parts.path_and_query) {
        (Some(scheme), ..) if *scheme == Scheme::HTTPS => {
            Err("only http:// is possible: put the gate beside the service, where no TLS is needed".into())
        }
        (Some(scheme), Some(authority), path) if *scheme == Scheme::HTTP => {
            if authority.as_str().contains('@') || path.as_ref().is_some_and(|path| path.query().is_some()) {
                return Err("a URL with a user or a query cannot be passed on to".into());
            }
            let base = path.map_or(String::new(), |path| path.path().trim_end_matches('/').to_owned());
            Ok(Upstream { text: text.to_owned(), authority, base })
        }
        _ => Err("not a URL of a service: write http://HOST:PORT".into()),
    }
}

impl Upstream {
    /// The same path there.
    fn uri(&self, asked: &Uri) -> Option<Uri> {
        let path = match asked.path_and_query() {
            Some(path) if self.base.is_empty() => path.clone(),
            Some(path) => PathAndQuery::try_from(format!("{}{path}", self.base)).ok()?,
            None => PathAndQuery::from_static("/"),
        };
        Uri::builder()
            .scheme(Scheme::HTTP)
            .authority(self.authority.clone())
            .path_and_query(path)
            .build()
            .ok()
    }
}

/// The body of an answer: the service's, or ours.
pub type Answer = Either<Idle, Full<Bytes>>;

/// The service, as we reach it. Clones share its connections.
#[derive(Clone)]
pub struct Forward(Arc<Inner>);

struct Inner {
    client: Client<HttpConnector, Sent>,
    upstream: Upstream,
    metrics: Arc<Metrics>,
    timeout: Duration,
    idle: Duration,
}

impl Forward {
    pub fn new(gate: &super::Gate, metrics: Arc<Metrics>) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(gate.connect_timeout));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_secs(30))
            .build(connector);
        let upstream = gate.upstream.clone();
        Forward(Arc::new(Inner { client, upstream, metrics, timeout: gate.timeout, idle: gate.idle }))
    }
}

impl Inner {
    /// The request as the service gets it, and what the client wants to speak, if that is not HTTP.
    fn prepare(
        &self,
        mut request: Request<Incoming>,
        progress: Progress,
    ) -> Option<(Request<Sent>, Option<Wish>)> {
        let protocol = headers::upgrade(request.headers()).filter(|_| request.version() == Version::HTTP_11);
        let wish = protocol.map(|protocol| Wish {
            protocol,
            client: upgrade::on(&mut request),
            admission: request.extensions().get::<Admission>().cloned(),
        });
        let (mut parts, body) = request.into_parts();
        // HTTP/2 has the host in the URI alone.
        if let (None, Some(host)) = (parts.headers.get(header::HOST), parts.uri.authority()) {
            parts.headers.insert(header::HOST, HeaderValue::from_str(host.as_str()).ok()?);
        }
        headers::strip(&mut parts.headers);
        if let Some(Peer(peer)) = parts.extensions.get() {
            headers::forwarded(&mut parts.headers, *peer);
        }
        if let Some(wish) = &wish {
            headers::set_upgrade(&mut parts.headers, wish.protocol.clone());
        }
        parts.uri = self.upstream.uri(&parts.uri)?;
        parts.version = Version::HTTP_11;
        Some((Request::from_parts(parts, Sent { body, progress }), wish))
    }

    async fn pass(&self, request: Request<Incoming>) -> Result<Response<Answer>, Problem> {
        if request.method() == Method::CONNECT {
            return Ok(status(StatusCode::METHOD_NOT_ALLOWED));
        }
        let progress = Progress::new();
        let Some((request, wish)) = self.prepare(request, progress.clone()) else {
            return Ok(status(StatusCode::BAD_REQUEST));
        };
        let under_way = self.metrics.requests.one();
        let (answer, timer) = match progress.wait(self.client.request(request), self.timeout).await {
            Some((Ok(answer), timer)) => (answer, timer),
            Some((Err(error), _)) if error.is_connect() => {
                tracing::warn!(upstream = self.upstream.text, %error, "the service cannot be reached");
                return Err(Problem::Unreached);
            }
            Some((Err(error), _)) => {
                tracing::warn!(%error, "the service broke off");
                return Err(Problem::Unknown);
            }
            None => return Err(Problem::Unknown),
        };
        match (answer.status(), wish) {
            (StatusCode::SWITCHING_PROTOCOLS, Some(wish)) => {
                let (answer, service) = switched(answer);
                let Wish { client, admission, .. } = wish;
                tokio::spawn(Tunnel { client, service, admission, under_way }.run(self.metrics.clone()));
                Ok(answer)
            }
            // Nobody asked for it.
            (StatusCode::SWITCHING_PROTOCOLS, None) => Err(Problem::Unknown),
            _ => {
                let mut answer =
                    answer.map(|body| Either::Left(Idle { body, most: self.idle, timer, waiting: false }));
                headers::strip(answer.headers_mut());
                Ok(answer)
            }
        }
    }
}

/// What a client wants to speak instead of HTTP.
struct Wish {
    protocol: HeaderValue,
    client: OnUpgrade,
    admission: Option<Admission>,
}

/// The answer that a client gets whose wish is granted, and the service's end.
fn switched(mut answer: Response<Incoming>) -> (Response<Answer>, OnUpgrade) {
    let service = upgrade::on(&mut answer);
    let protocol = answer.headers().get(header::UPGRADE).cloned();
    let mut answer = answer.map(|_| Either::Right(Full::default()));
    headers::strip(answer.headers_mut());
    if let Some(protocol) = protocol {
        headers::set_upgrade(answer.headers_mut(), protocol);
    }
    (answer, service)
}

fn status(status: StatusCode) -> Response<Answer> {
    let mut answer = Response::new(Either::Right(Full::default()));
    *answer.status_mut() = status;
    answer
}

impl Service<Request<Incoming>> for Forward {
    type Response = Response<Answer>;
    type Error = std::convert::Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        let this = self.0.clone();
        Box::pin(async move {
            Ok(this.pass(request).await.unwrap_or_else(|problem| problem.response().map(Either::Right)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_the_same_there() {
        let there = |upstream_url: &str, asked: &str| {
            upstream(upstream_url).unwrap().uri(&asked.parse().unwrap()).unwrap().to_string()
        };
        assert_eq!(there("http://h:81", "/a/b?c=d"), "http://h:81/a/b?c=d");
        assert_eq!(there("http://h:81/", "/a"), "http://h:81/a");
        assert_eq!(there("http://h/base/", "/a?x"), "http://h/base/a?x");
        assert_eq!(there("http://h", "http://other/a"), "http://h/a");
    }

    #[test]
    fn what_is_no_service_is_told() {
        for bad in ["", "h:81", "/a", "https://h", "ftp://h", "http://u@h", "http://h/?q=1"] {
            assert!(upstream(bad).is_err(), "{bad}");
        }
    }
}
