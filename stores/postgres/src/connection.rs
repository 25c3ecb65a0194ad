//! One connection to the server, shared by all tasks of the store, that reconnects by itself.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use lockkeeper_core::{Error, IgnorePoison};
use tokio::runtime::Handle;
use tokio::task::JoinError;
use tokio_postgres::Row;

use crate::config::Options;
use crate::driver::{ListenCallback, connect};
use crate::error::Failure;
use crate::schema;
use crate::session::{Param, PgSession};
use crate::statements::{BEGIN_EPOCH, PgStatement};

/// A connection. Requests of many tasks are pipelined on it; when it breaks, the next request makes a new one. The client never sends
/// a request twice that the server may have carried out.
pub(crate) struct Connection {
    options: Arc<Options>,
    runtime: Handle,
    role: Role,
    /// How often a connection was made. The server refuses requests of older connections by it.
    epoch: AtomicI32,
    /// Whether statements may be prepared: not where a pooler gives each of them to another server process.
    preparable: AtomicBool,
    /// Whether a table or function of the store was found missing.
    repair: AtomicBool,
    state: Mutex<ConnectionState>,
    /// Held by the task that makes a new connection; others wait for it.
    dialing: tokio::sync::Mutex<()>,
}

/// The purpose of a connection.
pub(crate) enum Role {
    /// Requests, for the process with this id.
    Query(String),
    /// Notifications.
    Listen(ListenCallback),
}

#[derive(Default)]
struct ConnectionState {
    session: Option<PgSession>,
    /// When the last attempt failed, and how.
    failed: Option<(Instant, Failure)>,
}

/// How long other tasks get the last failure to connect before the next attempt.
const RECONNECT_DELAY: Duration = Duration::from_millis(100);

impl Connection {
    /// A connection that is made when it is first used, on `runtime`.
    pub fn new(options: Arc<Options>, runtime: Handle, role: Role) -> Self {
        Connection {
            options,
            runtime,
            role,
            epoch: AtomicI32::new(0),
            preparable: AtomicBool::new(false),
            repair: AtomicBool::new(false),
            state: Mutex::default(),
            dialing: tokio::sync::Mutex::default(),
        }
    }

    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    fn state(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().ignore_poison()
    }

    /// Runs one statement and returns its rows.
    pub async fn rows(&self, sql: &PgStatement, params: &[Param<'_>]) -> Result<Vec<Row>, Failure> {
        let mut repaired = false;
        loop {
            match self.session().await?.rows(sql, params).await {
                // Not sent: the next round makes a new connection.
                Err(Failure::ConnectionEnded) => {}
                // The schema was dropped, and the statement did nothing; a new connection creates the schema again.
                Err(failure) if failure.is_missing() && !std::mem::replace(&mut repaired, true) => {
                    self.repair_schema()
                }
                reply => return reply,
            }
        }
    }

    /// Drops the connection; the next one creates what is missing in the schema.
    pub fn repair_schema(&self) {
        self.repair.store(true, Ordering::Relaxed);
        self.close();
    }

    /// Drops the connection: the next request makes a new one.
    pub fn close(&self) {
        self.state().session = None;
    }

    /// Prepares the frequent statements, on this connection and on those that follow it.
    pub async fn prepare(&self) -> Result<(), Failure> {
        self.preparable.store(true, Ordering::Relaxed);
        self.session().await?.prepare().await
    }

    /// The open connection, made if there is none.
    pub async fn session(&self) -> Result<PgSession, Failure> {
        if let Some(session) = self.open_session() {
            return Ok(session);
        }
        let _dialing = self.dialing.lock().await;
        // Another task may have connected meanwhile, or has just failed to.
        if let Some(session) = self.open_session() {
            return Ok(session);
        }
        if let Some((when, failure)) = &self.state().failed
            && when.elapsed() < RECONNECT_DELAY
        {
            return Err(failure.clone());
        }
        let made = self.dial().await;
        let mut state = self.state();
        match made {
            Ok(session) => {
                *state = ConnectionState { session: Some(session.clone()), failed: None };
                Ok(session)
            }
            Err(failure) => {
                state.failed = Some((Instant::now(), failure.clone()));
                Err(failure)
            }
        }
    }

    /// The open connection, if there is one on which statements may be pipelined.
    pub fn prepared_session(&self) -> Option<PgSession> {
        self.open_session().filter(PgSession::is_prepared)
    }

    fn open_session(&self) -> Option<PgSession> {
        let mut state = self.state();
        if state.session.as_ref().is_some_and(PgSession::is_closed) {
            state.session = None;
        }
        state.session.clone()
    }

    async fn dial(&self) -> Result<PgSession, Failure> {
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        let callback = match &self.role {
            Role::Listen(callback) => Some(callback.clone()),
            Role::Query(_) => None,
        };
        let made = self.runtime.spawn(connect(self.options.clone(), callback, epoch)).await;
        let session = made.unwrap_or_else(|error| Err(task_failure(&error)))?;
        if let Role::Query(client) = &self.role {
            schema::prepare_schema(&session, &self.options, self.repair.load(Ordering::Relaxed)).await?;
            self.repair.store(false, Ordering::Relaxed);
            if epoch > 1 {
                session.rows(&BEGIN_EPOCH, &[client, &epoch]).await?;
            }
            if self.preparable.load(Ordering::Relaxed) {
                session.prepare().await?;
            }
        }
        Ok(session)
    }
}

/// Why the runtime did not run the task that connects.
fn task_failure(error: &JoinError) -> Failure {
    match error.is_panic() {
        true => Failure::Final(Error::invalid(
            "the runtime that was given for the connections has no I/O or no timers: build it with enable_all(), or leave \
             runtime=caller out",
        )),
        false => Failure::NotSent("the store is closed".into()),
    }
}
