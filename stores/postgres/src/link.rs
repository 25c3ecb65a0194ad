//! One connection to the server, shared by everybody, that comes back by itself.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use lockkeeper_core::Error;
use lockkeeper_store_kit::{InFlight, Request};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinError;
use tokio_postgres::config::SslMode;
use tokio_postgres::types::{FromSqlOwned, ToSql};
use tokio_postgres::{AsyncMessage, CancelToken, Client, Config, NoTls, Row, Statement};

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
    in_flight: Arc<InFlight>,
    epoch: i32,
    prepared: OnceLock<HashMap<&'static str, Statement>>,
    /// Held while a statement is under way, where a pooler may stand in between: it could hand the answer to what was sent behind
    /// another's to somebody else.
    alone: tokio::sync::Mutex<()>,
    /// A caller abandoned a statement that nothing may be sent behind: the connection is to end.
    abandoned: Arc<Notify>,
    options: Arc<Options>,
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
        let mut rebuilt = false;
        loop {
            match self.live().await?.rows(sql, params).await {
                // It was not sent, and the next connection is another one.
                Err(Failure::Ended) => {}
                // Somebody dropped our tables. Nothing has happened; a new connection makes them again.
                Err(failure) if failure.is_missing() && !std::mem::replace(&mut rebuilt, true) => {
                    self.rebuild()
                }
                answer => return answer,
            }
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
        if line.live.as_ref().is_some_and(|live| live.0.in_flight.is_closed() || live.0.client.is_closed()) {
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
        let Wire { client, prepared, options, talk, .. } = &*self.0;
        let under_way = self.begin().await?;
        let answer = match prepared.get().and_then(|all| all.get(sql.text)) {
            Some(statement) => talk.soon(client.query(statement, params)).await,
            None => {
                let text = sql.text.replace("@S", &options.schema);
                let typed: Vec<_> = params.iter().copied().zip(sql.types.iter().cloned()).collect();
                client.query_typed(&text, &typed).await
            }
        };
        under_way.heard();
        answer.map_err(|error| self.failure(&error))
    }

    fn failure(&self, error: &tokio_postgres::Error) -> Failure {
        Failure::of_request(error, &self.0.options.door.to_string())
    }

    /// Begins a statement: behind others that are under way, or, where there may be a pooler, after them.
    async fn begin(&self) -> Result<UnderWay<'_>, Failure> {
        let alone = match self.0.prepared.get() {
            Some(_) => None,
            None => Some(self.0.alone.lock().await),
        };
        // The statement before this one may have been abandoned meanwhile.
        if self.0.in_flight.is_closed() {
            return Err(Failure::Ended);
        }
        Ok(UnderWay { wire: &self.0, request: Some(self.0.in_flight.begin()), alone })
    }

    /// Runs some statements that have no answer.
    pub async fn run(&self, text: &str) -> Result<(), Failure> {
        let under_way = self.begin().await?;
        let done = self.0.client.batch_execute(text).await;
        under_way.heard();
        done.map_err(|error| self.failure(&error))
    }

    /// Prepares what is said often, on a connection to the server itself. A statement that nobody waits for any more, and that could
    /// not be cancelled, ends there by itself.
    async fn prepare(&self) -> Result<(), Failure> {
        let patience = (self.0.options.timeout * 2).as_millis();
        let under_way = self.begin().await?;
        let each = OFTEN.iter().map(|sql| async move {
            let text = sql.text.replace("@S", &self.0.options.schema);
            self.0.client.prepare_typed(&text, sql.types).await.map(|statement| (sql.text, statement))
        });
        let all = async {
            self.0.client.batch_execute(&format!("SET statement_timeout = {patience}")).await?;
            try_join_all(each).await
        };
        let all = all.await;
        under_way.heard();
        let all = all.map_err(|error| self.failure(&error))?;
        _ = self.0.prepared.set(all.into_iter().collect());
        Ok(())
    }
}

/// One statement on its way. If its caller drops this, the answer is still to come (see [`InFlight`]).
struct UnderWay<'a> {
    wire: &'a Wire,
    request: Option<Request<'a>>,
    alone: Option<tokio::sync::MutexGuard<'a, ()>>,
}

impl UnderWay<'_> {
    fn heard(mut self) {
        self.alone = None;
        if let Some(request) = self.request.take() {
            request.answered();
        }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if self.alone.is_some() {
            // Nothing may be sent behind it: this connection is over, before the next caller gets its turn.
            self.wire.in_flight.close();
            self.wire.abandoned.notify_one();
        }
    }
}

/// Connects, logs in, and leaves the connection running on this runtime.
async fn dial(options: Arc<Options>, listener: Option<Listener>, epoch: i32) -> Result<Live, Failure> {
    let made = tokio::time::timeout(options.timeout, log_in(&options)).await;
    let (client, talk) = made.unwrap_or_else(|_| Err(silent(&options)))?;
    let (prepared, alone, token) = (OnceLock::new(), tokio::sync::Mutex::new(()), client.cancel_token());
    let (in_flight, abandoned) = (Arc::<InFlight>::default(), Arc::<Notify>::default());
    let wire = Wire {
        client,
        talk: talk.clone(),
        in_flight: in_flight.clone(),
        epoch,
        prepared,
        alone,
        abandoned: abandoned.clone(),
        options: options.clone(),
    };
    let wire = Arc::new(wire);
    let driver = Driver { talk, in_flight, abandoned, options, token, listener, wire: Arc::downgrade(&wire) };
    tokio::spawn(driver.run());
    Ok(Live(wire))
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
    let refused = |error: tokio_postgres::Error| Failure::while_connecting(&error, &to);
    let mut config = Config::new();
    config.user(&options.user).dbname(&options.database).application_name("lockkeeper");
    config.ssl_mode(if options.tls.is_some() { SslMode::Require } else { SslMode::Disable });
    if let Some(password) = &options.password {
        config.password(password.expose());
    }
    match (Socket::connect(&options.door).await?, &options.tls, &options.door) {
        (Socket::Unix(stream), ..) => {
            let (client, connection) = config.connect_raw(stream, NoTls).await.map_err(refused)?;
            Ok((client, Talk::new(connection)))
        }
        (Socket::Tcp(stream), Some(tls), Door::Tcp(host, _)) => {
            let (client, connection) = config.connect_raw(stream, tls.to(host)).await.map_err(refused)?;
            Ok((client, Talk::new(connection)))
        }
        (Socket::Tcp(stream), ..) => {
            let (client, connection) = config.connect_raw(stream, NoTls).await.map_err(refused)?;
            Ok((client, Talk::new(connection)))
        }
    }
}

enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Socket {
    async fn connect(door: &Door) -> Result<Socket, Failure> {
        let away = |error: io::Error| Failure::Away(format!("no PostgreSQL at {door}: {error}"));
        match door {
            Door::Unix(..) => Ok(Socket::Unix(UnixStream::connect(door.to_string()).await.map_err(away)?)),
            Door::Tcp(host, number) => {
                let stream = TcpStream::connect((host.as_str(), *number)).await.map_err(away)?;
                stream.set_nodelay(true).map_err(away)?;
                // A peer that vanished without a word is noticed also while nothing is asked of it.
                let keep = socket2::TcpKeepalive::new()
                    .with_time(Duration::from_secs(10))
                    .with_interval(Duration::from_secs(5));
                socket2::SockRef::from(&stream).set_tcp_keepalive(&keep).map_err(away)?;
                Ok(Socket::Tcp(stream))
            }
        }
    }
}

/// Asks the server to end what a connection is working on. PostgreSQL does not notice that a client is gone while its statement waits
/// for a lock, so the server process of a connection that is given up would stay for as long.
async fn cancel(options: Arc<Options>, token: CancelToken) {
    let asked = async {
        match (Socket::connect(&options.door).await?, &options.tls, &options.door) {
            (Socket::Unix(stream), ..) => Ok(token.cancel_query_raw(stream, NoTls).await),
            (Socket::Tcp(stream), Some(tls), Door::Tcp(host, _)) => {
                Ok(token.cancel_query_raw(stream, tls.to(host)).await)
            }
            (Socket::Tcp(stream), ..) => Ok(token.cancel_query_raw(stream, NoTls).await),
        }
    };
    let asked: Result<Result<(), Failure>, _> = tokio::time::timeout(options.timeout, async {
        asked.await?.map_err(|error| Failure::while_connecting(&error, &options.door.to_string()))
    })
    .await;
    if !matches!(asked, Ok(Ok(()))) {
        tracing::debug!(
            ?asked,
            "a statement that was given up could not be cancelled; it ends by its statement_timeout"
        );
    }
}

/// What keeps a connection going.
struct Driver {
    talk: Arc<Talk>,
    in_flight: Arc<InFlight>,
    abandoned: Arc<Notify>,
    options: Arc<Options>,
    token: CancelToken,
    listener: Option<Listener>,
    /// The connection ends with the last of its callers.
    wire: Weak<Wire>,
}

impl Driver {
    /// Moves what is said both ways until the connection ends, or nothing is answered any more.
    async fn run(self) {
        let Driver { talk, in_flight, abandoned, options, token, listener, wire } = self;
        let (messages, timeout) = (pass_on(&talk, listener.as_ref()), options.timeout);
        let _over = Over { talk: &talk, in_flight: &in_flight, listener: listener.as_ref() };
        tokio::select! {
            () = messages => {}
            () = in_flight.silence(timeout, || replies(wire.clone())) => {
                tracing::warn!(server = %options.door, "no reply for {timeout:?}: closing the connection; the next request dials");
                // Callers are not to wait for this.
                tokio::spawn(cancel(options.clone(), token));
            }
            // A pooler knows what to cancel only while the client is connected.
            () = abandoned.notified() => cancel(options.clone(), token).await,
        }
    }
}

async fn pass_on(talk: &Talk, listener: Option<&Listener>) {
    while let Some(message) = talk.next().await {
        if let (AsyncMessage::Notification(note), Some(tell)) = (message, listener) {
            let (channel, text) = (note.channel().to_owned(), note.payload().to_owned());
            tell(Heard::Message { channel, text });
        }
    }
}

/// Whether the server replies to anything at all. Where a pooler may stand in between nothing is sent behind what was abandoned.
async fn replies(wire: Weak<Wire>) -> bool {
    match wire.upgrade() {
        Some(wire) if wire.prepared.get().is_some() => {
            let reply = wire.client.simple_query("").await;
            reply.is_ok() || reply.is_err_and(|error| error.as_db_error().is_some())
        }
        _ => std::future::pending().await,
    }
}

/// The end of a connection, also by that of the runtime it was on: whoever waits is told.
struct Over<'a> {
    talk: &'a Talk,
    in_flight: &'a InFlight,
    listener: Option<&'a Listener>,
}

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.in_flight.close();
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
