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
use hyper::body::{Body, Incoming};
use hyper::upgrade::{self, OnUpgrade};
use lockkeeper_fenced::http::{Admission, Problem};
use tokio::sync::OwnedSemaphorePermit;
use tower_service::Service;

use super::body::{Idle, Sent};
use super::headers;
use super::links::{Links, Trouble};
use super::metrics::Metrics;
use super::tunnel::Tunnel;

/// Where the service is.
#[derive(Clone, Debug)]
pub struct Upstream {
    pub text: String,
    uri: Uri,
    authority: Authority,
    /// What comes before every path.
    base: String,
}

/// `--upstream`
pub fn upstream(text: &str) -> Result<Upstream, String> {
    let uri: Uri = text.parse().map_err(|_| "not a URL: write http://HOST:PORT".to_owned())?;
    let parts = uri.clone().into_parts();
    match (&parts.scheme, parts.authority, parts.path_and_query) {
        (Some(scheme), ..) if *scheme == Scheme::HTTPS => {
            Err("only http:// is possible: put the gate beside the service, where no TLS is needed".into())
        }
        (Some(scheme), Some(authority), path) if *scheme == Scheme::HTTP => {
            if authority.as_str().contains('@') || path.as_ref().is_some_and(|path| path.query().is_some()) {
                return Err("a URL with a user or a query cannot be passed on to".into());
            }
            let base = path.map_or(String::new(), |path| path.path().trim_end_matches('/').to_owned());
            Ok(Upstream { text: text.to_owned(), uri, authority, base })
        }
        _ => Err("not a URL of a service: write http://HOST:PORT".into()),
    }
}

impl Upstream {
    /// The same path there. Where the service is, is no part of it.
    fn path(&self, asked: Uri) -> Option<Uri> {
        match asked.path_and_query() {
            Some(_) if self.base.is_empty() && asked.authority().is_none() => Some(asked),
            Some(path) if self.base.is_empty() => Some(path.clone().into()),
            Some(path) => PathAndQuery::try_from(format!("{}{path}", self.base)).ok().map(Uri::from),
            None => Some(Uri::default()),
        }
    }
}

/// The body of an answer: the service's, or ours.
pub type Answer = Either<Idle, Full<Bytes>>;

/// The service, as a client reaches it. Clones share its connections.
#[derive(Clone)]
pub struct Forward {
    inner: Arc<Inner>,
    client: Arc<Client>,
}

/// Whose connection it is.
pub struct Client {
    /// Its address, as the service is told it.
    peer: HeaderValue,
    /// It takes up room until the last that has to do with it is over, a websocket too.
    _room: Option<OwnedSemaphorePermit>,
}

struct Inner {
    links: Links,
    upstream: Upstream,
    metrics: Arc<Metrics>,
    idle: Duration,
    /// How long the rest of a body may take once a newer fence waits.
    grace: Duration,
}

impl Forward {
    pub fn new(gate: &super::Gate, metrics: Arc<Metrics>) -> Self {
        let upstream = gate.upstream.clone();
        let links = Links::new(upstream.uri.clone(), gate.connect_timeout, gate.timeout);
        let inner = Arc::new(Inner { links, upstream, metrics, idle: gate.idle, grace: gate.wait / 4 });
        Forward { inner, client: Arc::new(Client { peer: HeaderValue::from_static("unknown"), _room: None }) }
    }

    /// For this client.
    pub fn of(&self, peer: IpAddr, room: OwnedSemaphorePermit) -> Self {
        let peer = HeaderValue::try_from(peer.to_string()).unwrap_or_else(|_| self.client.peer.clone());
        Forward { inner: self.inner.clone(), client: Arc::new(Client { peer, _room: Some(room) }) }
    }
}

impl Inner {
    /// The request as the service gets it, and the client's wish for a websocket, if it has one.
    fn prepare(
        &self,
        mut request: Request<Incoming>,
        client: &Arc<Client>,
    ) -> Option<(Request<Sent>, Option<Wish>)> {
        let upgrades = request.version() == Version::HTTP_11 && headers::upgrades(request.headers());
        let loss = request.extensions().get::<Admission>().map(Admission::loss);
        let wish = upgrades.then(|| Wish {
            upgrade: upgrade::on(&mut request),
            client: client.clone(),
            admission: request.extensions().get::<Admission>().cloned(),
        });
        let (mut parts, body) = request.into_parts();
        if !parts.headers.contains_key(header::HOST) {
            // HTTP/2 has the host in the URI alone, and HTTP/1.0 may have none.
            let host = parts.uri.authority().unwrap_or(&self.upstream.authority);
            parts.headers.insert(header::HOST, HeaderValue::from_str(host.as_str()).ok()?);
        }
        headers::strip(&mut parts.headers);
        headers::forwarded(&mut parts.headers, &client.peer);
        if upgrades {
            headers::set_upgrade(&mut parts.headers);
        }
        if !body.is_end_stream() && body.size_hint().exact().is_none() {
            // Of a GET nothing is sent otherwise, and the service would take it for one without a body.
            parts.headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        parts.uri = self.upstream.path(parts.uri)?;
        parts.version = Version::HTTP_11;
        Some((Request::from_parts(parts, Sent::new(body, loss, self.grace)), wish))
    }

    async fn pass(
        &self,
        request: Box<Request<Sent>>,
        wish: Option<Wish>,
    ) -> Result<Response<Answer>, Problem> {
        let under_way = self.metrics.requests.one();
        let answer = self.links.send(request).await.map_err(|trouble| self.problem(trouble))?;
        match (answer.status(), wish) {
            (StatusCode::SWITCHING_PROTOCOLS, Some(wish)) if headers::upgrades(answer.headers()) => {
                let (answer, service) = switched(answer);
                let Wish { upgrade: client, client: whose, admission } = wish;
                let tunnel = Tunnel { client, service, whose, admission, under_way };
                tokio::spawn(tunnel.run(self.metrics.clone()));
                Ok(answer)
            }
            // Nobody asked for it.
            (StatusCode::SWITCHING_PROTOCOLS, _) => Err(Problem::Unknown),
            _ => {
                let mut answer = answer.map(|body| Either::Left(Idle::new(body, self.idle, under_way)));
                headers::strip(answer.headers_mut());
                Ok(answer)
            }
        }
    }

    fn problem(&self, trouble: Trouble) -> Problem {
        match trouble {
            Trouble::Unreached(error) => {
                tracing::warn!(upstream = self.upstream.text, %error, "the service cannot be reached");
                Problem::Unreached
            }
            Trouble::Broken(error) => {
                tracing::warn!(%error, "the service broke off");
                Problem::Unknown
            }
            Trouble::Silent => Problem::Unknown,
        }
    }
}

/// A client that wants a websocket.
struct Wish {
    upgrade: OnUpgrade,
    client: Arc<Client>,
    admission: Option<Admission>,
}

/// The answer that a client gets whose wish is granted, and the service's end.
fn switched(mut answer: Response<Incoming>) -> (Response<Answer>, OnUpgrade) {
    let service = upgrade::on(&mut answer);
    let mut answer = answer.map(|_| Either::Right(Full::default()));
    headers::strip(answer.headers_mut());
    headers::set_upgrade(answer.headers_mut());
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
        if request.method() == Method::CONNECT {
            return Box::pin(async { Ok(status(StatusCode::METHOD_NOT_ALLOWED)) });
        }
        let Some((request, wish)) = self.inner.prepare(request, &self.client) else {
            return Box::pin(async { Ok(status(StatusCode::BAD_REQUEST)) });
        };
        // It is handed on from one to the next a few times.
        let (inner, request) = (self.inner.clone(), Box::new(request));
        Box::pin(async move {
            let answer = inner.pass(request, wish).await;
            Ok(answer.unwrap_or_else(|problem| problem.response().map(Either::Right)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_the_same_there() {
        let there = |upstream_url: &str, asked: &str| {
            upstream(upstream_url).unwrap().path(asked.parse().unwrap()).unwrap().to_string()
        };
        assert_eq!(there("http://h:81", "/a/b?c=d"), "/a/b?c=d");
        assert_eq!(there("http://h:81/", "/a"), "/a");
        assert_eq!(there("http://h/base/", "/a?x"), "/base/a?x");
        assert_eq!(there("http://h", "http://other/a"), "/a");
    }

    #[test]
    fn what_is_no_service_is_told() {
        for bad in ["", "h:81", "/a", "https://h", "ftp://h", "http://u@h", "http://h/?q=1"] {
            assert!(upstream(bad).is_err(), "{bad}");
        }
    }
}
