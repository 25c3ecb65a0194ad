//! The connection to the ensemble: connect, reconnect, and the ensemble's clock. All locks of a process use one
//! session. The client library reconnects to another server when one does not reply, and keeps the session. A session
//! that has ended is replaced, and nothing that it owned counts any more.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockkeeper_core::{BootInstant, IgnorePoison, Secret};
use lockkeeper_host::Clock;
use lockkeeper_store_kit::SingleFlight;
use zookeeper_client::{self as zk, Acls, Client};

use crate::config::Options;
use crate::diagnose;
use crate::error::Failure;
use crate::session::Session;
use crate::statements;
use crate::tls::ZooKeeperTls;

pub struct Connection {
    servers: Vec<String>,
    tls: Option<ZooKeeperTls>,
    login: Option<(String, Secret)>,
    timeout: Duration,
    session: Duration,
    clock: Arc<dyn Clock>,
    current: SingleFlight<Arc<Session>, Failure>,
    known_ensemble_time: Mutex<Option<(u64, BootInstant)>>,
}

impl Connection {
    pub fn new(options: &Options) -> Self {
        Connection {
            servers: options.servers.clone(),
            tls: options.tls.clone(),
            login: options.login.clone(),
            timeout: options.timeout,
            session: options.session,
            clock: options.clock.clone(),
            current: SingleFlight::default(),
            known_ensemble_time: Mutex::default(),
        }
    }

    pub fn acls(&self) -> Acls<'static> {
        statements::acls(self.login.is_some())
    }

    /// The current session with a live connection, or a new one.
    pub async fn session(&self) -> Result<Arc<Session>, Failure> {
        let is_alive = |session: &Arc<Session>| !session.is_over();
        let session = self.current.get(is_alive, || Box::pin(self.connect())).await?;
        session.wait_connected(self.timeout).await?;
        session.probe_after_silence().await?;
        Ok(session)
    }

    async fn connect(&self) -> Result<Arc<Session>, Failure> {
        let mut connector = Client::connector()
            .with_session_timeout(self.session)
            .with_connection_timeout(self.timeout)
            .with_server_version(3, 5, 0)
            // The session is not closed with the store: that would free locks whose holders still have a lease.
            .with_detached()
            .with_fail_eagerly();
        if let Some((user, password)) = &self.login {
            connector = connector.with_auth("digest", format!("{user}:{}", password.expose()).as_bytes());
        }
        let limit = self.timeout * u32::try_from(self.servers.len()).unwrap_or(u32::MAX);
        let client = match tokio::time::timeout(limit, self.connect_with(connector)).await {
            Ok(client) => client?,
            Err(_) => {
                let servers = self.servers.join(",");
                return Err(Failure::NotSent(format!(
                    "no ZooKeeper that serves at {servers} within {limit:?}"
                )));
            }
        };
        let session = Session::new(client, self.timeout, self.clock.clone(), self.login.is_some());
        tracing::debug!(id = session.id, "opened a session with ZooKeeper");
        Ok(Arc::new(session))
    }

    async fn connect_with(&self, connector: zk::Connector) -> Result<Client, Failure> {
        let servers = self.servers.join(",");
        let connected = match &self.tls {
            Some(tls) => tls.connect(connector, &servers).await,
            None => connector.connect(&servers).await,
        };
        match connected {
            Ok(client) => Ok(client),
            Err(error @ (zk::Error::AuthFailed | zk::Error::BadArguments(_))) => Err(Failure::of(error)),
            Err(error) => Err(diagnose::diagnose(&self.servers, self.tls.as_ref(), &error).await),
        }
    }

    /// A lower bound of the ensemble's clock now, in milliseconds. `None`: no write has returned a time yet.
    pub fn known_ensemble_time(&self) -> Option<u64> {
        let known_ensemble_time = *self.known_ensemble_time.lock().ignore_poison();
        known_ensemble_time.map(|(then, at)| then + self.clock.now().since(at).as_millis() as u64)
    }

    /// Records the time of a write by the ensemble's clock, whose reply has just come.
    pub fn observe_time(&self, time: i64) {
        let (now, time) = (self.clock.now(), time.unsigned_abs());
        let later = self.known_ensemble_time().is_none_or(|known| time > known);
        if later {
            *self.known_ensemble_time.lock().ignore_poison() = Some((time, now));
        }
    }
}
