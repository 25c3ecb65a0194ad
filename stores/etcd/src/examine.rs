//! The examination of the members: each of the URL's members is asked, so that a dead one is found although the store works without it.

use async_trait::async_trait;
use futures_util::future::join_all;
use lockkeeper_core::{ClockReading, Examination, Examine, Finding, Promise, Result, ServerReport};

use crate::config::Options;
use crate::connection::Connection;
use crate::error::Failure;
use crate::proto::{StatusRequest, StatusResponse};
use crate::store::EtcdStore;

/// The quota of the database where etcd does not report it: the default of `--quota-backend-bytes`.
const DEFAULT_QUOTA: i64 = 2 << 30;

#[async_trait]
impl Examine for EtcdStore {
    async fn examine(&self) -> Result<Examination> {
        let options = self.options();
        let asked = options.servers.iter().map(|server| read_status(options, server));
        let replies = self.run(join_all(asked)).await;
        let (all, alive) = (replies.len(), replies.iter().filter(|reply| reply.is_ok()).count());
        let mut found = Examination::default();
        for (server, reply) in options.servers.iter().zip(replies) {
            match reply {
                Ok(status) => {
                    found.findings.extend(member_findings(server, &status));
                    found.servers.push(report(server, &status));
                }
                Err(failure) => {
                    let error = lockkeeper_core::Error::from(failure);
                    let text = format!("the member {server} sends no reply ({alive} of {all} do): {error}");
                    let dead = Finding::risk(Promise::Availability, text);
                    found.findings.push(dead.set(format!("the member {server}"), "running and reachable"));
                    found.servers.push(ServerReport::new(server));
                }
            }
        }
        // Alarms are of the whole cluster: each member reports them.
        found.findings.dedup_by(|a, b| a.text == b.text);
        Ok(found)
    }

    async fn read_clocks(&self) -> Result<Vec<ClockReading>> {
        // The leader counts leases by its monotonic clock, and fences come from revisions. No call returns a wall clock.
        Ok(Vec::new())
    }
}

async fn read_status(options: &Options, server: &str) -> Result<StatusResponse, Failure> {
    let one = Options { servers: vec![server.to_owned()], ..options.clone() };
    let connection = Connection::new(&one).map_err(|error| Failure::NotSent(error.to_string()))?;
    connection.call("/etcdserverpb.Maintenance/Status", &StatusRequest {}).await
}

fn report(server: &str, status: &StatusResponse) -> ServerReport {
    let id = status.header.as_ref().map_or(0, |header| header.member_id);
    let role = match status {
        StatusResponse { is_learner: true, .. } => "learner",
        StatusResponse { leader, .. } if *leader == id => "leader",
        _ => "follower",
    };
    let report = ServerReport {
        version: Some(status.version.clone()),
        role: Some(role.to_owned()),
        ..ServerReport::new(server)
    };
    let report = report.fact("db_size", status.db_size).fact("raft_term", status.raft_term);
    match status.db_size_quota {
        0 => report,
        quota => report.fact("db_size_quota", quota),
    }
}

fn member_findings(server: &str, status: &StatusResponse) -> Vec<Finding> {
    let mut findings = Vec::new();
    if status.leader == 0 {
        let text = format!("the member {server} knows no leader: no lock is granted or renewed through it");
        findings.push(Finding::harm(Promise::Availability, text).set("members that reply", "a majority"));
    }
    for alarm in &status.errors {
        findings.push(alarm_finding(alarm));
    }
    let quota = if status.db_size_quota > 0 { status.db_size_quota } else { DEFAULT_QUOTA };
    if status.db_size.saturating_mul(10) >= quota.saturating_mul(8) {
        let text = format!(
            "the database of {server} has {} of {quota} bytes{}: when it is full, etcd raises the alarm NOSPACE and grants no lock",
            status.db_size,
            if status.db_size_quota > 0 { "" } else { " (the default quota)" }
        );
        findings.push(
            Finding::risk(Promise::Availability, text)
                .change("db_size", status.db_size.to_string(), "less than 80 % of the quota")
                .how("etcdctl compaction REVISION, then etcdctl defrag, or a larger --quota-backend-bytes"),
        );
    }
    findings
}

/// `alarm` as etcd reports it: `memberID:… alarm:NOSPACE`, or another error of the member.
fn alarm_finding(alarm: &str) -> Finding {
    let full = alarm.contains("NOSPACE");
    let text = if full {
        "etcd has raised the alarm NOSPACE: it grants and renews no lock until the alarm is disarmed"
            .to_owned()
    } else {
        format!("etcd reports: {alarm}")
    };
    let finding = Finding::harm(Promise::Availability, text);
    if full {
        let how = "etcdctl compaction REVISION, then etcdctl defrag, then etcdctl alarm disarm";
        finding.change("the alarm NOSPACE", "raised", "disarmed").how(how)
    } else {
        finding
    }
}
