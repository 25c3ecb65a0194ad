//! The examination of the servers: version, memory, persistence as it works just now, replicas, and the sentinels.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use lockkeeper_core::{ClockReading, Examination, Examine, Finding, Promise, Result, ServerReport, WallTime};
use lockkeeper_store_kit::read_clock;
use redis::{Value, cmd};

use crate::connection::{Connection, text_of};
use crate::error::Failure;
use crate::store::RedisStore;

/// The fields of INFO that a report shows.
const SHOWN: [&str; 12] = [
    "aof_enabled",
    "aof_last_write_status",
    "blocked_clients",
    "connected_clients",
    "connected_slaves",
    "maxclients",
    "maxmemory",
    "maxmemory_policy",
    "rdb_last_bgsave_status",
    "rejected_connections",
    "uptime_in_seconds",
    "used_memory",
];

#[async_trait]
impl Examine for RedisStore {
    async fn examine(&self) -> Result<Examination> {
        let mut found = Examination::default();
        let router = &self.runner().router;
        for (endpoint, reply) in router.ping_sentinels().await {
            found.servers.push(ServerReport {
                role: Some("sentinel".into()),
                ..ServerReport::new(endpoint.to_string())
            });
            if let Err(failure) = reply {
                found.findings.push(silent_server("the sentinel", &endpoint.to_string(), failure));
            }
        }
        let servers = router.all().await?;
        let replies = join_all(servers.iter().map(|server| read_info(server))).await;
        for (server, reply) in servers.iter().zip(replies) {
            let address = server.endpoint().to_string();
            match reply {
                Ok(info) => {
                    found.findings.extend(info_findings(&address, &info));
                    found.servers.push(server_report(address, &info));
                }
                Err(failure) => {
                    found.findings.push(silent_server("the server", &address, failure));
                    found.servers.push(ServerReport::new(address));
                }
            }
        }
        Ok(found)
    }

    async fn read_clocks(&self) -> Result<Vec<ClockReading>> {
        let servers = self.runner().router.all().await?;
        let clock = &*self.runner().options.clock;
        let readings = servers.iter().map(|server| {
            let step = Duration::from_micros(1);
            read_clock(clock, server.endpoint().to_string(), step, read_time(server))
        });
        // A server without a reply is a finding of `examine`.
        Ok(join_all(readings).await.into_iter().flatten().collect())
    }
}

/// The wall clock of a server.
pub async fn read_time(server: &Connection) -> Result<WallTime, Failure> {
    let reply = server.call(&cmd("TIME")).await?;
    let Value::Array(parts) = &reply else { return Err(Failure::unexpected_reply()) };
    let number = |at: usize| parts.get(at).and_then(text_of).and_then(|text| text.parse::<u64>().ok());
    match (number(0), number(1)) {
        (Some(seconds), Some(micros)) => Ok(WallTime::from_micros(seconds * 1_000_000 + micros)),
        _ => Err(Failure::unexpected_reply()),
    }
}

/// The fields of INFO.
pub async fn read_info(server: &Connection) -> Result<HashMap<String, String>, Failure> {
    let reply = server.call(&cmd("INFO")).await?;
    let text = text_of(&reply).ok_or_else(Failure::unexpected_reply)?;
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    Ok(pairs.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect())
}

/// The report about a server that returned INFO.
pub fn server_report(address: String, info: &HashMap<String, String>) -> ServerReport {
    let get = |key: &str| info.get(key).cloned();
    let role = get("role").map(|role| if role == "master" { "primary".into() } else { role });
    let mut report = ServerReport { version: get("redis_version"), role, ..ServerReport::new(address) };
    for key in SHOWN {
        if let Some(value) = info.get(key) {
            report = report.fact(key, value);
        }
    }
    let mut replicas: Vec<(&String, &String)> =
        info.iter().filter(|(key, value)| key.starts_with("slave") && value.starts_with("ip=")).collect();
    replicas.sort();
    replicas.into_iter().fold(report, |report, (key, value)| report.fact(key.as_str(), value))
}

/// The faults that INFO shows now, beyond the settings that the profile declares.
pub fn info_findings(address: &str, info: &HashMap<String, String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let is = |key: &str, value: &str| info.get(key).is_some_and(|found| found == value);
    let number = |key: &str| info.get(key).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    if is("aof_last_write_status", "err") {
        let text = format!(
            "{address} cannot write its append-only file: it refuses locks, or forgets them in a crash"
        );
        findings.push(Finding::harm(Promise::Durability, text).change(
            "aof_last_write_status",
            "err",
            "ok: free its disk",
        ));
    }
    if is("loading", "1") {
        let text = format!("{address} is loading its data: it refuses every request until it has finished");
        findings.push(Finding::harm(Promise::Availability, text));
    }
    let (used, limit) = (number("used_memory"), number("maxmemory"));
    if limit > 0 && used.saturating_mul(10) >= limit.saturating_mul(9) && is("maxmemory_policy", "noeviction")
    {
        let text =
            format!("{address} uses {used} of {limit} bytes: when its memory is full, it grants no lock");
        findings.push(
            Finding::risk(Promise::Availability, text)
                .change("maxmemory", limit.to_string(), used.saturating_mul(2).to_string())
                .how(format!("CONFIG SET maxmemory {}, then CONFIG REWRITE", used.saturating_mul(2))),
        );
    }
    let (clients, most) = (number("connected_clients"), number("maxclients"));
    if most > 0 && clients.saturating_mul(10) >= most.saturating_mul(9) {
        let text = format!("{address} has {clients} of {most} connections: it will refuse the next clients");
        let more = most.saturating_mul(2).to_string();
        findings.push(Finding::risk(Promise::Availability, text).change(
            "maxclients",
            most.to_string(),
            more,
        ));
    }
    findings
}

/// The finding for a server that sent no usable reply.
pub fn silent_server(kind: &str, address: &str, failure: Failure) -> Finding {
    let error = lockkeeper_core::Error::from(failure);
    Finding::risk(Promise::Availability, format!("{kind} {address} sends no reply: {error}"))
        .set(format!("{kind} {address}"), "running and reachable")
}
