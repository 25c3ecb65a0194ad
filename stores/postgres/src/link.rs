//! One connection to the server, shared by everybody, that comes back by itself.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use lockkeeper_core::Error;
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinError;
use tokio_postgres::config::SslMode;
use tokio_postgres::types::{FromSqlOwned, ToSql};
use tokio_postgres::{AsyncMessage, Client, Config, NoTls, Row, Statement};

use crate::config::{Door, Options};
use crate::fault::Failure;
use crate::install;
use crate::script::{HELLO, OFTEN, Sql};
use crate::talk::Talk;

/// What the server says without having been asked.
#[derive(Clone, Debug)]
pub(crate) enum Heard {
    /// A message on a channel that was listened to.
    Message { channel: String, text: String },
    /// The connection is gone, and what was listened to with it.
    Gone,
}

/// Who hears of messages, and of the end of the connection that brought them. It must not block.
pub(crate) type Listener = Arc<dyn Fn(Heard) + Send + Sync>;

pub(crate) type Param<'a> = &'a (dyn ToSql + Sync);

/// One connection. Requests of many tasks travel on it behind each other; when it breaks, the next request makes a new one.
/// Nothing is ever sent twice that may have happened.
pub(crate) struct Link {
    options: Arc<Options>,
    reactor: Handle,
    role: Role,
    /// How often it was made. What an older connection still brings is told by it.
    epoch: AtomicI32,
    /// Whether statements may be prepared: not where a pooler gives each of them to another server process.
    named: AtomicBool,
    /// Whether something of ours was found missing.
    repair: AtomicBool,
    line: Mutex<Line>,
    /// Held by whoever makes a new connection; the others wait for it.
    dialing: tokio::sync::Mutex<()>,
}

/// What a connection is for.
pub(crate) enum Role {
    /// Asking, for the process of this name.
    Speak(String),
    /// Hearing.
    Hear(Listener),
}

#[derive(Default)]
struct Line {
    live: Option<Live>,
    /// When the last try failed, and how: the next one is not made at once.
    failed: Option<(Instant, Failure)>,
}

/// A connection that is open, as far as is known.
#[derive(Clone)]
pub(crate) struct Live(Arc<Wire>);

struct Wire {
    client: Client,
    talk: Arc<Talk>,
    gauge: Arc<Gauge>,
    epoch: i32,
    prepared: OnceLock<HashMap<&'static str, Statement>>,
    /// Held while a statement is under way, where a pooler may stand in between: it could hand the answer to what was sent behind
    /// another's to somebody else.
    alone: tokio::sync::Mutex<()>,
    to: String,
    schema: String,
}

/// How many requests are on their way, and whether answers come.
#[derive(Default)]
struct Gauge {
    sent: AtomicU64,
    done: AtomicU64,
    begun: Notify,
}

/// How long a failure to connect is passed on to others before it is tried again.
const BREATHER: Duration = Duration::from_millis(100);

impl Link {
    /// A link that connects when it is first used, on `reactor`'s thread.
    pub fn new(options: Arc<Options>, reactor: Handle, role: Role) -> Self {
        Link {
            options,
            reactor,
            role,
            epoch: AtomicI32::new(0),
            named: AtomicBool::new(false),
            repair: AtomicBool::new(false),
            line: Mutex::default(),
            dialing: tokio::sync::Mutex::default(),
        }
    }

    pub fn reactor(&self) -> &Handle {
        &self.reactor
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one statement and returns its rows.
    pub async fn rows(&self, sql: &Sql, params: &[Param<'_>]) -> Result<Vec<Row>, Failure> {
        match self.live().await?.rows(sql, params).await {
            // Somebody dropped our tables. Nothing has happened; a new connection makes them again.
            Err(failure) if failure.is_missing() => {
                self.rebuild();
                self.live().await?.rows(sql, params).await
            }
            answer => answer,
        }
    }

    /// Something of ours is missing: the next connection makes it again.
    pub fn rebuild(&self) {
        self.repair.store(true, Ordering::Relaxed);
        self.hang_up();
    }

    /// Drops the connection: the next request makes a new one.
    pub fn hang_up(&self) {
        self.line().live = None;
    }

    /// From now on, what is said often is prepared.
    pub async fn prepare(&self) -> Result<(), Failure> {
        self.named.store(true, Ordering::Relaxed);
        self.live().await?.prepare().await
    }

    /// The connection, made if there is none.
    pub async fn live(&self) -> Result<Live, Failure> {
        if let Some(live) = self.ready() {
            return Ok(live);
        }
        let _dialing = self.dialing.lock().await;
        // Somebody else may have been quicker, or has just been told that nobody answers.
        if let Some(live) = self.ready() {
            return Ok(live);
        }
        if let Some((when, failure)) = &self.line().failed
            && when.elapsed() < BREATHER
        {
            return Err(failure.clone());
        }
        let made = self.dial().await;
        let mut line = self.line();
        match made {
            Ok(live) => {
                *line = Line { live: Some(live.clone()), failed: None };
                Ok(live)
            }
            Err(failure) => {
                line.failed = Some((Instant::now(), failure.clone()));
                Err(failure)
            }
        }
    }

    /// The connection, if there is one on which statements may follow each other.
    pub fn prompt(&self) -> Option<Live> {
        self.ready().filter(|live| live.0.prepared.get().is_some())
    }

    fn ready(&self) -> Option<Live> {
        let mut line = self.line();
        if line.live.as_ref().is_some_and(|live| live.0.gauge.over() || live.0.client.is_closed()) {
            line.live = None;
        }
        line.live.clone()
    }

    async fn dial(&self) -> Result<Live, Failure> {
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        let listener = match &self.role {
            Role::Hear(listener) => Some(listener.clone()),
            Role::Speak(_) => None,
        };
        let made = self.reactor.spawn(dial(self.options.clone(), listener, epoch)).await;
        let live = made.unwrap_or_else(|error| Err(undone(&error)))?;
        if let Role::Speak(client) = &self.role {
            install::ready(&live, &self.options, self.repair.load(Ordering::Relaxed)).await?;
            self.repair.store(false, Ordering::Relaxed);
            if epoch > 1 {
                live.rows(&HELLO, &[client, &epoch]).await?;
            }
            if self.named.load(Ordering::Relaxed) {
                live.prepare().await?;
            }
        }
        Ok(live)
    }
}

impl Live {
    /// The number of this connection.
    pub fn epoch(&self) -> i32 {
        self.0.epoch
    }

    /// Runs one statement and returns its rows. What is called first is sent first.
    pub async fn rows(&self, sql: &Sql, params: &[Param<'_>]) -> Result<Vec<Row>, Failure> {
        let Wire { client, prepared, to, schema, talk, .. } = &*self.0;
        let mut under_way = self.begin().await;
        let answer = match prepared.get().and_then(|all| all.get(sql.text)) {
            Some(statement) => talk.soon(client.query(statement, params)).await,
            None => {
                let text = sql.text.replace("@S", schema);
                let typed: Vec<_> = params.iter().copied().zip(sql.types.iter().cloned()).collect();
                client.query_typed(&text, &typed).await
            }
        };
        under_way.heard();
        answer.map_err(|error| Failure::of_request(&error, to))
    }

    /// Begins a statement: behind others that are under way, or, where there may be a pooler, after them.
    async fn begin(&self) -> UnderWay<'_> {
        let alone = match self.0.prepared.get() {
            Some(_) => None,
            None => Some(self.0.alone.lock().await),
        };
        UnderWay::new(&self.0.gauge, alone)
    }

    /// Runs some statements that have no answer.
    pub async fn run(&self, text: &str) -> Result<(), Failure> {
        let mut under_way = self.begin().await;
        let done = self.0.client.batch_execute(text).await;
        under_way.heard();
        done.map_err(|error| Failure::of_request(&error, &self.0.to))
    }

    async fn prepare(&self) -> Result<(), Failure> {
        let mut under_way = self.begin().await;
        let each = OFTEN.iter().map(|sql| async move {
            let text = sql.text.replace("@S", &self.0.schema);
            self.0.client.prepare_typed(&text, sql.types).await.map(|statement| (sql.text, statement))
        });
        let all = try_join_all(each).await;
        under_way.heard();
        let all = all.map_err(|error| Failure::of_request(&error, &self.0.to))?;
        _ = self.0.prepared.set(all.into_iter().collect());
        Ok(())
    }
}

/// One request on its way; also when whoever asked has lost interest.
struct UnderWay<'a> {
    gauge: &'a Gauge,
    alone: Option<tokio::sync::MutexGuard<'a, ()>>,
}

impl<'a> UnderWay<'a> {
    fn new(gauge: &'a Gauge, alone: Option<tokio::sync::MutexGuard<'a, ()>>) -> Self {
        if gauge.sent.fetch_add(1, Ordering::Relaxed) == gauge.done.load(Ordering::Relaxed) {
            gauge.begun.notify_one();
        }
        UnderWay { gauge, alone }
    }

    fn heard(&mut self) {
        self.alone = None;
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.gauge.done.fetch_add(1, Ordering::Relaxed);
        if self.alone.is_some() {
            // Nobody waits for the answer, and nothing may be sent behind it: this connection is over.
            self.gauge.end();
        }
    }
}

impl Gauge {
    const OVER: u64 = u64::MAX / 2;

    fn over(&self) -> bool {
        self.done.load(Ordering::Relaxed) >= Self::OVER
    }

    fn end(&self) {
        self.done.fetch_max(Self::OVER, Ordering::Relaxed);
    }

    /// Ends when requests wait and for `timeout` not one of them was answered. One timer for all requests: answers come
    /// in order, so if one is late, all behind it are.
    async fn stuck(&self, timeout: Duration) {
        loop {
            let done = self.done.load(Ordering::Relaxed);
            if self.sent.load(Ordering::Relaxed) == done {
                self.begun.notified().await;
                continue;
            }
            tokio::time::sleep(timeout).await;
            if self.done.load(Ordering::Relaxed) == done {
                return;
            }
        }
    }
}

/// Connects, logs in, and leaves the connection running on this runtime.
async fn dial(options: Arc<Options>, listener: Option<Listener>, epoch: i32) -> Result<Live, Failure> {
    let made = tokio::time::timeout(options.timeout, log_in(&options)).await;
    let (client, talk) = made.unwrap_or_else(|_| Err(silent(&options)))?;
    let gauge = Arc::new(Gauge::default());
    tokio::spawn(drive(talk.clone(), gauge.clone(), options.timeout, listener));
    let (prepared, alone) = (OnceLock::new(), tokio::sync::Mutex::new(()));
    let (to, schema) = (options.door.to_string(), options.schema.clone());
    Ok(Live(Arc::new(Wire { client, talk, gauge, epoch, prepared, alone, to, schema })))
}

/// A connection of your own to the database of an address, as the store makes it: TLS, keep-alive, a time-out for the beginning. It runs
/// on the runtime that this is called on. Nothing is made in the database.
///
/// # Errors
/// [`lockkeeper_core::Error::Unavailable`] or [`lockkeeper_core::Error::Denied`], with what to do.
pub async fn connect_to(options: &Options) -> lockkeeper_core::Result<Client> {
    let made = tokio::time::timeout(options.timeout, log_in(options)).await;
    let (client, talk) = made.unwrap_or_else(|_| Err(silent(options)))?;
    tokio::spawn(async move { while talk.next().await.is_some() {} });
    Ok(client)
}

/// Why nothing was done on the runtime.
fn undone(error: &JoinError) -> Failure {
    match error.is_panic() {
        true => Failure::Told(Error::invalid(
            "the runtime that was given for the connections has no I/O or no timers: build it with enable_all(), or leave \
             runtime=caller out",
        )),
        false => Failure::Away("the store is closed".into()),
    }
}

fn silent(options: &Options) -> Failure {
    let Options { door, timeout, .. } = options;
    Failure::Away(format!("no PostgreSQL at {door}: it did not answer within {timeout:?}"))
}

async fn log_in(options: &Options) -> Result<(Client, Arc<Talk>), Failure> {
    let to = options.door.to_string();
    let away = |error: io::Error| Failure::Away(format!("no PostgreSQL at {to}: {error}"));
    let refused = |error: tokio_postgres::Error| Failure::while_connecting(&error, &to);
    let mut config = Config::new();
    config.user(&options.user).dbname(&options.database).application_name("lockkeeper");
    config.ssl_mode(if options.tls.is_some() { SslMode::Require } else { SslMode::Disable });
    if let Some(password) = &options.password {
        config.password(password.expose());
    }
    match &options.door {
        Door::Unix(..) => {
            let stream = UnixStream::connect(&to).await.map_err(away)?;
            let (client, connection) = config.connect_raw(stream, NoTls).await.map_err(refused)?;
            Ok((client, Talk::new(connection)))
        }
        Door::Tcp(host, number) => {
            let stream = TcpStream::connect((host.as_str(), *number)).await.map_err(away)?;
            stream.set_nodelay(true).map_err(away)?;
            // A peer that vanished without a word is noticed also while nothing is asked of it.
            let keep = socket2::TcpKeepalive::new()
                .with_time(Duration::from_secs(10))
                .with_interval(Duration::from_secs(5));
            socket2::SockRef::from(&stream).set_tcp_keepalive(&keep).map_err(away)?;
            match &options.tls {
                Some(tls) => {
                    let (client, connection) =
                        config.connect_raw(stream, tls.to(host)).await.map_err(refused)?;
                    Ok((client, Talk::new(connection)))
                }
                None => {
                    let (client, connection) = config.connect_raw(stream, NoTls).await.map_err(refused)?;
                    Ok((client, Talk::new(connection)))
                }
            }
        }
    }
}

/// Moves what is said both ways until the connection ends, or nothing is answered any more.
async fn drive(talk: Arc<Talk>, gauge: Arc<Gauge>, timeout: Duration, listener: Option<Listener>) {
    let messages = async {
        while let Some(message) = talk.next().await {
            if let (AsyncMessage::Notification(note), Some(tell)) = (message, &listener) {
                let (channel, text) = (note.channel().to_owned(), note.payload().to_owned());
                tell(Heard::Message { channel, text });
            }
        }
    };
    let _over = Over { talk: &talk, gauge: &gauge, listener: listener.as_ref() };
    tokio::select! {
        () = messages => {}
        () = gauge.stuck(timeout) => tracing::warn!("no answer for {timeout:?}: the connection is given up"),
    }
}

/// The end of a connection, also by that of the runtime it was on: whoever waits is told.
struct Over<'a> {
    talk: &'a Talk,
    gauge: &'a Gauge,
    listener: Option<&'a Listener>,
}

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.gauge.end();
        self.talk.end();
        if let Some(tell) = self.listener {
            tell(Heard::Gone);
        }
    }
}

/// One value of the first row. Never a panic, whatever the server says.
pub(crate) fn first<T: FromSqlOwned>(rows: &[Row], at: usize) -> Result<T, Failure> {
    let value = rows.first().and_then(|row| row.try_get(at).ok());
    value.ok_or_else(|| Failure::Unheard("PostgreSQL gave an answer that makes no sense".into()))
}
