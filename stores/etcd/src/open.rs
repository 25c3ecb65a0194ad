//! What the servers say about themselves, and what that means for the promises of the store.

use lockkeeper_core::{Error, Profile, Promise, Result, Waiting};

use crate::proto::{StatusRequest, StatusResponse};
use crate::store::Shared;

/// Looks at the member we talk to, refuses what cannot work, and writes down what is promised.
pub(crate) async fn profile(shared: &Shared) -> Result<Profile> {
    let status: StatusResponse =
        shared.link.call("/etcdserverpb.Maintenance/Status", &StatusRequest {}).await?;
    let version = parse(&status.version);
    if version < (3, 4, 0) {
        return Err(Error::Unsupported(format!(
            "this is etcd {}: version 3.4 or later is needed",
            status.version
        )));
    }
    // Also tells whether we may read and write here.
    shared.refresh_base().await?;
    let mut notes = Vec::new();
    let revokes = revokes_live_leases(version);
    if revokes {
        let note = format!(
            "etcd {} can end the leases of live holders when its disk is slow (etcd issue 15247): use 3.4.31, 3.5.13 or \
             later. Until then the fence is what protects you",
            status.version
        );
        tracing::warn!("{note}");
        notes.push(note);
    }
    notes.push(
        "a holder that is paused past its ttl may still write: only a resource that checks the fence refuses that"
            .into(),
    );
    notes.push(
        "leases are whole seconds, and a dead process keeps its locks for an eighth of the ttl longer".into(),
    );
    notes.push(
        "a new leader of etcd gives every lease its whole time again: each change of leader keeps the locks of a dead process for that \
         much longer"
            .into(),
    );
    notes.push("circles of waiting owners are not found: let asks end by a wait time".into());
    Ok(Profile {
        store: "etcd".into(),
        exclusion: if revokes { Promise::Likely } else { Promise::Kept },
        fence: Promise::Kept,
        durable: Promise::Kept,
        waiting: Waiting::Line,
        wake: shared.options.poll + shared.options.claim,
        shared: true,
        permits: true,
        several: true,
        reentry: true,
        deadlocks: false,
        lock_delay: true,
        min_hold: true,
        watch: true,
        revoke: true,
        records: true,
        notes,
    })
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
    fn versions_that_revoke_live_leases_are_known() {
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
