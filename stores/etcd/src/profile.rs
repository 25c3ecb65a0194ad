//! The checks when the store is opened, and the guarantees that follow.

use lockkeeper_core::faults::Deployment;
use lockkeeper_core::{Error, Finding, LimitSupport, Profile, Promise, Result, WaitOrder};

use crate::config::Options;
use crate::connection::Connection;
use crate::fence_base::FenceBase;
use crate::proto::{StatusRequest, StatusResponse};

/// Reads the member's version, rejects a server that is too old, and declares the guarantees.
pub(crate) async fn profile(options: &Options, connection: &Connection, base: &FenceBase) -> Result<Profile> {
    let status: StatusResponse =
        connection.call("/etcdserverpb.Maintenance/Status", &StatusRequest {}).await?;
    let version = parse(&status.version);
    if version < (3, 4, 0) {
        return Err(Error::Unsupported(format!(
            "this is etcd {}: version 3.4 or later is needed",
            status.version
        )));
    }
    // Also shows whether the user may read and write the prefix.
    base.refresh().await?;
    let revokes = revokes_live_leases(version);
    let findings = findings(revokes.then_some(&status.version));
    if revokes {
        // The same at every call: a program may print it once a day.
        tracing::warn!(daily = true, servers = ?options.servers, "{}", findings[0]);
    }
    let deployment = if revokes { Deployment::EtcdOld } else { Deployment::Etcd };
    Ok(Profile {
        waiting: WaitOrder::Queue,
        wake: options.poll + options.claim,
        shared: true,
        permits: true,
        multi_name: true,
        reentry: true,
        deadlocks: false,
        lock_delay: true,
        min_hold: true,
        watch: true,
        revoke: true,
        records: true,
        limits: LimitSupport::CompareAndSwap,
        findings,
        ..Profile::deployed("etcd", vec![deployment])
    })
}

/// `revokes`: the version of a server that can end the leases of live holders.
fn findings(revokes: Option<&String>) -> Vec<Finding> {
    let known_bug = revokes.map(|version| {
        let text = format!(
            "etcd {version} can end the leases of live holders when its disk is slow (etcd issue 15247); only the fence \
             protects the resource"
        );
        Finding::risk(Promise::Exclusion, text).change("etcd", version.as_str(), "3.4.31, 3.5.13 or later")
    });
    let mut findings: Vec<Finding> = known_bug.into_iter().collect();
    findings.extend([
        Finding::hint(
            Promise::Exclusion,
            "a holder that is paused past its ttl may still write: only a resource that checks the fence rejects that",
        ),
        Finding::hint(
            Promise::Waiting,
            "leases are whole seconds, and a dead process keeps its locks for an eighth of the ttl longer",
        ),
        Finding::hint(
            Promise::Waiting,
            "a new etcd leader restarts every lease with its full ttl: each change of leader keeps the locks of a dead process \
             for that much longer",
        ),
        Finding::hint(
            Promise::Waiting,
            "the store does not find cycles of waiting owners: give every request a wait time",
        ),
    ]);
    findings
}

fn parse(version: &str) -> (u32, u32, u32) {
    let mut parts = version.split(['.', '-', '+']).map(|part| part.parse().unwrap_or(0));
    let mut part = || parts.next().unwrap_or(0);
    (part(), part(), part())
}

fn revokes_live_leases(version: (u32, u32, u32)) -> bool {
    version < (3, 4, 31) || ((3, 5, 0)..(3, 5, 13)).contains(&version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn affected_versions_are_recognized() {
        for (version, bad) in [
            ("3.4.23", true),
            ("3.4.30", true),
            ("3.4.31", false),
            ("3.5.0-rc.1", true),
            ("3.5.12", true),
            ("3.5.13", false),
            ("3.6.1", false),
        ] {
            assert_eq!(revokes_live_leases(parse(version)), bad, "{version}");
        }
    }
}
