//! The examination of the table: its state and size, and the clock of DynamoDB.

use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{ClockReading, Examination, Examine, Finding, Promise, Result, ServerReport};
use lockkeeper_store_kit::read_clock;

use crate::error::Failure;
use crate::profile;
use crate::store::DynamoStore;

/// The header `Date` has whole seconds, and the store trusts its own clock within half a second more.
const STEP: Duration = Duration::from_millis(1500);
/// A key that no lock and no record has.
const NO_KEY: &str = "doctor";

#[async_trait]
impl Examine for DynamoStore {
    async fn examine(&self) -> Result<Examination> {
        let table = self.run(profile::describe_table(&self.inner.table)).await?.ok_or(Failure::NoTable)?;
        let status = table.table_status().map_or("unknown", |status| status.as_str());
        let mut report =
            ServerReport::new(format!("{}/{}", self.inner.options.region, self.inner.options.table))
                .fact("status", status)
                .fact("items", table.item_count().unwrap_or(0))
                .fact("bytes", table.table_size_bytes().unwrap_or(0))
                .fact("replicas", table.replicas().len());
        if let Some(billing) = table.billing_mode_summary().and_then(|billing| billing.billing_mode()) {
            report = report.fact("billing_mode", billing.as_str());
        }
        let mut findings = Vec::new();
        if table.deletion_protection_enabled() != Some(true) {
            let text = "deletion protection of the table is off: who deletes the table deletes every lock and every fence";
            findings.push(
                Finding::hint(Promise::Fence, text).change("DeletionProtectionEnabled", "false", "true").how(
                    format!(
                        "aws dynamodb update-table --table-name {} --deletion-protection-enabled",
                        self.inner.options.table
                    ),
                ),
            );
        }
        Ok(Examination { servers: vec![report], findings })
    }

    async fn read_clocks(&self) -> Result<Vec<ClockReading>> {
        let read = async {
            self.run(self.inner.table.get(NO_KEY)).await?;
            Ok::<_, Failure>(self.inner.records.wall())
        };
        let server = self.inner.options.region.clone();
        Ok(vec![read_clock(&*self.inner.options.clock, server, STEP, read).await?])
    }
}
