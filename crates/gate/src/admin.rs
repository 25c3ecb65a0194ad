//! The operator's endpoints: `/metrics` and `/healthz`, on an address of their own.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use lockkeeper::{LockName, Lockkeeper};
use lockkeeper_fenced::http::FenceLayer;
use tokio::net::TcpListener;

use crate::metrics::GateMetrics;

/// How long the store may take to answer the health check.
const STORE_TIMEOUT: Duration = Duration::from_secs(2);

/// Serves `/metrics` and `/healthz` until the returned future is dropped. `keeper` and `marks` are those of the gate.
pub async fn serve_admin(
    listener: TcpListener,
    metrics: Arc<GateMetrics>,
    keeper: Lockkeeper,
    marks: FenceLayer,
) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let (metrics, keeper, marks) = (metrics.clone(), keeper.clone(), marks.clone());
        let respond =
            service_fn(move |request| respond(request, metrics.clone(), keeper.clone(), marks.clone()));
        tokio::spawn(
            http1::Builder::new().timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), respond),
        );
    }
}

async fn respond(
    request: Request<Incoming>,
    metrics: Arc<GateMetrics>,
    keeper: Lockkeeper,
    marks: FenceLayer,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (status, kind, text) = match request.uri().path() {
        "/metrics" => (StatusCode::OK, "text/plain; version=0.0.4", metrics.render()),
        "/healthz" => match check_health(&metrics, &keeper, &marks).await {
            Ok(()) => (StatusCode::OK, "text/plain", "ok\n".into()),
            Err(why) => (StatusCode::SERVICE_UNAVAILABLE, "text/plain", format!("{why}\n")),
        },
        _ => (StatusCode::NOT_FOUND, "text/plain", "not found: try /metrics or /healthz\n".into()),
    };
    let response = Response::builder().status(status).header(header::CONTENT_TYPE, kind);
    Ok(response.body(Full::from(text)).unwrap_or_default())
}

/// Whether the gate can serve requests with a fence: it is not draining, it holds the marks, and the store answers.
async fn check_health(metrics: &GateMetrics, keeper: &Lockkeeper, marks: &FenceLayer) -> Result<(), String> {
    if metrics.draining.load(Ordering::Relaxed) {
        return Err("draining".into());
    }
    if !marks.is_owner() {
        return Err("standing by: another gate keeps these marks".into());
    }
    let probe = LockName::new("fence/healthz").map_err(|e| e.to_string())?;
    match tokio::time::timeout(STORE_TIMEOUT, keeper.store().read(&probe)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(format!("the store is unreachable: {error}")),
        Err(_) => Err("the store does not answer".into()),
    }
}
