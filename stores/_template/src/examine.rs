//! The `Examine` trait, thin: what `lockkeeper doctor` can find out about the servers.

use async_trait::async_trait;
use lockkeeper_core::{ClockReading, Examination, Examine, Result};

use crate::TemplateStore;

#[async_trait]
impl Examine for TemplateStore {
    /// Fill in: a `ServerReport` for each server, also for one that is dead, and a `Finding` for what is wrong with it.
    async fn examine(&self) -> Result<Examination> {
        Ok(Examination::default())
    }

    /// Fill in, if a server's clock decides about leases or fences: `lockkeeper_store_kit::read_clock` for each of them.
    async fn read_clocks(&self) -> Result<Vec<ClockReading>> {
        Ok(Vec::new())
    }
}
