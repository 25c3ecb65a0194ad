//! The examination of the servers: each of them is asked by the four-letter word `srvr`, so that a dead one is found although the store
//! works without it.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use lockkeeper_core::{ClockReading, Examination, Examine, Finding, Promise, Result, ServerReport, WallTime};
use lockkeeper_store_kit::read_clock;

use crate::error::Failure;
use crate::four_letter;
use crate::statements::ANY;
use crate::store::ZooKeeperStore;

#[async_trait]
impl Examine for ZooKeeperStore {
    async fn examine(&self) -> Result<Examination> {
        let options = self.options();
        let asked = options.servers.iter().map(|server| {
            tokio::time::timeout(options.timeout, four_letter::send(server, options.tls.as_ref(), "srvr"))
        });
        let replies = self.run(async { join_all(asked).await }).await;
        let all = options.servers.len();
        let alive = replies.iter().filter(|reply| matches!(reply, Ok(Ok(text)) if !text.is_empty())).count();
        let mut found = Examination::default();
        for (server, reply) in options.servers.iter().zip(replies) {
            let why = match reply {
                Ok(Ok(text)) if !text.is_empty() => {
                    found.findings.extend(reply_finding(server, &text));
                    found.servers.push(report(server, &text));
                    continue;
                }
                Ok(Ok(_)) => "it closed the connection".to_owned(),
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("nothing within {:?}", options.timeout),
            };
            let text = format!("the server {server} does not reply to srvr ({alive} of {all} do): {why}");
            let dead = Finding::risk(Promise::Availability, text);
            found.findings.push(dead.set(format!("the server {server}"), "running and reachable"));
            found.servers.push(ServerReport::new(server));
        }
        Ok(found)
    }

    async fn read_clocks(&self) -> Result<Vec<ClockReading>> {
        // The leader stamps every write with its wall clock, in milliseconds.
        let client = &self.shared.client;
        let session = self.run(client.connection.session()).await?;
        let read = async {
            let stat = self.run(session.set(&client.keys.bases(), b"", ANY)).await?;
            Ok::<_, Failure>(WallTime::from_micros(stat.mtime.unsigned_abs().saturating_mul(1000)))
        };
        Ok(vec![read_clock(&*client.clock, "the leader", Duration::from_millis(1), read).await?])
    }
}

fn field<'a>(reply: &'a str, name: &str) -> Option<&'a str> {
    reply.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

fn report(server: &str, reply: &str) -> ServerReport {
    let version = field(reply, "Zookeeper version:").and_then(|text| text.split(['-', ',']).next());
    let mut report = ServerReport {
        version: version.map(str::to_owned),
        role: field(reply, "Mode:").map(str::to_owned),
        ..ServerReport::new(server)
    };
    for (name, key) in
        [("Node count:", "nodes"), ("Connections:", "connections"), ("Outstanding:", "outstanding_requests")]
    {
        if let Some(value) = field(reply, name) {
            report = report.fact(key, value);
        }
    }
    report
}

/// A server that replies, and serves nothing.
fn reply_finding(server: &str, reply: &str) -> Option<Finding> {
    if !reply.contains("not currently serving requests") {
        return None;
    }
    let text = format!("the server {server} is not serving requests: it has no leader");
    Some(Finding::risk(Promise::Availability, text).set("servers that see each other", "a majority"))
}
