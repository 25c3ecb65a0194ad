//! The laws of all adapters, over real HTTP: a service that keeps values, with the layer before it and without.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::to_bytes;
use axum::extract::Request;
use axum::http::response::Parts;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use lockkeeper::Lockkeeper;
use lockkeeper_core::{Error, Fence, Result};
use lockkeeper_fenced::{Fenced, GuardedValue};
use lockkeeper_testkit::fenced::FencedHarness;
use lockkeeper_testkit::servers::TempDir;
use sha2::{Digest, Sha256};

use super::tools::by_path;

/// Where the service listens, and the place of its marks.
struct Place {
    port: u16,
    marks: TempDir,
}

/// What was written last, and the fence that came with it.
type Values = Arc<Mutex<HashMap<String, (u64, Option<Vec<u8>>)>>>;

/// What a service does that cannot be changed: it takes everything. It notes the fence of what it took, and compares nothing.
async fn keep(values: Values, request: Request) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let fence = request.headers().get("lock-fence").and_then(|fence| fence.to_str().ok()?.parse().ok());
    let Ok(body) = to_bytes(request.into_body(), usize::MAX).await else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    let mut values = values.lock().unwrap();
    match (method, fence) {
        (Method::GET, _) => match values.get(&path) {
            Some((fence, Some(value))) => ([("x-fence", fence.to_string())], value.clone()).into_response(),
            Some((fence, None)) => (StatusCode::GONE, [("x-fence", fence.to_string())]).into_response(),
            None => StatusCode::NOT_FOUND.into_response(),
        },
        (method, fence) => {
            let value = (method != Method::DELETE).then(|| body.to_vec());
            values.insert(path, (fence.unwrap_or(1), value));
            StatusCode::NO_CONTENT.into_response()
        }
    }
}

#[async_trait]
impl FencedHarness for Place {
    async fn start() -> Option<Self> {
        let dir = TempDir::new("fenced-http-laws");
        let keeper = Lockkeeper::open(&format!("sqlite:{}", dir.join("marks.db").display())).await.unwrap();
        let values = Values::default();
        let handler = any(move |request: Request| keep(values.clone(), request));
        let checked = Router::new().route("/fenced/{what}", handler.clone()).layer(by_path(&keeper));
        let app = checked.merge(Router::new().route("/plain/{what}", handler));
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move { axum::serve(listener, app).await });
        Some(Place { port, marks: dir })
    }

    fn address(&self) -> String {
        format!("{} {}", self.port, self.marks.path().display())
    }

    async fn client(address: &str) -> Arc<dyn Fenced> {
        let (port, dir) = address.split_once(' ').unwrap();
        let marks = Some(Lockkeeper::open(&format!("sqlite:{dir}/marks.db")).await.unwrap());
        Arc::new(Remote { base: format!("http://127.0.0.1:{port}/fenced"), client: client(), marks })
    }

    async fn twin(address: &str) -> Arc<dyn Fenced> {
        let (port, _) = address.split_once(' ').unwrap();
        Arc::new(Remote { base: format!("http://127.0.0.1:{port}/plain"), client: client(), marks: None })
    }
}

fn client() -> Client<HttpConnector, Full<Bytes>> {
    Client::builder(TokioExecutor::new()).build_http()
}

/// A client of the service.
struct Remote {
    base: String,
    client: Client<HttpConnector, Full<Bytes>>,
    marks: Option<Lockkeeper>,
}

impl Remote {
    fn path(resource: &str) -> String {
        resource.bytes().map(|byte| format!("{byte:02x}")).collect()
    }

    async fn send(
        &self,
        method: Method,
        resource: &str,
        fence: Option<Fence>,
        body: &[u8],
    ) -> (Parts, Bytes) {
        let uri = format!("{}/{}", self.base, Self::path(resource));
        let request = http::Request::builder().method(method).uri(uri);
        let request = match fence {
            Some(fence) => request.header("Lock-Fence", fence.get()),
            None => request,
        };
        let request = request.body(Full::from(body.to_vec())).unwrap();
        let answer = self.client.request(request).await.unwrap();
        let (head, body) = answer.into_parts();
        (head, body.collect().await.unwrap().to_bytes())
    }

    /// What the service has, and the fence that it came with.
    async fn look(&self, resource: &str) -> Result<Option<GuardedValue>> {
        let (head, body) = self.send(Method::GET, resource, None, b"").await;
        if head.status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        let fence = Fence::new(head.headers["x-fence"].to_str().unwrap().parse().unwrap())?;
        Ok(Some(GuardedValue { fence, value: (head.status == StatusCode::OK).then(|| body.to_vec()) }))
    }

    async fn write(&self, method: Method, resource: &str, fence: Fence, body: &[u8]) -> Result<()> {
        let (head, body) = self.send(method, resource, Some(fence), body).await;
        match head.status.as_u16() {
            204 => Ok(()),
            412 => {
                let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
                let number = |key: &str| Fence::new(problem[key].as_u64().unwrap());
                Err(Error::Stale { presented: number("presented")?, seen: number("seen")? })
            }
            other => panic!("{other} {body:?}"),
        }
    }
}

#[async_trait]
impl Fenced for Remote {
    async fn put(&self, resource: &str, fence: Fence, value: &[u8]) -> Result<()> {
        self.write(Method::PUT, resource, fence, value).await
    }

    async fn delete(&self, resource: &str, fence: Fence) -> Result<()> {
        self.write(Method::DELETE, resource, fence, b"").await
    }

    /// The mark is raised before the service hears of a write. While one is under way the two differ, and it is looked again.
    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        loop {
            let seen = self.look(resource).await?;
            let Some(marks) = &self.marks else { return Ok(seen) };
            let mark =
                marks.register_bytes(mark_of(&format!("/fenced/{}", Self::path(resource)))).read().await?;
            let mark = mark.map(|mark| String::from_utf8(mark.value).unwrap().parse::<u64>().unwrap());
            if mark == seen.as_ref().map(|seen| seen.fence.get()) {
                return Ok(seen);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// The record of a mark: long ones are known by their hash.
fn mark_of(path: &str) -> String {
    if path.len() <= 400 {
        return format!("fence/http={path}");
    }
    let hash: String = Sha256::digest(path).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("fence/http#{hash}")
}

lockkeeper_testkit::fenced_laws!(Place);
