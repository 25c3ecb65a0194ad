//! What the servers say about themselves, and what that means for the promises of the store.

use lockkeeper_core::{Error, Profile, Promise, Result, Waiting};
use zookeeper_client as zk;

use crate::fault::Failure;
use crate::store::Shared;
use crate::version::{self, Version};

/// Connects, refuses what cannot work, and writes down what is promised.
pub(crate) async fn profile(shared: &Shared) -> Result<Profile> {
    let session = shared.link.session().await?;
    let root = shared.layout.root();
    let there = session.hear(session.client.check_stat(root)).await?.is_some();
    if !there {
        if !shared.options.create {
            return Err(Error::Invalid(format!(
                "there is no {root} here: make it first (zkCli.sh create {root}), correct the address, or add ?create=yes"
            )));
        }
        shared.make_root(&session).await?;
    }
    // Also tells whether we may read and write here.
    shared.learn_base(&session, false).await?;
    match shared.ensemble_time(&session).await {
        Err(Failure::Refused(_, zk::Error::Unimplemented)) => {
            return Err(Error::Unsupported("this ZooKeeper is too old: 3.5 or later is needed".into()));
        }
        time => _ = time?,
    }
    let options = &shared.options;
    let (asked, given) = (options.session, session.client.session_timeout());
    let version = version::ask(&options.servers, options.tls.as_ref(), options.timeout).await;
    let forgets = doubts(version.as_ref());
    if let Some(note) = &forgets {
        tracing::warn!("{note}");
    }
    let kept = if forgets.is_some() { Promise::Likely } else { Promise::Kept };
    let mut notes = Vec::from_iter(forgets);
    notes.extend([
        "a holder that is paused past its ttl may still write: only a resource that checks the fence refuses that".to_owned(),
        format!(
            "the session lasts {given:?}: a dead process keeps its locks for that long. A ttl of more than {:?} is kept by a note that Curator does not know",
            session.lasts()
        ),
    ]);
    notes.push(
        "every restart of a single server, and every new leader, counts all sessions anew: the locks of a dead process stay for a whole \
         session after the last of them"
            .into(),
    );
    if given < asked {
        notes.push(format!(
            "a session of {asked:?} was asked for, the servers allow {given:?} (maxSessionTimeout)"
        ));
    }
    if shared.options.login.is_none() {
        notes.push(
            "without a user everybody may read and change the locks: ZooKeeper's nodes are open to all"
                .into(),
        );
    }
    notes.push(
        "lock-delay and min-hold are kept between Lockkeeper's clients: Curator does not know of them".into(),
    );
    notes.push("circles of waiting owners are not found: let asks end by a wait time".into());
    Ok(Profile {
        store: "zk".into(),
        exclusion: kept,
        // A new epoch has higher zxids, whatever was forgotten of the last one.
        fence: Promise::Kept,
        durable: kept,
        waiting: Waiting::Line,
        // The servers round the end of a session up to their next tick, and a session has two ticks at least.
        wake: shared.options.poll + given * 3 / 2,
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

/// Why a grant may be forgotten here, if it may be.
fn doubts(version: Option<&Version>) -> Option<String> {
    match version {
        Some(version) if version.forgets() => Some(format!(
            "members of ZooKeeper {version} can forget what a majority has taken when one leader follows another quickly \
             (ZOOKEEPER-4643, 4785): use 3.9.4 or later. Until then the fence is what protects you"
        )),
        Some(_) => None,
        None => Some(
            "nobody tells which ZooKeeper this is, and before 3.9.4 members can forget what a majority has taken \
             (ZOOKEEPER-4785): let the servers answer srvr (4lw.commands.whitelist)"
                .into(),
        ),
    }
}
