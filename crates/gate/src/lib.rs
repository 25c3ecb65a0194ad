//! A reverse proxy that checks fences (fencing tokens) in front of an HTTP service that cannot be changed.
//!
//! A client that writes under a lock sends its fence in the header `Lock-Fence`. The gate compares that fence with the mark
//! of the resource, the highest fence that the resource has seen, and forwards the request only if the fence is not older. The
//! comparison itself is [`lockkeeper_fenced::http::FenceLayer`]; this crate is the proxy around it. `lockkeeper gate` is
//! this crate with flags.
//!
//! - [`GateServer`]: accepts connections, and drains them at the end. [`GateOptions`]: its limits and time-outs.
//! - [`UpstreamUrl`]: where the service is. [`ResourceSelector`]: which part of a request names the resource.
//! - [`serve_admin`]: `/metrics` and `/healthz` on an address of their own.
//!
//! DESIGN.md in the crate's folder says why it is built this way.

mod admin;
mod body;
mod forward;
mod header_timeout;
mod headers;
mod inline_wake;
mod metrics;
mod options;
mod pool;
mod resource;
mod server;
mod tunnel;
mod upstream;

pub use admin::serve_admin;
pub use metrics::{GateMetrics, Gauge, GaugeGuard};
pub use options::{GateOptions, connections_for, raise_file_limit};
pub use resource::ResourceSelector;
pub use server::GateServer;
pub use upstream::UpstreamUrl;
