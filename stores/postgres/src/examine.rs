//! The examination of the server: version, role, connections, standbys, and its clock.

use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{ClockReading, Examination, Examine, Finding, Promise, Result, ServerReport, WallTime};
use lockkeeper_store_kit::read_clock;

use crate::error::Failure;
use crate::session::first;
use crate::statements::PgStatement;
use crate::store::PostgresStore;

/// The facts of a report. A role without the right to see other sessions counts those that it sees.
static FACTS: PgStatement = PgStatement {
    text: "SELECT current_setting('server_version'), pg_is_in_recovery(), current_setting('transaction_read_only'), \
           current_setting('max_connections')::int, (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'::text), \
           current_setting('synchronous_commit'), current_setting('fsync'), current_setting('full_page_writes'), \
           current_setting('synchronous_standby_names'), \
           coalesce((SELECT string_agg(coalesce(nullif(application_name, ''::text), '?'::text) || ' '::text || coalesce(sync_state, '?'::text), ', '::text) \
           FROM pg_stat_replication), ''::text)",
    types: &[],
};

/// The database's own time, in microseconds. The server counts every lease by it.
static CLOCK: PgStatement = PgStatement { text: "SELECT @S.now_us()", types: &[] };

#[async_trait]
impl Examine for PostgresStore {
    async fn examine(&self) -> Result<Examination> {
        let rows = self.parts.connection.rows(&FACTS, &[]).await?;
        let address = self.parts.options.server.to_string();
        let (in_recovery, read_only): (bool, String) = (first(&rows, 1)?, first(&rows, 2)?);
        let (most, clients): (i32, i64) = (first(&rows, 3)?, first(&rows, 4)?);
        let report = ServerReport {
            version: Some(first(&rows, 0)?),
            role: Some(if in_recovery { "standby" } else { "primary" }.into()),
            ..ServerReport::new(&address)
        };
        let names =
            ["synchronous_commit", "fsync", "full_page_writes", "synchronous_standby_names", "standbys"];
        let mut report = report.fact("max_connections", most).fact("connections", clients);
        for (column, name) in (5..).zip(names) {
            report = report.fact(name, first::<String>(&rows, column)?);
        }
        let mut findings = Vec::new();
        if in_recovery || read_only == "on" {
            let text = format!("{address} accepts no writes: it is a standby, or read-only");
            findings
                .push(Finding::harm(Promise::Availability, text).set("the URL of the store", "the primary"));
        }
        if clients.saturating_mul(10) >= i64::from(most).saturating_mul(9) {
            let text =
                format!("{address} has {clients} of {most} connections: it will refuse the next clients");
            findings.push(
                Finding::risk(Promise::Availability, text)
                    .change("max_connections", most.to_string(), most.saturating_mul(2).to_string())
                    .how(format!(
                        "ALTER SYSTEM SET max_connections = {}, then restart; or a pooler",
                        most.saturating_mul(2)
                    )),
            );
        }
        Ok(Examination { servers: vec![report], findings })
    }

    async fn read_clocks(&self) -> Result<Vec<ClockReading>> {
        let read = async {
            let rows = self.parts.connection.rows(&CLOCK, &[]).await?;
            let micros: i64 = first(&rows, 0)?;
            Ok::<_, Failure>(WallTime::from_micros(micros.unsigned_abs()))
        };
        let (options, step) = (&self.parts.options, Duration::from_micros(1));
        Ok(vec![read_clock(&*options.clock, options.server.to_string(), step, read).await?])
    }
}
