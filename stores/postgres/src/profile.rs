//! The checks of the server when the store is opened, and the guarantees that follow from its settings.

use lockkeeper_core::faults::Deployment;
use lockkeeper_core::{Error, Finding, LimitSupport, Profile, Promise, Result, WaitOrder};
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

impl ServerSettings {
    /// Whether a standby can take over that has missed grants.
    fn has_lossy_standby(&self) -> bool {
        let waits = matches!(self.synchronous_commit.as_str(), "on" | "remote_apply" | "remote_write");
        self.standbys > 0 && (self.synchronous_standbys.is_empty() || !waits)
    }
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
    let notifies = listener.probe(connection, options.timeout).await?;
    if notifies {
        connection.prepare().await?;
    }
    let deployments = [
        (true, Deployment::Postgres),
        (found.synchronous_commit == "off", Deployment::PostgresUnsynced),
        (found.fsync != "on", Deployment::PostgresNoFsync),
        (found.has_lossy_standby(), Deployment::PostgresStandby),
    ];
    let deployments = deployments.into_iter().filter(|(so, _)| *so).map(|(_, deployment)| deployment);
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
        watch: listener.works(),
        revoke: true,
        records: true,
        limits: LimitSupport::Native,
        findings: findings(&found, options, notifies),
        ..Profile::deployed("postgres", deployments.collect())
    })
}

fn findings(found: &ServerSettings, options: &Options, notifies: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    if found.fsync != "on" {
        let text = "fsync is off: a crash of the server loses grants, or everything";
        findings.push(
            Finding::risk(Promise::Durability, text)
                .change("fsync", found.fsync.as_str(), "on")
                .how("ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf()"),
        );
    }
    if found.synchronous_commit == "off" {
        let text = "synchronous_commit is off: a crash of the server loses the last grants";
        findings.push(
            Finding::risk(Promise::Durability, text)
                .change("synchronous_commit", found.synchronous_commit.as_str(), "on")
                .how(format!("ALTER ROLE \"{}\" SET synchronous_commit = on", options.user)),
        );
    }
    if found.has_lossy_standby() {
        let text = "a standby that takes over may have missed the last grants";
        let mut lossy = Finding::risk(Promise::Durability, text);
        if found.synchronous_standbys.is_empty() {
            lossy = lossy
                .change("synchronous_standby_names", "''", "the names of the standbys")
                .how("ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'; SELECT pg_reload_conf()");
        }
        // Off has a finding of its own.
        if found.synchronous_commit == "local" {
            lossy = lossy.change("synchronous_commit", "local", "on");
        }
        findings.push(lossy);
    }
    if !notifies {
        let text = format!(
            "notifications do not arrive: a pooler such as PgBouncer in front of the database pools transactions. \
             Waiters poll every {POLL_WITHOUT_NOTIFY:?} or so, and watching is not possible"
        );
        findings.push(Finding::risk(Promise::Waiting, text).set(
            "the URL of the store",
            "the address of the database itself, or of a pool with pool_mode = session",
        ));
    }
    findings.push(Finding::hint(
        Promise::Exclusion,
        "leases follow the database's wall clock: set forward, they end early. The fence is what protects you",
    ));
    findings.push(Finding::hint(
        Promise::Waiting,
        "deadlocks between waiting owners are not detected: give requests a wait time",
    ));
    findings
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
