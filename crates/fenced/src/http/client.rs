//! A layer for HTTP clients that sends the fence of a guard.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use http::{HeaderValue, Request};
use lockkeeper::{Guard, LeaseState};
use lockkeeper_core::Error;
use tower_layer::Layer;
use tower_service::Service;

use super::ClientError;
use super::header::LOCK_FENCE;

/// A layer for HTTP clients: sends the fence of a guard with every request, and sends nothing once the lock is lost.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// use std::sync::Arc;
/// use bytes::Bytes;
/// use http::Request;
/// use http_body_util::Full;
/// use hyper_util::client::legacy::Client;
/// use hyper_util::rt::TokioExecutor;
/// use lockkeeper::Lockkeeper;
/// use lockkeeper_fenced::http::SendFence;
/// use tower_layer::Layer;
/// use tower_service::Service;
///
/// let keeper = Lockkeeper::open("memory:").await?;
/// let guard = Arc::new(keeper.lock("orders/42").acquire().await?);
/// let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
/// let mut client = SendFence::new(guard).layer(client);        // any tower client will do
///
/// let order = Request::put("http://127.0.0.1:9/orders/42").body(Full::from("paid"))?;
/// let answer = client.call(order).await;                       // carries Lock-Fence; 412: another holder writes now
/// # assert!(answer.is_err(), "no server listens there");
/// # Ok(())
/// # }
/// ```
///
/// Its error is a box, in which there is an [`Error::Lost`] if the lock was lost before the request was sent. That is a courtesy:
/// the lock may be lost while the request is on its way, and then it is the resource that refuses it.
#[derive(Clone, Debug)]
pub struct SendFence(Arc<Guard>);

impl SendFence {
    /// Sends the fence of this guard.
    pub fn new(guard: Arc<Guard>) -> Self {
        SendFence(guard)
    }
}

impl<S> Layer<S> for SendFence {
    type Service = SendsFence<S>;

    fn layer(&self, inner: S) -> SendsFence<S> {
        SendsFence { inner, guard: self.0.clone() }
    }
}

/// A client that sends the fence of a guard. Made by [`SendFence`].
#[derive(Clone)]
pub struct SendsFence<S> {
    inner: S,
    guard: Arc<Guard>,
}

impl<S> fmt::Debug for SendsFence<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SendsFence({:?})", self.guard)
    }
}

impl<S, B> Service<Request<B>> for SendsFence<S>
where
    S: Service<Request<B>>,
    S::Future: Send + 'static,
    S::Error: Into<ClientError>,
{
    type Response = S::Response;
    type Error = ClientError;
    type Future = BoxFuture<'static, Result<S::Response, ClientError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ClientError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        if let LeaseState::Lost(why) = self.guard.state() {
            return Box::pin(async move { Err(Error::Lost(why.to_string()).into()) });
        }
        // Replace a header that was set before: it belongs to another grant.
        request.headers_mut().insert(LOCK_FENCE, HeaderValue::from(self.guard.fence().get()));
        let call = self.inner.call(request);
        Box::pin(async move { call.await.map_err(Into::into) })
    }
}
