//! The `Limits` trait, thin. A store without rate limits leaves it as it is.

use async_trait::async_trait;
use lockkeeper_core::limit::{LimitOutcome, LimitRequest};
use lockkeeper_core::{Limits, Result};

use crate::TemplateStore;

#[async_trait]
impl Limits for TemplateStore {
    /// Fill in: read the instants at which the buckets are full, decide ([`lockkeeper_core::limit::decide`]) and write them, in one step with the clock
    /// of the server. Remove a bucket that is full. A store that has only records uses `lockkeeper_store_kit::RecordLimits`.
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        request.check()?;
        Err(crate::profile::profile().lacks("rate limits"))
    }
}
