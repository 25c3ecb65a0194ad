//! A [tower](https://docs.rs/tower) layer for HTTP services: a request with an `Idempotency-Key` is done once, and everybody
//! who sends it again gets the same answer. Built on [`Once`](crate::Once).
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
//!     // Whose key it is: what the layer that checks credentials left here.
//!     request.extensions.get::<String>().cloned()          // None is refused
//! });
//! let app: Router = Router::new().route("/charge", post(charge)).layer(layer.required());
//! # let _ = app;
//! # Ok(())
//! # }
//! ```
//!
//! | what comes | what is answered |
//! |---|---|
//! | a new key | what the service answers, which is kept |
//! | the same request again | the same status, headers and body, and `idempotent-replayed: true` |
//! | the same request while the first one runs | 409, with `retry-after` |
//! | another method, path, query or body under the same key | 422 |
//! | a key that is missing though [required](IdempotencyLayer::required), given twice or malformed | 400 |
//! | a key, and the scope says `None` | 500, and nothing was done |
//! | a body above the [limit](IdempotencyLayer::body_limit) | 413 |
//! | anything, while the store cannot be asked | 503, and nothing was done |
//! | a run that lost its lease before its answer was kept | what its successor answered; 504 as long as that is not known |
//!
//! The answers of the layer itself are `application/problem+json`; their `type` says which it is.
//!
//! **The work goes on when the client hangs up**: it runs in a task of its own (of tokio's), for whoever asks again.
//! **It is ended before the deadline** if its lease cannot be kept, because somebody else may begin then. The service finds the
//! [`Fence`](crate::Fence) of the run among the extensions of the request, to send along with every write.

mod answer;
mod key;
mod layer;
mod problem;
mod service;

pub use layer::IdempotencyLayer;
pub use service::{AnswerBody, Idempotency, RequestBody};
