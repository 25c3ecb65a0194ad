//! A [tower](https://docs.rs/tower) layer for HTTP services: a request with an `Idempotency-Key` is done
//! once, and every client that sends it again receives the same response. Built on
//! [`Once`](crate::once::Once).
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockkeeper::Result<()> {
//! use axum::{Extension, Router, routing::post};
//! use lockkeeper::idempotency::IdempotencyLayer;
//! use lockkeeper::{Fence, Lockkeeper};
//!
//! async fn charge(Extension(fence): Extension<Fence>, order: String) -> String {
//!     format!("{order} is paid, with fence {fence}")
//! }
//!
//! let keeper = Lockkeeper::open("memory:").await?;         // redis://, postgres:// or etcd:// for more than one process
//! let layer = IdempotencyLayer::new(&keeper, |request| {
//!     // The tenant, as the layer that checks credentials has stored it.
//!     request.extensions.get::<String>().cloned()          // None is refused
//! });
//! let app: Router = Router::new().route("/charge", post(charge)).layer(layer.required());
//! # let _ = app;
//! # Ok(())
//! # }
//! ```
//!
//! | request | response |
//! |---|---|
//! | a new key | the service's response, which is stored |
//! | the same request again | the same status, headers and body, and `idempotent-replayed: true` |
//! | the same request while the first one runs | 409, with `retry-after` |
//! | another method, path, query or body under the same key | 422 |
//! | a key that is missing though [required](IdempotencyLayer::required), given twice or malformed | 400 |
//! | a key, and the scope returns `None` | 500, and nothing was done |
//! | a body above the [limit](IdempotencyLayer::body_limit) | 413 |
//! | any, while the store is unreachable | 503, and nothing was done |
//! | a run that lost its lease before its response was stored | its successor's response; 504 as long as there is none |
//!
//! The layer's own responses are `application/problem+json`; their `type` names the problem.
//!
//! **The work goes on when the client hangs up**: it runs in a tokio task of its own, so that a client that
//! retries finds its response. **The layer drops it before the deadline** if its lease cannot be renewed,
//! because another process may begin then. The service finds the [`Fence`](crate::Fence) of the run (the
//! fencing token) among the extensions of the request, to send with every write.

mod key;
mod layer;
mod problem;
mod service;
mod stored_response;

pub use layer::IdempotencyLayer;
pub use service::{Idempotency, IdempotentBody, RequestBody};
