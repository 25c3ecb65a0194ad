//! The way to the servers, before a store is opened: does the name resolve, and does the port accept a connection? If a store cannot be
//! opened, this says which step failed.

use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use lockkeeper::{Finding, Promise};
use lockkeeper_core::StoreUrl;

use crate::duration;

/// A server that the URL names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerAddress {
    pub host: String,
    pub port: u16,
}

/// How far the way to a server leads.
#[derive(Clone, Debug)]
pub struct WayToServer {
    pub server: ServerAddress,
    /// How long the connection took; else the step that failed, and why.
    pub outcome: Result<Duration, String>,
}

/// The port of a store whose URL names none.
fn default_port(scheme: &str) -> Option<u16> {
    Some(match scheme {
        "redis+sentinel" | "rediss+sentinel" => 26379,
        "postgres" | "postgresql" => 5432,
        "etcd" | "etcds" => 2379,
        "zk" => 2181,
        "zks" => 2182,
        _ if ["redis", "rediss", "redlock", "redlocks"]
            .contains(&scheme.split('+').next().unwrap_or(scheme)) =>
        {
            6379
        }
        _ => return None,
    })
}

/// Whether the URL has the scheme of a store. If not, there is nothing to examine.
pub fn is_store(url: &str) -> bool {
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    ["memory", "sqlite", "dynamodb"].contains(&scheme) || default_port(scheme).is_some()
}

/// The servers that the URL names. Empty for a file, for DynamoDB, and for a socket in the file system.
pub fn servers(url: &str) -> Vec<ServerAddress> {
    let Ok(url) = StoreUrl::parse(url) else { return Vec::new() };
    let Some(default) = default_port(&url.scheme) else { return Vec::new() };
    let hosts = url.hosts.iter().filter(|(host, _)| !host.is_empty() && !host.contains('/'));
    hosts.map(|(host, port)| ServerAddress { host: host.clone(), port: port.unwrap_or(default) }).collect()
}

/// Resolves the name and connects, within `timeout` for each step. It blocks: call it on a thread of its own.
pub fn try_way(server: ServerAddress, timeout: Duration) -> WayToServer {
    let host = server.host.trim_start_matches('[').trim_end_matches(']');
    let outcome = (|| {
        let found =
            (host, server.port).to_socket_addrs().map_err(|e| format!("the name does not resolve: {e}"))?;
        let mut last = "the name has no address".to_owned();
        let end = Instant::now() + timeout;
        for address in found {
            let begun = Instant::now();
            let left = end.saturating_duration_since(begun);
            if left.is_zero() {
                break;
            }
            match TcpStream::connect_timeout(&address, left) {
                Ok(_) => return Ok(begun.elapsed()),
                Err(e) => last = format!("no connection to {address}: {e}"),
            }
        }
        Err(last)
    })();
    WayToServer { server, outcome }
}

impl WayToServer {
    /// The outcome in words.
    pub fn text(&self) -> String {
        match &self.outcome {
            Ok(took) => format!("{} accepts connections, within {}", self.server, duration::measured(*took)),
            Err(why) => format!("{}: {why}", self.server),
        }
    }

    /// A server that cannot be reached, although the store may work without it.
    pub fn finding(&self) -> Option<Finding> {
        let why = self.outcome.as_ref().err()?;
        let text = format!("{} cannot be reached: {why}", self.server);
        Some(
            Finding::risk(Promise::Availability, text)
                .set(format!("the server {}", self.server), "running and reachable"),
        )
    }
}

impl std::fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_of_a_url_are_found() {
        let texts = |url| servers(url).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(texts("redis://u:secret@a:7000/2"), ["a:7000"]);
        assert_eq!(texts("redis+sentinel://a,b:7/main"), ["a:26379", "b:7"]);
        assert_eq!(texts("etcd://a,b,c/locks"), ["a:2379", "b:2379", "c:2379"]);
        assert_eq!(texts("postgres://a/db"), ["a:5432"]);
        for none in ["sqlite:/tmp/x.db", "memory:", "dynamodb://eu-central-1/locks", "nonsense"] {
            assert!(servers(none).is_empty(), "{none}");
        }
    }
}
