//! The checks of the server when the store is opened, and the guarantees that follow from its settings.

use lockkeeper_core::{Error, Guarantee, LimitSupport, Profile, Result, WaitOrder};
use tokio::sync::Notify;

use crate::config::Options;
use crate::connection::Connection;
use crate::listener::NotificationListener;
use crate::poll::POLL_WITHOUT_NOTIFY;
use crate::schema::explain;
use crate::session::first;
use crate::statements::{FENCE_AND_SWEEP_OVERDUE, PgStatement};

/// The settings that matter, and how many standbys there are. Not every WAL sender serves a standby: a backup has its own state, an archiver
/// (`pg_receivewal`) replays nothing, and logical replication has a logical slot. A role that may not read these columns counts all of them.
static SETTINGS: PgStatement = PgStatement {
    text: "SELECT current_setting('server_version_num')::int, current_setting('default_transaction_isolation'), current_setting('synchronous_commit'), \
           current_setting('fsync'), current_setting('synchronous_standby_names'), \
           (SELECT count(*) FROM pg_stat_replication r WHERE NOT coalesce(state = 'backup'::text OR reply_time IS NOT NULL AND replay_lsn IS NULL, false) \
           AND NOT EXISTS (SELECT FROM pg_replication_slots s WHERE s.active_pid = r.pid AND s.slot_type = 'logical'::text))",
    types: &[],
};

/// The settings of the server that matter.
struct ServerSettings {
    version: i32,
    isolation: String,
    synchronous_commit: String,
    fsync: String,
    synchronous_standbys: String,
    standbys: i64,
}

async fn read_settings(connection: &Connection) -> Result<ServerSettings> {
    let rows = connection.rows(&SETTINGS, &[]).await?;
    Ok(ServerSettings {
        version: first(&rows, 0)?,
        isolation: first(&rows, 1)?,
        synchronous_commit: first(&rows, 2)?,
        fsync: first(&rows, 3)?,
        synchronous_standbys: first(&rows, 4)?,
        standbys: first(&rows, 5)?,
    })
}

/// Checks the server, refuses one that cannot keep locks, and returns the profile. Notifies `sweep_overdue` if no process has swept for long.
pub(crate) async fn check(
    connection: &Connection,
    listener: &NotificationListener,
    options: &Options,
    sweep_overdue: &Notify,
) -> Result<Profile> {
    let found = read_settings(connection).await?;
    check_settings(&found, options)?;
    // The first fence: this reports missing privileges.
    let fence = connection.rows(&FENCE_AND_SWEEP_OVERDUE, &[]).await;
    let fence = fence.map_err(|failure| Error::from(explain(failure, options)))?;
    if first::<Option<bool>>(&fence, 1)? == Some(true) {
        sweep_overdue.notify_one();
    }
    let (mut risks, mut notes) = (Vec::new(), Vec::new());
    if listener.probe(connection, options.timeout).await? {
        connection.prepare().await?;
    } else {
        notes.push(format!(
            "notifications do not arrive: a pooler such as PgBouncer in front of the database pools transactions. \
             Waiters poll every {POLL_WITHOUT_NOTIFY:?} or so, and watching is not possible"
        ));
    }
    let synced = found.fsync == "on" && found.synchronous_commit != "off";
    if found.fsync != "on" {
        risks.push("fsync is off: a crash of the server loses grants, or everything".to_owned());
    } else if !synced {
        risks.push("synchronous_commit is off: a crash of the server loses the last grants".to_owned());
    }
    let waits = matches!(found.synchronous_commit.as_str(), "on" | "remote_apply" | "remote_write");
    let lossy = found.standbys > 0 && (found.synchronous_standbys.is_empty() || !waits);
    if lossy {
        risks.push(
            "a standby that takes over may have missed the last grants: set synchronous_standby_names".into(),
        );
    }
    notes.push(
        "leases follow the database's wall clock: set forward, they end early. The fence is what protects you".into(),
    );
    notes.push("deadlocks between waiting owners are not detected: give requests a wait time".into());
    risks.append(&mut notes);
    let guarantee = if synced && !lossy { Guarantee::Kept } else { Guarantee::Likely };
    Ok(Profile {
        store: "postgres".into(),
        exclusion: Guarantee::Likely,
        fence: guarantee,
        durable: if found.fsync == "on" { guarantee } else { Guarantee::No },
        waiting: WaitOrder::Queue,
        wake: options.poll + options.claim,
        shared: true,
        permits: true,
        multi_name: true,
        reentry: true,
        deadlocks: false,
        lock_delay: true,
        min_hold: true,
        watch: listener.works(),
        revoke: true,
        records: true,
        limits: LimitSupport::Native,
        notes: risks,
    })
}

fn check_settings(found: &ServerSettings, options: &Options) -> Result<()> {
    let server = &options.server;
    if found.version < 120_000 {
        let version = found.version / 10_000;
        return Err(Error::Unsupported(format!(
            "{server} is PostgreSQL {version}: version 12 or newer is needed"
        )));
    }
    if found.isolation != "read committed" {
        return Err(Error::invalid(format!(
            "default_transaction_isolation is {:?}, and a statement must see who holds a lock now: ALTER ROLE \"{}\" SET \
             default_transaction_isolation = 'read committed', or use another role for locks",
            found.isolation, options.user
        )));
    }
    Ok(())
}
