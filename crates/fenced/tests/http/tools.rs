//! A service that writes down in which order it was written to, and requests to it.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use http_body_util::BodyExt;
use lockkeeper_fenced::http::FenceLayer;
use serde_json::Value;
use tower_layer::Layer;
use tower_service::Service;

/// The fences of what was written, in order; 0 for a request without one.
#[derive(Clone, Debug, Default)]
pub struct Ledger(Arc<Mutex<Vec<u64>>>);

impl Ledger {
    pub fn read(&self) -> Vec<u64> {
        self.0.lock().unwrap().clone()
    }

    pub fn write(&self, request: &Request) {
        let fence =
            request.headers().get("lock-fence").map_or(0, |fence| fence.to_str().unwrap().parse().unwrap());
        self.0.lock().unwrap().push(fence);
    }

    pub fn goes_back(&self) -> bool {
        !self.read().is_sorted()
    }
}

/// Writes after it has yielded as often as the first number of the query says, and answers after as many as the second says.
pub fn app(ledger: &Ledger) -> Router {
    let ledger = ledger.clone();
    Router::new().fallback(any(move |request: Request| write(ledger, request)))
}

async fn write(ledger: Ledger, request: Request) -> Response {
    let query = request.uri().query().unwrap_or("0,0").to_owned();
    let mut pauses = query.split(',').map(|count| count.parse::<usize>().unwrap());
    pause(pauses.next().unwrap()).await;
    ledger.write(&request);
    pause(pauses.next().unwrap()).await;
    (StatusCode::CREATED, "written").into_response()
}

pub async fn pause(yields: usize) {
    for _ in 0..yields {
        tokio::task::yield_now().await;
    }
}

pub fn by_path(keeper: &lockkeeper::Lockkeeper) -> FenceLayer {
    FenceLayer::new(keeper, |request| Some(request.uri.path().to_owned())).unwrap()
}

pub fn request(method: &str, path: &str, fences: &[&str]) -> Request {
    let request =
        fences.iter().fold(Request::builder(), |request, fence| request.header("Lock-Fence", *fence));
    request.method(method).uri(path).body(Body::empty()).unwrap()
}

/// The status, and the body if it is JSON.
pub async fn send(layer: &FenceLayer, app: &Router, request: Request) -> (u16, Value) {
    let response = layer.layer(app.clone()).call(request).await.unwrap();
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap_or_default())
}

pub async fn put(layer: &FenceLayer, app: &Router, path: &str, fence: u64) -> (u16, Value) {
    send(layer, app, request("PUT", path, &[&fence.to_string()])).await
}
