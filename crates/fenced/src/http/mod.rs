//! The check for HTTP services: a [tower](https://docs.rs/tower) layer that refuses a request whose `Lock-Fence` is older than
//! one that its resource has seen, and a layer for clients that sends the header.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockkeeper::Result<()> {
//! use axum::{Router, routing::put};
//! use lockkeeper::Lockkeeper;
//! use lockkeeper_fenced::http::FenceLayer;
//!
//! let keeper = Lockkeeper::open("memory:").await?;         // a store that lasts, so that the marks do
//! let layer = FenceLayer::new(&keeper, |request| Some(request.uri.path().to_owned()))?;
//! let app: Router = Router::new().route("/orders/{id}", put(|| async { "written" })).layer(layer);
//! # let _ = app;
//! # Ok(())
//! # }
//! ```
//!
//! | what comes | what is answered |
//! |---|---|
//! | a fence that is as high as the mark of the resource, or higher | what the service answers |
//! | a lower one | 412 with `presented` and `seen`; the service hears nothing of it |
//! | none, though one is [required](FenceLayer::require) | 428 |
//! | one that is no fence, or is given twice | 400 |
//! | a higher one, while older requests are under way | it waits for their end, and is 503 after [a while](FenceLayer::wait) |
//! | anything with a fence, while the store cannot be asked | 503, and the service hears nothing of it |
//!
//! The answers of the layer itself are `application/problem+json`; their `type` says which it is.
//!
//! **To check and then to pass on is not enough.** A request with fence 5 may be checked, and then wait somewhere while one with
//! fence 6 is checked and served. So the layer keeps account of what is under way: a higher fence first raises the mark, from
//! when on lower ones are refused, and then waits until the older ones are answered. That account is one process's own: be
//! [alone](FenceLayer::alone) with the marks, or send all requests for a resource to one process.
//!
//! **A request that was passed on is finished even if its client hangs up**, because the next request must
//! know that it has ended: the rest of its response is read in the background, except for a GET or another
//! safe method. A service that works on after its response keeps the [`WriteAdmission`] that it finds among the
//! extensions of the request.

mod admitted_body;
mod client;
mod exclusive_marks;
mod header;
mod in_flight;
mod layer;
mod marks;
mod problem;
mod service;

pub use admitted_body::AdmittedBody;
pub use client::{SendFence, SendsFence};
pub use header::LOCK_FENCE;
pub use in_flight::{Loss, WriteAdmission};
pub use layer::{FenceLayer, Require};
pub use problem::Problem;
pub use service::{AnswerBody, Checked};

pub(crate) type ClientError = Box<dyn std::error::Error + Send + Sync>;
