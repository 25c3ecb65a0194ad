//! The profile: what the store checks when it is opened, and the guarantees that follow.

use lockkeeper_core::faults::Deployment;
use lockkeeper_core::{Error, Finding, LimitSupport, Profile, Promise, Result, WaitOrder};
use zookeeper_client::{self as zk, CreateMode};

use crate::client::ZooKeeperClient;
use crate::codec;
use crate::config::Options;
use crate::error::Failure;
use crate::fence_base::FenceBase;
use crate::server_version::{self, ServerVersion};
use crate::session::Session;

/// Connects, refuses servers and paths that cannot work, and returns the guarantees.
pub(crate) async fn check(options: &Options, client: &ZooKeeperClient, base: &FenceBase) -> Result<Profile> {
    let session = client.connection.session().await?;
    let root = client.keys.root();
    let exists = session.call(session.client.check_stat(root)).await?.is_some();
    if !exists {
        if !options.create {
            return Err(Error::Invalid(format!(
                "{root} does not exist: create it first (zkCli.sh create {root}), correct the address, or add ?create=yes"
            )));
        }
        client.create_root(&session).await?;
    }
    check_format(client, &session).await?;
    // Also finds out whether the user may read and write here.
    base.refresh(&session, false).await?;
    match client.ensemble_time(&session).await {
        Err(Failure::Rejected(_, zk::Error::Unimplemented)) => {
            return Err(Error::Unsupported("this ZooKeeper is too old: 3.5 or later is needed".into()));
        }
        time => _ = time?,
    }
    let granted = session.client.session_timeout();
    let version = server_version::query(&options.servers, options.tls.as_ref(), options.timeout).await;
    let warning = durability_warning(version.as_ref());
    if let Some(finding) = &warning {
        // The same at every call: a program may print it once a day.
        tracing::warn!(daily = true, servers = ?options.servers, "{finding}");
    }
    // A new epoch has higher zxids, also if the last one lost writes: fences grow in both columns.
    let deployment = if warning.is_some() { Deployment::ZooKeeperOld } else { Deployment::ZooKeeper };
    let findings = findings(options, &session, warning);
    Ok(Profile {
        waiting: WaitOrder::Queue,
        // The servers round the end of a session up to their next tick, and a session has at least two ticks.
        wake: options.poll + granted * 3 / 2,
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
        ..Profile::deployed("zk", vec![deployment])
    })
}

fn findings(options: &Options, session: &Session, warning: Option<Finding>) -> Vec<Finding> {
    let (requested, granted) = (options.session, session.client.session_timeout());
    let mut findings = Vec::from_iter(warning);
    if options.login.is_none() {
        let text = "without a user every client may read and change the locks: the nodes are open to all";
        findings.push(Finding::hint(Promise::Exclusion, text));
    }
    if granted < requested {
        let text = format!(
            "a session timeout of {requested:?} was requested, the servers allow {granted:?} (maxSessionTimeout)"
        );
        findings.push(Finding::hint(Promise::Availability, text));
    }
    findings.extend([
        Finding::hint(
            Promise::Exclusion,
            "a holder that is paused past its ttl may still write: only a resource that checks the fence refuses that",
        ),
        Finding::hint(
            Promise::Waiting,
            format!(
                "the session timeout is {granted:?}: a dead process keeps its locks for that long. A ttl of more than {:?} is kept by a hold-back node that Curator does not know",
                session.trusted_for()
            ),
        ),
        Finding::hint(
            Promise::Waiting,
            "every restart of a single server, and every new leader, counts all sessions anew: the locks of a dead process stay \
             for a whole session after the last of them",
        ),
        Finding::hint(
            Promise::Exclusion,
            "Lockkeeper's clients respect lock-delay and min-hold; Curator does not know of them",
        ),
        Finding::hint(
            Promise::Waiting,
            "deadlocks between owners are not detected: give requests a wait time",
        ),
    ]);
    findings
}

/// Refuses a path whose nodes have another format. The first store on a path writes the version of its own.
async fn check_format(client: &ZooKeeperClient, session: &Session) -> Result<()> {
    let path = client.keys.format();
    let mode = CreateMode::Persistent.with_acls(client.connection.acls());
    loop {
        if let Some((data, _)) = Failure::if_exists(session.get(&path).await)? {
            if data == codec::FORMAT.as_bytes() {
                return Ok(());
            }
            return Err(Error::Unsupported(format!(
                "the nodes below {} have format {}, and this program reads format {}: use another path, or a program of that version",
                client.keys.root(),
                String::from_utf8_lossy(&data),
                codec::FORMAT
            )));
        }
        match session.call(session.client.create(&path, codec::FORMAT.as_bytes(), &mode)).await {
            Err(failure) if failure.is(&zk::Error::NodeExists) => {}
            Err(failure) if failure.is(&zk::Error::NoNode) => client.create_root(session).await?,
            written => return Ok(written.map(drop)?),
        }
    }
}

/// Why the servers may lose a grant, if they may.
fn durability_warning(version: Option<&ServerVersion>) -> Option<Finding> {
    match version {
        Some(version) if version.can_lose_writes() => {
            let text = format!(
                "servers of ZooKeeper {version} can lose writes that a majority has accepted when leaders change in quick \
                 succession (ZOOKEEPER-4643, 4785); the fence is what protects you"
            );
            let lossy = Finding::risk(Promise::Durability, text);
            Some(lossy.change("ZooKeeper", version.to_string(), "3.9.4 or later"))
        }
        Some(_) => None,
        None => {
            let text = "no server returned its version, and servers before 3.9.4 can lose writes that a majority has accepted \
                        (ZOOKEEPER-4785)";
            let unknown = Finding::risk(Promise::Durability, text);
            Some(unknown.set("4lw.commands.whitelist of each server", "srvr, mntr"))
        }
    }
}
