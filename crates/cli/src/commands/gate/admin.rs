//! The operator's door: `/metrics` and `/healthz`, on an address of its own.

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

use super::metrics::Metrics;

/// How long the store may take to say that it is there.
const PATIENCE: Duration = Duration::from_secs(2);

pub async fn serve(listener: TcpListener, metrics: Arc<Metrics>, keeper: Lockkeeper, layer: FenceLayer) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let (metrics, keeper, layer) = (metrics.clone(), keeper.clone(), layer.clone());
        let answer =
            service_fn(move |request| answer(request, metrics.clone(), keeper.clone(), layer.clone()));
        tokio::spawn(
            http1::Builder::new().timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), answer),
        );
    }
}

async fn answer(
    request: Request<Incoming>,
    metrics: Arc<Metrics>,
    keeper: Lockkeeper,
    layer: FenceLayer,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (status, kind, text) = match request.uri().path() {
        "/metrics" => (StatusCode::OK, "text/plain; version=0.0.4", metrics.text()),
        "/healthz" => match health(&metrics, &keeper, &layer).await {
            Ok(()) => (StatusCode::OK, "text/plain", "ok\n".into()),
            Err(why) => (StatusCode::SERVICE_UNAVAILABLE, "text/plain", format!("{why}\n")),
        },
        _ => (StatusCode::NOT_FOUND, "text/plain", "here are /metrics and /healthz\n".into()),
    };
    let answer = Response::builder().status(status).header(header::CONTENT_TYPE, kind);
    Ok(answer.body(Full::from(text)).unwrap_or_default())
}

/// Whether requests with a fence can be served: we are not about to end, the marks are ours, and the store can be asked.
async fn health(metrics: &Metrics, keeper: &Lockkeeper, layer: &FenceLayer) -> Result<(), String> {
    if metrics.draining.load(Ordering::Relaxed) {
        return Err("draining".into());
    }
    if !layer.is_owner() {
        return Err("standing by: another gate keeps these marks".into());
    }
    let probe = LockName::new("fence/healthz").map_err(|e| e.to_string())?;
    match tokio::time::timeout(PATIENCE, keeper.store().read(&probe)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(format!("the store cannot be asked: {error}")),
        Err(_) => Err("the store does not answer".into()),
    }
}
