//! Rate limits are not for a quorum of servers that share no clock: each would have a bucket of its own.

use async_trait::async_trait;
use lockkeeper_core::limit::{LimitOutcome, LimitRequest};
use lockkeeper_core::{Error, Limits, Result};

use crate::store::RedlockStore;

#[async_trait]
impl Limits for RedlockStore {
    async fn limit(&self, _request: &LimitRequest) -> Result<LimitOutcome> {
        Err(Error::Unsupported(
            "redlock has no rate limits: its servers share neither a clock nor a bucket. Use one of the servers, as redis://HOST".into(),
        ))
    }
}
