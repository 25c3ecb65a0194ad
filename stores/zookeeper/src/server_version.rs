//! The version of the servers. The client protocol does not contain it; the four-letter word `srvr` returns it, unless
//! the servers' whitelist forbids that.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use crate::four_letter;
use crate::tls::ZooKeeperTls;

/// The version and the mode of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerVersion {
    pub number: (u32, u32, u32),
    /// It is a single server, which learns from no other.
    pub standalone: bool,
}

impl ServerVersion {
    /// Whether a server of this version can lose writes that a majority has accepted. A member that catches up accepts
    /// the new epoch before it has all earlier writes. If it is interrupted there, it can be elected with what it has,
    /// and the others discard the rest (ZOOKEEPER-4643, 4785). Our leader-fault tests saw this with 3.8.0. 3.9.4 is
    /// the first version without this bug and similar ones (ZOOKEEPER-4712, 4925).
    pub fn can_lose_writes(&self) -> bool {
        !self.standalone && self.number < (3, 9, 4)
    }
}

impl std::fmt::Display for ServerVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (major, minor, patch) = self.number;
        write!(f, "{major}.{minor}.{patch}")
    }
}

/// Asks all servers, and returns the first usable reply. `None`: no server returned its version.
pub async fn query(
    servers: &[String],
    tls: Option<&ZooKeeperTls>,
    timeout: Duration,
) -> Option<ServerVersion> {
    let queries =
        servers.iter().map(|server| tokio::time::timeout(timeout, four_letter::send(server, tls, "srvr")));
    let mut replies: FuturesUnordered<_> = queries.collect();
    while let Some(reply) = replies.next().await {
        if let Ok(Ok(reply)) = reply
            && let Some(version) = parse(&reply)
        {
            return Some(version);
        }
    }
    None
}

fn parse(reply: &str) -> Option<ServerVersion> {
    let field = |name| reply.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let mut parts =
        field("Zookeeper version:")?.split(['.', '-', ',', ' ']).map_while(|part| part.parse().ok());
    let number = (parts.next()?, parts.next()?, parts.next().unwrap_or(0));
    Some(ServerVersion { number, standalone: field("Mode:")? == "standalone" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_can_lose_writes_are_recognised() {
        let reply = |version: &str, mode: &str| {
            format!(
                "Zookeeper version: {version}, built on 2024-12-29 17:54 UTC\nLatency min/avg/max: 0/0.0/0\nMode: {mode}\n"
            )
        };
        for (version, mode, loses) in [
            ("3.8.0-5a02a05eddb59aee6ac762f7ea82e92a68eb9c0f", "follower", true),
            ("3.8.0-${mvngit.commit.id}", "leader", true),
            ("3.8.0", "standalone", false),
            ("3.9.3-x", "observer", true),
            ("3.9.4-7246445ec281f3dbf53dc54e970c914f39713903", "leader", false),
            ("3.10.0-SNAPSHOT", "leader", false),
            ("4.0", "leader", false),
        ] {
            let version = parse(&reply(version, mode)).unwrap();
            assert_eq!(version.can_lose_writes(), loses, "{version:?}");
        }
        for other in [
            "",
            "srvr is not executed because it is not in the whitelist.\n",
            "Zookeeper version: x\nMode: leader\n",
        ] {
            assert_eq!(parse(other), None, "{other:?}");
        }
        assert_eq!(parse("This ZooKeeper instance is not currently serving requests\n"), None);
    }
}
