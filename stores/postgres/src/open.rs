//! What a server says about itself, and what that means for the promises of the store.

use std::time::{Duration, Instant};

use lockkeeper_core::{Error, Profile, Promise, Result, Waiting};

use crate::fault::Failure;
use crate::install::explain;
use crate::line::DEAF;
use crate::link::first;
use crate::script::{FENCE, NOTIFY, Sql};
use crate::store::Shared;

/// The settings that matter, and how many standbys there are. Not every WAL sender serves one: a backup says so, and an archiver
/// (`pg_receivewal`) replays nothing. A role that may not see what they say counts all of them.
static SETTINGS: Sql = Sql {
    text: "SELECT current_setting('server_version_num')::int, current_setting('default_transaction_isolation'), current_setting('synchronous_commit'), \
           current_setting('fsync'), current_setting('synchronous_standby_names'), \
           (SELECT count(*) FROM pg_stat_replication WHERE NOT coalesce(state = 'backup'::text OR reply_time IS NOT NULL AND replay_lsn IS NULL, false))",
    types: &[],
};

/// What matters of the server.
struct Found {
    version: i32,
    isolation: String,
    synchronous_commit: String,
    fsync: String,
    synchronous_standbys: String,
    standbys: i64,
}

async fn look(shared: &Shared) -> Result<Found> {
    let rows = shared.link.rows(&SETTINGS, &[]).await?;
    Ok(Found {
        version: first(&rows, 0)?,
        isolation: first(&rows, 1)?,
        synchronous_commit: first(&rows, 2)?,
        fsync: first(&rows, 3)?,
        synchronous_standbys: first(&rows, 4)?,
        standbys: first(&rows, 5)?,
    })
}

/// Looks at the server, refuses what cannot work, and writes down what is promised.
pub(crate) async fn profile(shared: &Shared) -> Result<Profile> {
    let found = look(shared).await?;
    check(&found, shared)?;
    // The first fence: if the rights are not enough, this says so.
    shared.link.rows(&FENCE, &[]).await.map_err(|failure| Error::from(explain(failure, &shared.options)))?;
    let (mut grave, mut notes) = (Vec::new(), Vec::new());
    if direct(shared).await? {
        shared.set_hears();
        shared.link.prepare().await?;
    } else {
        notes.push(format!(
            "messages do not come through: something like PgBouncer stands before the database and pools transactions. \
             Those who wait look every {DEAF:?} or so, and nobody can watch"
        ));
    }
    let synced = found.fsync == "on" && found.synchronous_commit != "off";
    if found.fsync != "on" {
        grave.push("fsync is off: a crash of the server loses grants, or everything".to_owned());
    } else if !synced {
        grave.push("synchronous_commit is off: a crash of the server loses the last grants".to_owned());
    }
    let waits = matches!(found.synchronous_commit.as_str(), "on" | "remote_apply" | "remote_write");
    let lossy = found.standbys > 0 && (found.synchronous_standbys.is_empty() || !waits);
    if lossy {
        grave.push(
            "a standby that takes over may have missed the last grants: set synchronous_standby_names".into(),
        );
    }
    notes.push(
        "leases follow the database's wall clock: set forward, they end early. The fence is what protects you".into(),
    );
    notes.push("circles of waiting owners are not found: let asks end by a wait time".into());
    grave.append(&mut notes);
    let promise = if synced && !lossy { Promise::Kept } else { Promise::Likely };
    Ok(Profile {
        store: "postgres".into(),
        exclusion: Promise::Likely,
        fence: promise,
        durable: if found.fsync == "on" { promise } else { Promise::No },
        waiting: Waiting::Line,
        wake: shared.options.poll + shared.options.claim,
        shared: true,
        permits: true,
        several: true,
        reentry: true,
        deadlocks: false,
        lock_delay: true,
        min_hold: true,
        watch: shared.hears(),
        revoke: true,
        records: true,
        notes: grave,
    })
}

fn check(found: &Found, shared: &Shared) -> Result<()> {
    let door = &shared.options.door;
    if found.version < 120_000 {
        let version = found.version / 10_000;
        return Err(Error::Unsupported(format!(
            "{door} is PostgreSQL {version}: version 12 or newer is needed"
        )));
    }
    if found.isolation != "read committed" {
        return Err(Error::invalid(format!(
            "default_transaction_isolation is {:?}, and a step must see who holds a lock now: ALTER ROLE \"{}\" SET \
             default_transaction_isolation = 'read committed', or use another role for locks",
            found.isolation, shared.options.user
        )));
    }
    Ok(())
}

/// Whether the server process at the other end is ours for as long as the connection lasts: then a message that we send to
/// ourselves comes. Nothing else tells: a pooler may even have the same port as we.
async fn direct(shared: &Shared) -> Result<bool, Failure> {
    let channel = shared.try_channel();
    let began = Instant::now();
    if !shared.listen(&channel).await {
        return Ok(false);
    }
    shared.link.rows(&NOTIFY, &[&channel, &""]).await?;
    // Behind a pooler nothing comes, and everybody who opens waits for that. Where all takes long, a message may too.
    let patience = Duration::from_secs(1).max(began.elapsed() * 10).min(shared.options.timeout);
    let over = shared.link.reactor().spawn(async move { tokio::time::sleep(patience).await });
    let heard = tokio::select! {
        () = shared.tried.notified() => true,
        _ = over => false,
    };
    // Whoever waits or watches makes a new one. This one may be anybody's.
    shared.ear.hang_up();
    Ok(heard)
}
