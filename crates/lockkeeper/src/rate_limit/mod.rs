//! A [tower](https://docs.rs/tower) layer for HTTP services: requests above a rate are refused with 429. Built on
//! [`RateLimit`](crate::limit::RateLimit), so all processes of a service share the limit.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockkeeper::Result<()> {
//! use axum::{Router, routing::get};
//! use lockkeeper::Lockkeeper;
//! use lockkeeper::limit::PER_SECOND;
//! use lockkeeper::rate_limit::{OnStoreFailure, RateLimitLayer};
//!
//! async fn hello() -> &'static str {
//!     "hello"
//! }
//!
//! let keeper = Lockkeeper::open("memory:").await?;         // redis:// or postgres:// for more than one process
//! let limit = move |request: &axum::http::request::Parts| {
//!     // The user, as the layer that checks credentials has stored it.
//!     let user = request.extensions.get::<String>()?;
//!     Some(keeper.limit(format!("user/{user}")).rate(10, PER_SECOND).burst(50))
//! };
//! let layer = RateLimitLayer::new(limit, OnStoreFailure::LetThrough);
//! let app: Router = Router::new().route("/", get(hello)).layer(layer);
//! # let _ = app;
//! # Ok(())
//! # }
//! ```
//!
//! | request | response |
//! |---|---|
//! | within the limit | the service's response, with `ratelimit` and `ratelimit-policy` |
//! | above it | 429 with the same headers and `retry-after`; the service is not called |
//! | any, while the store is unreachable | by [`OnStoreFailure`]: the service's response, or 503 with `retry-after` |
//! | a limit with a bad key or rate | 500; the service is not called |
//!
//! The headers are those of [draft-ietf-httpapi-ratelimit-headers-09](https://datatracker.ietf.org/doc/draft-ietf-httpapi-ratelimit-headers/09/):
//! `ratelimit-policy: "default";q=10;w=1` says ten requests per second, and `ratelimit: "default";r=49;t=1` that 49 are left and that the bucket
//! is full in a second. The layer's own responses are `application/problem+json`.

mod headers;
mod layer;
mod service;

pub use layer::{OnStoreFailure, RateLimitLayer};
pub use service::{LimitedBody, RateLimited};
