//! One connection to one server, shared by all tasks of a store: connect, reconnect, requests in flight, silence.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use lockkeeper_core::{IgnorePoison, Secret};
use lockkeeper_store_kit::InFlight;
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Cmd, ProtocolVersion, PushInfo, PushKind, RedisConnectionInfo, Value, cmd,
};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Handle;

use crate::error::Failure;
use crate::tls::Tls;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// A host and a port.
    Tcp(String, u16),
    /// A socket in the file system.
    Unix(String),
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Endpoint::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Endpoint::Tcp(host, port) => write!(f, "{host}:{port}"),
            Endpoint::Unix(path) => f.write_str(path),
        }
    }
}

/// The options that all connections of a store share.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// The user to log in as.
    pub user: Option<String>,
    /// The password.
    pub password: Option<Secret>,
    /// The number of the database.
    pub db: u32,
    /// TLS, if the connection is to be encrypted.
    pub tls: Option<Tls>,
    /// How long a server may be silent while a request is in flight, before the client closes the connection.
    pub timeout: Duration,
}

/// A message that a server sends without a request.
#[derive(Clone, Debug)]
pub enum PushEvent {
    /// A message on a subscribed channel.
    Message {
        /// The channel.
        channel: Vec<u8>,
        /// The payload.
        text: Vec<u8>,
    },
    /// The connection is closed, and its subscriptions ended with it.
    Disconnected,
}

/// Is called with every message, and with the end of the connection. It must not block.
pub type Listener = Arc<dyn Fn(PushEvent) + Send + Sync>;

/// Is called with the replies of the server at an endpoint to a [`ConnectHandshake`].
pub type HandshakeHandler =
    dyn Fn(&Endpoint, Vec<Result<Value, Failure>>) -> Result<(), Failure> + Send + Sync;

/// Commands that are sent on every new connection before any request, and the handler of their replies. If the handler
/// returns an error, the connection is closed.
#[derive(Clone)]
pub struct ConnectHandshake {
    /// The commands.
    pub commands: Arc<redis::Pipeline>,
    /// The handler.
    pub on_replies: Arc<HandshakeHandler>,
}

impl std::fmt::Debug for ConnectHandshake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ConnectHandshake")
    }
}

/// One connection to one server. Many tasks send requests on it at once. When it breaks, the next request connects again.
///
/// A connection never sends a request twice: a request in flight when the connection breaks ends as [`Failure::NoReply`].
pub struct Connection {
    dialer: Arc<Dialer>,
    io: Handle,
}

/// The part of a connection that it shares with the task that connects. The task goes on when the caller that started it is cancelled:
/// callers with a timeout shorter than a TLS handshake would otherwise never get a connection.
struct Dialer {
    endpoint: Endpoint,
    options: Arc<ConnectOptions>,
    listener: Option<Listener>,
    handshake: Option<ConnectHandshake>,
    state: Mutex<ConnState>,
    /// Held by the task that connects; other tasks wait for it.
    dialing: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct ConnState {
    open: Option<Arc<OpenConnection>>,
    /// When the last attempt to connect failed, and why: the next attempt waits for [`RECONNECT_DELAY`].
    failed: Option<(Instant, Failure)>,
}

/// An open connection and its requests in flight.
struct OpenConnection {
    connection: MultiplexedConnection,
    in_flight: Arc<InFlight>,
}

impl OpenConnection {
    async fn call(&self, command: &Cmd, endpoint: &Endpoint) -> Result<Value, Failure> {
        let request = self.in_flight.begin();
        let reply = self.connection.clone().send_packed_command(command).await;
        request.answered();
        classify_reply(reply, endpoint)
    }

    async fn calls(
        &self,
        commands: &redis::Pipeline,
        endpoint: &Endpoint,
    ) -> Result<Vec<Result<Value, Failure>>, Failure> {
        let request = self.in_flight.begin();
        let replies = self.connection.clone().send_packed_commands(commands, 0, commands.len()).await;
        request.answered();
        let replies = replies.map_err(|error| broken(&error, endpoint))?;
        Ok(replies.into_iter().map(|reply| classify_reply(Ok(reply), endpoint)).collect())
    }
}

fn classify_reply(reply: redis::RedisResult<Value>, endpoint: &Endpoint) -> Result<Value, Failure> {
    match reply {
        Ok(Value::ServerError(error)) => Err(Failure::from(error)),
        Ok(value) => Ok(value),
        Err(error) => match error.code() {
            Some(code) => {
                let detail = error.detail().unwrap_or_default().to_owned();
                Err(Failure::Rejected { code: code.to_owned(), detail })
            }
            None => Err(broken(&error, endpoint)),
        },
    }
}

fn broken(error: &redis::RedisError, endpoint: &Endpoint) -> Failure {
    Failure::NoReply(format!("the connection to {endpoint} broke: {error}"))
}

/// A reply as text, if it is one.
pub(crate) fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        Value::VerbatimString { text, .. } => Some(text.clone()),
        Value::Int(number) => Some(number.to_string()),
        _ => None,
    }
}

/// For how long a failure to connect is returned to other callers before the next attempt.
const RECONNECT_DELAY: Duration = Duration::from_millis(100);

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Connection({})", self.dialer.endpoint)
    }
}

impl Connection {
    /// A connection that is opened by its first request, on the thread of `io`.
    pub fn new(
        endpoint: Endpoint,
        options: Arc<ConnectOptions>,
        io: Handle,
        listener: Option<Listener>,
    ) -> Self {
        let (state, dialing) = (Mutex::default(), tokio::sync::Mutex::default());
        let dialer = Dialer { endpoint, options, listener, handshake: None, state, dialing };
        Connection { dialer: Arc::new(dialer), io }
    }

    /// The same connection with a handshake.
    ///
    /// # Panics
    /// If the connection has been used already.
    #[must_use]
    pub fn with_handshake(mut self, handshake: ConnectHandshake) -> Self {
        let dialer = Arc::get_mut(&mut self.dialer).expect("a connection that has not been used yet");
        dialer.handshake = Some(handshake);
        self
    }

    /// The server's endpoint.
    pub fn endpoint(&self) -> &Endpoint {
        &self.dialer.endpoint
    }

    /// Whether the connection is open, as far as the client knows.
    pub fn is_open(&self) -> bool {
        self.dialer.ready().is_some()
    }

    /// Sends one command and returns its reply.
    ///
    /// # Errors
    /// [`Failure`], which tells a request that was not sent from one that the server may have carried out.
    pub async fn call(&self, command: &Cmd) -> Result<Value, Failure> {
        let reply = self.open().await?.call(command, self.endpoint()).await;
        self.check_role(&reply);
        reply
    }

    /// Sends several commands with no command of another task in between, and returns their replies.
    ///
    /// # Errors
    /// [`Failure`] if the connection broke; the server's error for a single command is in the list.
    pub async fn calls(&self, commands: &redis::Pipeline) -> Result<Vec<Result<Value, Failure>>, Failure> {
        let replies = self.open().await?.calls(commands, self.endpoint()).await?;
        Ok(replies.into_iter().inspect(|reply| self.check_role(reply)).collect())
    }

    /// Disconnects from a server that has become a replica: the host name may resolve to the primary next time.
    fn check_role(&self, reply: &Result<Value, Failure>) {
        if reply.as_ref().is_err_and(|failure| failure.is("READONLY")) {
            self.disconnect();
        }
    }

    /// Drops the open connection. The next request connects again.
    pub fn disconnect(&self) {
        self.dialer.state().open = None;
    }

    async fn open(&self) -> Result<Arc<OpenConnection>, Failure> {
        if let Some(open) = self.dialer.ready() {
            return Ok(open);
        }
        let dialer = self.dialer.clone();
        let opened = self.io.spawn(async move { dialer.dial().await }).await;
        opened.unwrap_or_else(|_| Err(Failure::NotSent("the store is closed".into())))
    }
}

impl Dialer {
    fn state(&self) -> MutexGuard<'_, ConnState> {
        self.state.lock().ignore_poison()
    }

    fn ready(&self) -> Option<Arc<OpenConnection>> {
        let mut state = self.state();
        if state.open.as_ref().is_some_and(|open| open.in_flight.is_closed()) {
            state.open = None;
        }
        state.open.clone()
    }

    /// Connects, logs in and does the handshake. The connection's task runs on this runtime afterwards.
    async fn open(&self) -> Result<Arc<OpenConnection>, Failure> {
        let (endpoint, timeout) = (&self.endpoint, self.options.timeout);
        let opened = async {
            let open = connect(endpoint.clone(), &self.options, self.listener.clone()).await?;
            if let Some(ConnectHandshake { commands, on_replies }) = &self.handshake {
                let replies = open.calls(commands, endpoint).await;
                (*on_replies)(endpoint, replies.map_err(|_| self.no_reply())?)?;
            }
            Ok(open)
        };
        tokio::time::timeout(timeout, opened).await.unwrap_or_else(|_| Err(self.no_reply()))
    }

    fn no_reply(&self) -> Failure {
        let (endpoint, timeout) = (&self.endpoint, self.options.timeout);
        Failure::NotSent(format!("no Redis at {endpoint}: it did not answer within {timeout:?}"))
    }

    async fn dial(&self) -> Result<Arc<OpenConnection>, Failure> {
        let _dialing = self.dialing.lock().await;
        // Another task may have connected meanwhile, or may have just failed to.
        if let Some(open) = self.ready() {
            return Ok(open);
        }
        if let Some((when, failure)) = &self.state().failed
            && when.elapsed() < RECONNECT_DELAY
        {
            return Err(failure.clone());
        }
        let opened = self.open().await;
        let mut state = self.state();
        match opened {
            Ok(open) => {
                *state = ConnState { open: Some(open.clone()), failed: None };
                Ok(open)
            }
            Err(failure) => {
                state.failed = Some((Instant::now(), failure.clone()));
                Err(failure)
            }
        }
    }
}

async fn connect(
    endpoint: Endpoint,
    options: &ConnectOptions,
    listener: Option<Listener>,
) -> Result<Arc<OpenConnection>, Failure> {
    let unreachable = |error: io::Error| Failure::NotSent(format!("no Redis at {endpoint}: {error}"));
    match &endpoint {
        Endpoint::Unix(path) => {
            let stream = UnixStream::connect(path).await.map_err(unreachable)?;
            start(stream, &endpoint, options, listener).await
        }
        Endpoint::Tcp(host, port) => {
            let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(unreachable)?;
            stream.set_nodelay(true).map_err(unreachable)?;
            // The kernel notices a peer that vanished without a FIN also while no request is in flight.
            let keep = socket2::TcpKeepalive::new()
                .with_time(Duration::from_secs(10))
                .with_interval(Duration::from_secs(5));
            socket2::SockRef::from(&stream).set_tcp_keepalive(&keep).map_err(unreachable)?;
            match &options.tls {
                Some(tls) => {
                    let stream = tls.wrap(host, stream).await.map_err(unreachable)?;
                    start(stream, &endpoint, options, listener).await
                }
                None => start(stream, &endpoint, options, listener).await,
            }
        }
    }
}

/// Logs in and starts the task that drives the connection and watches for silence.
async fn start<S>(
    stream: S,
    endpoint: &Endpoint,
    options: &ConnectOptions,
    listener: Option<Listener>,
) -> Result<Arc<OpenConnection>, Failure>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let mut info =
        RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3).set_db(options.db.into());
    if let Some(user) = &options.user {
        info = info.set_username(user);
    }
    if let Some(password) = &options.password {
        info = info.set_password(password.expose());
    }
    // No timeout per request: `InFlight` below watches for silence on the connection as a whole.
    let mut config = AsyncConnectionConfig::new().set_response_timeout(None).set_pipeline_buffer_size(1024);
    if let Some(listener) = listener.clone() {
        config = config.set_push_sender(move |push: PushInfo| {
            if push.kind == PushKind::Message
                && let Ok([Value::BulkString(channel), Value::BulkString(text)]) =
                    <[Value; 2]>::try_from(push.data)
            {
                listener(PushEvent::Message { channel, text });
            }
            Ok::<(), std::convert::Infallible>(())
        });
    }
    let opened = MultiplexedConnection::new_with_config(&info, stream, config).await;
    let (connection, driver) =
        opened.map_err(|error| Failure::while_connecting(&error, &endpoint.to_string()))?;
    let in_flight = Arc::new(InFlight::default());
    let open = Arc::new(OpenConnection { connection, in_flight: in_flight.clone() });
    let (weak, timeout, name) = (Arc::downgrade(&open), options.timeout, endpoint.to_string());
    tokio::spawn(async move {
        tokio::select! {
            () = driver => {}
            () = in_flight.silence(timeout, || ping(weak.clone())) => {
                tracing::warn!(
                    server = name,
                    "no reply for {timeout:?}; closing the connection; the next request reconnects"
                );
            }
        }
        in_flight.close();
        if let Some(listener) = listener {
            listener(PushEvent::Disconnected);
        }
    });
    Ok(open)
}

/// Whether the server replies at all. The reference is weak, because the connection ends with its last caller.
async fn ping(open: Weak<OpenConnection>) -> bool {
    let Some(mut connection) = open.upgrade().map(|open| open.connection.clone()) else {
        return std::future::pending().await;
    };
    let reply = connection.send_packed_command(&cmd("PING")).await;
    reply.is_ok() || reply.is_err_and(|error| error.code().is_some())
}
