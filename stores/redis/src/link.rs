//! One connection to one server, shared by everybody, that comes back by itself.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, ProtocolVersion, PushInfo, PushKind, RedisConnectionInfo, Value};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::fault::Failure;
use crate::tls::Tls;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Door {
    /// A host and a port.
    Tcp(String, u16),
    /// A socket in the file system.
    Unix(String),
}

impl std::fmt::Display for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Door::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Door::Tcp(host, port) => write!(f, "{host}:{port}"),
            Door::Unix(path) => f.write_str(path),
        }
    }
}

/// What every connection of a store has in common.
#[derive(Clone, Debug)]
pub struct Access {
    /// The user to log in as.
    pub user: Option<String>,
    /// The password.
    pub password: Option<String>,
    /// The number of the database.
    pub db: u32,
    /// Encryption, if wanted.
    pub tls: Option<Tls>,
    /// How long a server may be silent, with a request waiting, before it counts as gone.
    pub timeout: Duration,
}

/// What a server says without having been asked.
#[derive(Clone, Debug)]
pub enum Heard {
    /// A message on a channel that was subscribed to.
    Message {
        /// Which channel.
        channel: Vec<u8>,
        /// What it says.
        text: Vec<u8>,
    },
    /// The connection is gone, and what was subscribed to with it.
    Gone,
}

/// Who hears of messages, and of the end of the connection that brought them. It must not block.
pub type Listener = Arc<dyn Fn(Heard) + Send + Sync>;

/// One connection to one server. Requests of many tasks travel on it together; when it breaks, the next request makes a
/// new one. Nothing is ever sent twice: what is on its way when it breaks is told to be unheard of.
pub struct Link {
    door: Door,
    access: Arc<Access>,
    reactor: Handle,
    listener: Option<Listener>,
    line: Mutex<Line>,
    /// Held by whoever makes a new connection; the others wait for it.
    dialing: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Line {
    live: Option<Live>,
    /// When the last try failed, and how: the next one is not made at once.
    failed: Option<(Instant, Failure)>,
}

#[derive(Clone)]
struct Live {
    connection: MultiplexedConnection,
    gauge: Arc<Gauge>,
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

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Link({})", self.door)
    }
}

impl Link {
    /// A link that connects when it is first used, on `reactor`'s thread.
    pub fn new(door: Door, access: Arc<Access>, reactor: Handle, listener: Option<Listener>) -> Self {
        Link {
            door,
            access,
            reactor,
            listener,
            line: Mutex::default(),
            dialing: tokio::sync::Mutex::default(),
        }
    }

    /// Where it goes.
    pub fn door(&self) -> &Door {
        &self.door
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends one command and returns its answer.
    ///
    /// # Errors
    /// [`Failure`], which tells what was not sent from what may have happened.
    pub async fn call(&self, command: &Cmd) -> Result<Value, Failure> {
        let mut live = self.live().await?;
        let under_way = UnderWay::new(live.gauge);
        let answer = live.connection.send_packed_command(command).await;
        drop(under_way);
        self.judge(answer)
    }

    /// Sends several commands behind each other, nothing in between, and returns their answers.
    ///
    /// # Errors
    /// [`Failure`] if the connection broke; what the server says to each command is in the list.
    pub async fn calls(&self, commands: &redis::Pipeline) -> Result<Vec<Result<Value, Failure>>, Failure> {
        let mut live = self.live().await?;
        let under_way = UnderWay::new(live.gauge);
        let answers = live.connection.send_packed_commands(commands, 0, commands.len()).await;
        drop(under_way);
        let answers = answers.map_err(|error| self.unheard(&error))?;
        Ok(answers.into_iter().map(|answer| self.judge(Ok(answer))).collect())
    }

    fn judge(&self, answer: redis::RedisResult<Value>) -> Result<Value, Failure> {
        match answer {
            Ok(Value::ServerError(error)) => {
                let failure = Failure::from(error);
                if failure.is("READONLY") {
                    // A replica now: the name may lead to the primary next time.
                    self.hang_up();
                }
                Err(failure)
            }
            Ok(value) => Ok(value),
            Err(error) => match error.code() {
                Some(code) => {
                    let detail = error.detail().unwrap_or_default().to_owned();
                    Err(Failure::Refused { code: code.to_owned(), detail })
                }
                None => Err(self.unheard(&error)),
            },
        }
    }

    fn unheard(&self, error: &redis::RedisError) -> Failure {
        Failure::Unheard(format!("the connection to {} broke: {error}", self.door))
    }

    /// Drops the connection: the next request makes a new one.
    pub fn hang_up(&self) {
        self.line().live = None;
    }

    async fn live(&self) -> Result<Live, Failure> {
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
        let dial = dial(self.door.clone(), self.access.clone(), self.listener.clone());
        let made = self.reactor.spawn(dial).await;
        let made = made.unwrap_or_else(|_| Err(Failure::Away("the store is closed".into())));
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

    fn ready(&self) -> Option<Live> {
        let mut line = self.line();
        if line.live.as_ref().is_some_and(|live| live.gauge.over()) {
            line.live = None;
        }
        line.live.clone()
    }
}

/// One request on its way; also when whoever asked has lost interest.
struct UnderWay(Arc<Gauge>);

impl UnderWay {
    fn new(gauge: Arc<Gauge>) -> Self {
        if gauge.sent.fetch_add(1, Ordering::Relaxed) == gauge.done.load(Ordering::Relaxed) {
            gauge.begun.notify_one();
        }
        UnderWay(gauge)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.done.fetch_add(1, Ordering::Relaxed);
    }
}

impl Gauge {
    const OVER: u64 = u64::MAX / 2;

    fn over(&self) -> bool {
        self.done.load(Ordering::Relaxed) >= Self::OVER
    }

    fn end(&self) {
        self.done.fetch_add(Self::OVER, Ordering::Relaxed);
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
async fn dial(door: Door, access: Arc<Access>, listener: Option<Listener>) -> Result<Live, Failure> {
    let name = door.to_string();
    match tokio::time::timeout(access.timeout, connect(door, &access, listener)).await {
        Ok(made) => made,
        Err(_) => {
            Err(Failure::Away(format!("no Redis at {name}: it did not answer within {:?}", access.timeout)))
        }
    }
}

async fn connect(door: Door, access: &Access, listener: Option<Listener>) -> Result<Live, Failure> {
    let away = |error: io::Error| Failure::Away(format!("no Redis at {door}: {error}"));
    match &door {
        Door::Unix(path) => {
            run(UnixStream::connect(path).await.map_err(away)?, &door, access, listener).await
        }
        Door::Tcp(host, port) => {
            let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(away)?;
            stream.set_nodelay(true).map_err(away)?;
            // A peer that vanished without a word is noticed also while nothing is asked of it.
            let keep = socket2::TcpKeepalive::new()
                .with_time(Duration::from_secs(10))
                .with_interval(Duration::from_secs(5));
            socket2::SockRef::from(&stream).set_tcp_keepalive(&keep).map_err(away)?;
            match &access.tls {
                Some(tls) => run(tls.wrap(host, stream).await.map_err(away)?, &door, access, listener).await,
                None => run(stream, &door, access, listener).await,
            }
        }
    }
}

async fn run<S>(stream: S, door: &Door, access: &Access, listener: Option<Listener>) -> Result<Live, Failure>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let mut info =
        RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3).set_db(access.db.into());
    if let Some(user) = &access.user {
        info = info.set_username(user);
    }
    if let Some(password) = &access.password {
        info = info.set_password(password);
    }
    // Silence is watched for all requests together, below.
    let mut config = AsyncConnectionConfig::new().set_response_timeout(None).set_pipeline_buffer_size(1024);
    if let Some(listener) = listener.clone() {
        config = config.set_push_sender(move |push: PushInfo| {
            if push.kind == PushKind::Message
                && let Ok([Value::BulkString(channel), Value::BulkString(text)]) =
                    <[Value; 2]>::try_from(push.data)
            {
                listener(Heard::Message { channel, text });
            }
            Ok::<(), std::convert::Infallible>(())
        });
    }
    let made = MultiplexedConnection::new_with_config(&info, stream, config).await;
    let (connection, driver) = made.map_err(|error| Failure::while_connecting(&error, &door.to_string()))?;
    let gauge = Arc::new(Gauge::default());
    let (watched, timeout, name) = (gauge.clone(), access.timeout, door.to_string());
    tokio::spawn(async move {
        tokio::select! {
            () = driver => {}
            () = watched.stuck(timeout) => {
                tracing::warn!(server = name, "no answer for {timeout:?}: the connection is given up");
            }
        }
        watched.end();
        if let Some(tell) = listener {
            tell(Heard::Gone);
        }
    });
    Ok(Live { connection, gauge })
}
