//! The examination of the store: it has no server, and no clock but that of its process.

use async_trait::async_trait;
use lockkeeper_core::{ClockReading, Examination, Examine, Result};

use crate::MemoryStore;

#[async_trait]
impl Examine for MemoryStore {
    async fn examine(&self) -> Result<Examination> {
        Ok(Examination::default())
    }

    async fn read_clocks(&self) -> Result<Vec<ClockReading>> {
        Ok(Vec::new())
    }
}
