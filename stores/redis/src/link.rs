//! One connection to one server, shared by everybody, that comes back by itself.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use lockkeeper_core::Secret;
use lockkeeper_store_kit::InFlight;
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Cmd, ProtocolVersion, PushInfo, PushKind, RedisConnectionInfo, Value, cmd,
};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Handle;

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
    pub password: Option<Secret>,
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

/// Is given what the server at a door answers to a [`Greeting`].
pub type Answered = dyn Fn(&Door, Vec<Result<Value, Failure>>) -> Result<(), Failure> + Send + Sync;

/// What is asked on every new connection before anything else is, and who hears the answers. An error ends the connection.
#[derive(Clone)]
pub struct Greeting {
    /// The questions.
    pub questions: Arc<redis::Pipeline>,
    /// Is given the answers of the server at this door.
    pub answered: Arc<Answered>,
}

impl std::fmt::Debug for Greeting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Greeting")
    }
}

/// One connection to one server. Requests of many tasks travel on it together; when it breaks, the next request makes a
/// new one. Nothing is ever sent twice: what is on its way when it breaks is told to be unheard of.
pub struct Link {
    endpoint: Arc<Endpoint>,
    reactor: Handle,
}

/// What a link and the task that dials for it share: dialing goes on when the caller that began it goes away, or callers
/// that wait for less time than a handshake takes would never get a connection.
struct Endpoint {
    door: Door,
    access: Arc<Access>,
    listener: Option<Listener>,
    greeting: Option<Greeting>,
    line: Mutex<Line>,
    /// Held by the task that dials; the others wait for it.
    dialing: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Line {
    live: Option<Arc<Live>>,
    /// When the last try failed, and how: the next one is not made at once.
    failed: Option<(Instant, Failure)>,
}

/// An open connection, as far as is known, and its requests in flight.
struct Live {
    connection: MultiplexedConnection,
    in_flight: Arc<InFlight>,
}

impl Live {
    async fn call(&self, command: &Cmd, door: &Door) -> Result<Value, Failure> {
        let request = self.in_flight.begin();
        let answer = self.connection.clone().send_packed_command(command).await;
        request.answered();
        judge(answer, door)
    }

    async fn calls(
        &self,
        commands: &redis::Pipeline,
        door: &Door,
    ) -> Result<Vec<Result<Value, Failure>>, Failure> {
        let request = self.in_flight.begin();
        let answers = self.connection.clone().send_packed_commands(commands, 0, commands.len()).await;
        request.answered();
        let answers = answers.map_err(|error| unheard(&error, door))?;
        Ok(answers.into_iter().map(|answer| judge(Ok(answer), door)).collect())
    }
}

fn judge(answer: redis::RedisResult<Value>, door: &Door) -> Result<Value, Failure> {
    match answer {
        Ok(Value::ServerError(error)) => Err(Failure::from(error)),
        Ok(value) => Ok(value),
        Err(error) => match error.code() {
            Some(code) => {
                let detail = error.detail().unwrap_or_default().to_owned();
                Err(Failure::Refused { code: code.to_owned(), detail })
            }
            None => Err(unheard(&error, door)),
        },
    }
}

fn unheard(error: &redis::RedisError, door: &Door) -> Failure {
    Failure::Unheard(format!("the connection to {door} broke: {error}"))
}

/// How long a failure to connect is passed on to others before it is tried again.
const BREATHER: Duration = Duration::from_millis(100);

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Link({})", self.endpoint.door)
    }
}

impl Link {
    /// A link that connects when it is first used, on `reactor`'s thread.
    pub fn new(door: Door, access: Arc<Access>, reactor: Handle, listener: Option<Listener>) -> Self {
        let (line, dialing) = (Mutex::default(), tokio::sync::Mutex::default());
        let endpoint = Endpoint { door, access, listener, greeting: None, line, dialing };
        Link { endpoint: Arc::new(endpoint), reactor }
    }

    /// The same link, which asks this on every new connection.
    ///
    /// # Panics
    /// If it has been used already.
    #[must_use]
    pub fn greet_with(mut self, greeting: Greeting) -> Self {
        let endpoint = Arc::get_mut(&mut self.endpoint).expect("a link that nobody has used yet");
        endpoint.greeting = Some(greeting);
        self
    }

    /// Where it goes.
    pub fn door(&self) -> &Door {
        &self.endpoint.door
    }

    /// Whether there is a connection now, as far as is known.
    pub fn is_open(&self) -> bool {
        self.endpoint.ready().is_some()
    }

    /// Sends one command and returns its answer.
    ///
    /// # Errors
    /// [`Failure`], which tells what was not sent from what may have happened.
    pub async fn call(&self, command: &Cmd) -> Result<Value, Failure> {
        let answer = self.live().await?.call(command, self.door()).await;
        self.notice(&answer);
        answer
    }

    /// Sends several commands behind each other, nothing in between, and returns their answers.
    ///
    /// # Errors
    /// [`Failure`] if the connection broke; what the server says to each command is in the list.
    pub async fn calls(&self, commands: &redis::Pipeline) -> Result<Vec<Result<Value, Failure>>, Failure> {
        let answers = self.live().await?.calls(commands, self.door()).await?;
        Ok(answers.into_iter().inspect(|answer| self.notice(answer)).collect())
    }

    /// A server that has become a replica: the name may lead to the primary next time.
    fn notice(&self, answer: &Result<Value, Failure>) {
        if answer.as_ref().is_err_and(|failure| failure.is("READONLY")) {
            self.hang_up();
        }
    }

    /// Drops the connection: the next request makes a new one.
    pub fn hang_up(&self) {
        self.endpoint.line().live = None;
    }

    async fn live(&self) -> Result<Arc<Live>, Failure> {
        if let Some(live) = self.endpoint.ready() {
            return Ok(live);
        }
        let endpoint = self.endpoint.clone();
        let made = self.reactor.spawn(async move { endpoint.dial().await }).await;
        made.unwrap_or_else(|_| Err(Failure::Away("the store is closed".into())))
    }
}

impl Endpoint {
    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ready(&self) -> Option<Arc<Live>> {
        let mut line = self.line();
        if line.live.as_ref().is_some_and(|live| live.in_flight.is_closed()) {
            line.live = None;
        }
        line.live.clone()
    }

    /// Connects, logs in, asks what is asked first, and leaves the connection running on this runtime.
    async fn open(&self) -> Result<Arc<Live>, Failure> {
        let (door, timeout) = (&self.door, self.access.timeout);
        let opened = async {
            let live = connect(door.clone(), &self.access, self.listener.clone()).await?;
            if let Some(Greeting { questions, answered }) = &self.greeting {
                let answers = live.calls(questions, door).await;
                (*answered)(door, answers.map_err(|_| self.no_reply())?)?;
            }
            Ok(live)
        };
        tokio::time::timeout(timeout, opened).await.unwrap_or_else(|_| Err(self.no_reply()))
    }

    fn no_reply(&self) -> Failure {
        let (door, timeout) = (&self.door, self.access.timeout);
        Failure::Away(format!("no Redis at {door}: it did not answer within {timeout:?}"))
    }

    async fn dial(&self) -> Result<Arc<Live>, Failure> {
        let _dialing = self.dialing.lock().await;
        // Another task may have been quicker, or has just been told that nobody answers.
        if let Some(live) = self.ready() {
            return Ok(live);
        }
        if let Some((when, failure)) = &self.line().failed
            && when.elapsed() < BREATHER
        {
            return Err(failure.clone());
        }
        let made = self.open().await;
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
}

async fn connect(door: Door, access: &Access, listener: Option<Listener>) -> Result<Arc<Live>, Failure> {
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

async fn run<S>(
    stream: S,
    door: &Door,
    access: &Access,
    listener: Option<Listener>,
) -> Result<Arc<Live>, Failure>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let mut info =
        RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3).set_db(access.db.into());
    if let Some(user) = &access.user {
        info = info.set_username(user);
    }
    if let Some(password) = &access.password {
        info = info.set_password(password.expose());
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
    let in_flight = Arc::new(InFlight::default());
    let live = Arc::new(Live { connection, in_flight: in_flight.clone() });
    let (weak, timeout, name) = (Arc::downgrade(&live), access.timeout, door.to_string());
    tokio::spawn(async move {
        tokio::select! {
            () = driver => {}
            () = in_flight.silence(timeout, || replies(weak.clone())) => {
                tracing::warn!(server = name, "no reply for {timeout:?}: closing the connection; the next request dials");
            }
        }
        in_flight.close();
        if let Some(tell) = listener {
            tell(Heard::Gone);
        }
    });
    Ok(live)
}

/// Whether the server replies to anything at all. A weak reference: the connection ends with the last of its callers.
async fn replies(live: Weak<Live>) -> bool {
    let Some(mut connection) = live.upgrade().map(|live| live.connection.clone()) else {
        return std::future::pending().await;
    };
    let reply = connection.send_packed_command(&cmd("PING")).await;
    reply.is_ok() || reply.is_err_and(|error| error.code().is_some())
}
