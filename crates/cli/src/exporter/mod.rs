//! The numbers of a whole store for Prometheus: what `lockkeeper metrics` looks at, how it is written, and how it is served.

mod scrape;
#[cfg(feature = "exporter")]
mod server;

pub use scrape::{ScrapeOptions, StoreScraper};
#[cfg(feature = "exporter")]
pub use server::{ScrapeCache, serve};
