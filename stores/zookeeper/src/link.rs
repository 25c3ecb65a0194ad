//! The session with the ensemble: one at a time for all locks of the process. The client underneath finds another server
//! when one is silent, and keeps the session over that. One that has ended is replaced, and nothing of it counts any more.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockkeeper_core::{Moment, Secret};
use lockkeeper_host::Clock;
use zookeeper_client::{
    self as zk, Acls, Client, CreateMode, MultiWriteError, MultiWriteResult, SessionState, Stat,
};

use crate::config::Options;
use crate::fault::Failure;
use crate::gate::Gate;
use crate::refusal;
use crate::script::{self, Op};
use crate::tls::Tls;

pub struct Link {
    servers: Vec<String>,
    tls: Option<Tls>,
    login: Option<(String, Secret)>,
    timeout: Duration,
    session: Duration,
    clock: Arc<dyn Clock>,
    now: tokio::sync::Mutex<Option<Arc<Session>>>,
    /// How many times it was tried in vain to connect, and why the last of them failed.
    failed: Mutex<(u64, Option<Failure>)>,
    tide: Mutex<Option<(u64, Moment)>>,
}

/// A session, for as long as it lasts.
pub struct Session {
    pub client: Client,
    pub id: i64,
    pub gate: Gate,
    timeout: Duration,
    clock: Arc<dyn Clock>,
    login: bool,
    /// The last request was not answered in time.
    silent: AtomicBool,
    /// Bytes of the paths that are watched by those who wait.
    watched: AtomicUsize,
}

/// The most bytes of paths that are watched at a time. The client tells a new connection of all watches, and cannot do that in more than
/// one message of 128 KiB: it would never be connected again, and the session would end.
const WATCHED: usize = 100 << 10;

/// One path that is watched.
pub struct Watched<'a>(&'a Session, usize);

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.0.watched.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl Link {
    pub fn new(options: &Options) -> Self {
        Link {
            servers: options.servers.clone(),
            tls: options.tls.clone(),
            login: options.login.clone(),
            timeout: options.timeout,
            session: options.session,
            clock: options.clock.clone(),
            now: tokio::sync::Mutex::default(),
            failed: Mutex::default(),
            tide: Mutex::default(),
        }
    }

    pub fn acls(&self) -> Acls<'static> {
        script::acls(self.login.is_some())
    }

    /// The session, connected; or why not.
    pub async fn session(&self) -> Result<Arc<Session>, Failure> {
        let session = {
            let before = self.failed().0;
            let mut now = self.now.lock().await;
            match now.as_ref().filter(|session| !session.is_over()) {
                Some(session) => session.clone(),
                None => {
                    *now = None;
                    let fresh = Arc::new(self.connect_since(before).await?);
                    tracing::debug!(id = fresh.id, "a new session");
                    now.insert(fresh).clone()
                }
            }
        };
        session.connected(self.timeout).await?;
        session.answers().await?;
        Ok(session)
    }

    fn failed(&self) -> (u64, Option<Failure>) {
        self.failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// Connects, unless it was tried in vain while the caller waited for its turn: `before` counts the tries until it came. Those who wait
    /// together learn together that nobody is there, instead of each trying after the other.
    async fn connect_since(&self, before: u64) -> Result<Session, Failure> {
        if let (count, Some(failure)) = self.failed()
            && count != before
        {
            return Err(failure);
        }
        let connected = self.connect().await;
        if let Err(failure) = &connected {
            let mut failed = self.failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            *failed = (failed.0 + 1, Some(failure.clone()));
        }
        connected
    }

    async fn connect(&self) -> Result<Session, Failure> {
        let mut connector = Client::connector()
            .with_session_timeout(self.session)
            .with_connection_timeout(self.timeout)
            .with_server_version(3, 5, 0)
            // A session that was closed with the store would free what somebody may still believe to hold.
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
                return Err(Failure::Away(format!("no ZooKeeper that serves at {servers} within {limit:?}")));
            }
        };
        Ok(Session {
            id: client.session_id().0,
            gate: Gate::default(),
            client,
            timeout: self.timeout,
            clock: self.clock.clone(),
            login: self.login.is_some(),
            silent: AtomicBool::new(false),
            watched: AtomicUsize::new(0),
        })
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
            Err(error) => Err(refusal::ask(&self.servers, self.tls.as_ref(), &error).await),
        }
    }

    /// What the ensemble's clock shows now, at least, in milliseconds. `None`: we have never heard.
    pub fn tide(&self) -> Option<u64> {
        let tide = *self.tide.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        tide.map(|(then, at)| then + self.clock.now().since(at).as_millis() as u64)
    }

    /// A write happened at this time by the ensemble's clock, and we have just heard of it.
    pub fn heard(&self, time: i64) {
        let (now, time) = (self.clock.now(), time.unsigned_abs());
        let later = self.tide().is_none_or(|known| time > known);
        if later {
            *self.tide.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some((time, now));
        }
    }
}

/// What became of a transaction: when it was sent, its number, and one answer for each step.
pub struct Done {
    pub sent_at: Moment,
    pub answers: Vec<MultiWriteResult>,
}

impl Done {
    /// What the steps that created nodes made.
    pub fn created(&self) -> impl Iterator<Item = &str> {
        self.answers.iter().filter_map(|answer| match answer {
            MultiWriteResult::Create { path, .. } => Some(path.as_str()),
            _ => None,
        })
    }

    /// The state after the last step that set something. A step that created something says nothing: servers before 3.9
    /// leave that out (ZOOKEEPER-4026).
    pub fn stat(&self) -> Option<&Stat> {
        self.answers.iter().rev().find_map(|answer| match answer {
            MultiWriteResult::SetData { stat } => Some(stat),
            _ => None,
        })
    }
}

impl Session {
    pub fn is_over(&self) -> bool {
        self.client.state().is_terminated()
    }

    pub fn is_connected(&self) -> bool {
        self.client.state() == SessionState::SyncConnected
    }

    /// A guard may believe for this long after a write that a majority took. A server that follows tells the leader of us
    /// only now and then, and the leader ends the session by what it was told: so the whole timeout is too long.
    pub fn lasts(&self) -> Duration {
        self.client.session_timeout() * 3 / 5
    }

    /// Whether there is room for one more watch. Whoever has none looks now and then.
    pub fn room_to_watch(&self, path: &str) -> Option<Watched<'_>> {
        let one = Watched(self, path.len());
        let before = self.watched.fetch_add(path.len(), Ordering::Relaxed);
        (before + path.len() <= WATCHED).then_some(one)
    }

    /// Waits for the connection. Requests that are made without one stay in a queue that nobody can take them out of.
    async fn connected(&self, patience: Duration) -> Result<(), Failure> {
        let mut watcher = self.client.state_watcher();
        let wait = async {
            let mut state = self.client.state();
            loop {
                match state {
                    SessionState::SyncConnected => return Ok(()),
                    SessionState::AuthFailed => return Err(Failure::of(zk::Error::AuthFailed)),
                    state if state.is_terminated() => return Err(Failure::Ended),
                    _ => state = watcher.changed().await,
                }
            }
        };
        match tokio::time::timeout(patience, wait).await {
            // It was not sent, whatever ended.
            Ok(Err(Failure::Ended)) => Err(Failure::Away("the session with ZooKeeper has ended".into())),
            Ok(answer) => answer,
            Err(_) => Err(Failure::Away(format!("no connection to ZooKeeper within {patience:?}"))),
        }
    }

    /// One that breaks while the session is taken up again is called connected until there is another connection, and what is
    /// handed over meanwhile stays in the queue as well. So after a silence something is asked that does no harm.
    async fn answers(&self) -> Result<(), Failure> {
        if !self.silent.load(Ordering::Relaxed) {
            return Ok(());
        }
        let heard = self.within(self.client.check_stat("/")).await;
        heard
            .map(drop)
            .map_err(|_| Failure::Away(format!("ZooKeeper has not answered for {:?}", self.timeout)))
    }

    async fn within<T>(&self, answer: impl Future<Output = T>) -> Result<T, Failure> {
        let answer = tokio::time::timeout(self.timeout, answer).await;
        self.silent.store(answer.is_err(), Ordering::Relaxed);
        answer.map_err(|_| Failure::Unheard(format!("no answer within {:?}", self.timeout)))
    }

    /// Waits for the answer to a request.
    pub async fn hear<T>(&self, answer: impl Future<Output = Result<T, zk::Error>>) -> Result<T, Failure> {
        self.within(answer).await?.map_err(Failure::of)
    }

    /// All of these steps, or none.
    pub async fn multi<'a>(&self, ops: impl IntoIterator<Item = &'a Op>) -> Result<Done, Failure> {
        let sent_at = self.clock.now();
        let mut writer = self.client.new_multi_writer();
        for op in ops {
            let added = match op {
                Op::Check(path, version) => writer.add_check_version(path, *version),
                Op::Create { path, data, mode } => {
                    writer.add_create(path, data, &mode.with_acls(script::acls(self.login)))
                }
                Op::Set { path, data, version } => writer.add_set_data(path, data, Some(*version)),
                Op::Delete(path, version) => writer.add_delete(path, Some(*version)),
            };
            added.map_err(Failure::of)?;
        }
        match self.within(writer.commit()).await? {
            Ok(answers) => Ok(Done { sent_at, answers }),
            Err(MultiWriteError::RequestFailed { source }) => Err(Failure::of(source)),
            Err(MultiWriteError::OperationFailed { index, source }) => Err(Failure::at(index, source)),
        }
    }

    /// What is asked next, in this session, is answered by a server that knows what the leader knows now.
    pub async fn catch_up(&self) -> Result<(), Failure> {
        self.hear(self.client.sync("/")).await
    }

    pub async fn children(&self, path: &str) -> Result<(Vec<String>, Stat), Failure> {
        self.hear(self.client.get_children(path)).await
    }

    pub async fn get(&self, path: &str) -> Result<(Vec<u8>, Stat), Failure> {
        self.hear(self.client.get_data(path)).await
    }

    pub async fn set(&self, path: &str, data: &[u8], version: i32) -> Result<Stat, Failure> {
        self.hear(self.client.set_data(path, data, Some(version))).await
    }

    /// Deletes it, if it is there. False: it was not.
    pub async fn delete(&self, path: &str) -> Result<bool, Failure> {
        Ok(Failure::gone(self.hear(self.client.delete(path, None)).await)?.is_some())
    }

    /// Makes a node that is there for what is below it. The servers remove it when that has been empty for a while, if
    /// they know how.
    pub async fn make_parent(&self, path: &str, acls: Acls<'static>) -> Result<(), Failure> {
        let container = CreateMode::Container.with_acls(acls);
        let made = match self.hear(self.client.create(path, b"", &container)).await {
            Err(failure) if failure.is(&zk::Error::Unimplemented) => {
                let plain = CreateMode::Persistent.with_acls(acls);
                self.hear(self.client.create(path, b"", &plain)).await
            }
            made => made,
        };
        match made {
            Err(failure) if !failure.is(&zk::Error::NodeExists) => Err(failure),
            _ => Ok(()),
        }
    }

    /// Makes a node that stays, with all above it.
    pub async fn make_all(&self, path: &str, acls: Acls<'static>) -> Result<(), Failure> {
        let plain = CreateMode::Persistent.with_acls(acls);
        self.hear(self.client.mkdir(path, &plain)).await
    }
}
