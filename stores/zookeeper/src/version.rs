//! Which ZooKeeper this is. The protocol does not say; the word `srvr` does, which servers answer unless they are told not to.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use crate::tls::Tls;
use crate::word;

/// What a server says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    pub number: (u32, u32, u32),
    /// It is the only one, and has nobody to learn from.
    pub alone: bool,
}

impl Version {
    /// Whether it can forget what a majority has taken. A member that catches up takes over the new epoch before it has all that
    /// came before; interrupted there, it can be chosen to lead with what it has, and the others throw away the rest
    /// (ZOOKEEPER-4643, 4785). Seen with 3.8.0, in the storms of our own tests. 3.9.4 is the first one without this and
    /// what resembles it (ZOOKEEPER-4712, 4925).
    pub fn forgets(&self) -> bool {
        !self.alone && self.number < (3, 9, 4)
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (major, minor, patch) = self.number;
        write!(f, "{major}.{minor}.{patch}")
    }
}

/// Asks all servers, and takes the first good answer. `None`: nobody tells.
pub async fn ask(servers: &[String], tls: Option<&Tls>, timeout: Duration) -> Option<Version> {
    let asked = servers.iter().map(|server| tokio::time::timeout(timeout, word::say(server, tls, "srvr")));
    let mut answers: FuturesUnordered<_> = asked.collect();
    while let Some(answer) = answers.next().await {
        if let Ok(Ok(told)) = answer
            && let Some(version) = parse(&told)
        {
            return Some(version);
        }
    }
    None
}

fn parse(told: &str) -> Option<Version> {
    let field = |name| told.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let mut parts =
        field("Zookeeper version:")?.split(['.', '-', ',', ' ']).map_while(|part| part.parse().ok());
    let number = (parts.next()?, parts.next()?, parts.next().unwrap_or(0));
    Some(Version { number, alone: field("Mode:")? == "standalone" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_forget_are_known() {
        let told = |version: &str, mode: &str| {
            format!(
                "Zookeeper version: {version}, built on 2024-12-29 17:54 UTC\nLatency min/avg/max: 0/0.0/0\nMode: {mode}\n"
            )
        };
        for (version, mode, forgets) in [
            ("3.8.0-5a02a05eddb59aee6ac762f7ea82e92a68eb9c0f", "follower", true),
            ("3.8.0-${mvngit.commit.id}", "leader", true),
            ("3.8.0", "standalone", false),
            ("3.9.3-x", "observer", true),
            ("3.9.4-7246445ec281f3dbf53dc54e970c914f39713903", "leader", false),
            ("3.10.0-SNAPSHOT", "leader", false),
            ("4.0", "leader", false),
        ] {
            let version = parse(&told(version, mode)).unwrap();
            assert_eq!(version.forgets(), forgets, "{version:?}");
        }
        for strange in [
            "",
            "srvr is not executed because it is not in the whitelist.\n",
            "Zookeeper version: x\nMode: leader\n",
        ] {
            assert_eq!(parse(strange), None, "{strange:?}");
        }
        assert_eq!(parse("This ZooKeeper instance is not currently serving requests\n"), None);
    }
}
