//! A trivial service, and the least that a reverse proxy can be.

use std::convert::Infallible;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;

async fn listen() -> TcpListener {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    eprintln!("listens on {}", listener.local_addr().expect("an address"));
    listener
}

pub async fn service() {
    let listener = listen().await;
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        stream.set_nodelay(true).expect("an option");
        let answer = service_fn(|request: Request<Incoming>| async {
            let _ = request.into_body().collect().await;
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"written"))))
        });
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), answer));
    }
}

pub async fn bare(upstream: &str) {
    let upstream: Uri = upstream.parse().expect("a URL");
    let authority = upstream.authority().expect("a host").clone();
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client: Client<_, Incoming> = Client::builder(TokioExecutor::new()).build(connector);
    let listener = listen().await;
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        stream.set_nodelay(true).expect("an option");
        let (client, authority) = (client.clone(), authority.clone());
        let pass = service_fn(move |mut request: Request<Incoming>| {
            let path = request.uri().path_and_query().expect("a path").clone();
            let uri = Uri::builder().scheme("http").authority(authority.clone()).path_and_query(path);
            *request.uri_mut() = uri.build().expect("a URL");
            client.request(request)
        });
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), pass));
    }
}
