//! The connection to the cluster. One member at a time is talked to; when it is silent, or says that it cannot, the next
//! one is. A channel that failed is thrown away, so that what a request means is never up to a hidden reconnect.

use std::marker::PhantomData;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_core::Stream;
use prost::Message;
use prost::bytes::{BufMut, Bytes};
use tokio::sync::watch;
use tonic::client::Grpc;
use tonic::codec::{Codec, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::config::Options;
use crate::fault::Failure;
use crate::proto::{AuthenticateRequest, AuthenticateResponse, TxnResponse};
use crate::turns::Turns;
use lockkeeper_core::{Error, Result, Secret};

/// A range with many values in it may be large.
const LARGEST: usize = 256 << 20;
/// etcd takes more than one ping in five seconds for an attack.
const PING: Duration = Duration::from_secs(10);

pub struct Link {
    endpoints: Vec<(String, Endpoint)>,
    login: Option<(String, Secret)>,
    timeout: Duration,
    /// Which of them is talked to, or tried next.
    at: AtomicUsize,
    channel: Turns<Session>,
    token: Mutex<Option<String>>,
    /// Counts the channels that were thrown away: streams on them look for another one.
    dropped: watch::Sender<u64>,
}

/// A channel to one member.
#[derive(Clone)]
pub struct Session {
    number: u64,
    name: String,
    channel: Channel,
}

impl Link {
    pub fn new(options: &Options) -> Result<Self> {
        let scheme = if options.tls.is_some() { "https" } else { "http" };
        let mut endpoints = Vec::new();
        for server in &options.servers {
            let bad = |why: &dyn std::fmt::Display| Error::invalid(format!("{server} cannot be used: {why}"));
            let mut endpoint = Endpoint::from_shared(format!("{scheme}://{server}"))
                .map_err(|why| bad(&why))?
                .connect_timeout(options.timeout)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(PING)
                .keep_alive_timeout(options.timeout)
                .keep_alive_while_idle(true);
            if let Some(tls) = &options.tls {
                endpoint = endpoint.tls_config(tls.clone()).map_err(|why| bad(&why))?;
            }
            endpoints.push((server.clone(), endpoint));
        }
        Ok(Link {
            endpoints,
            login: options.login.clone(),
            timeout: options.timeout,
            at: AtomicUsize::new(0),
            channel: Turns::default(),
            token: Mutex::default(),
            dropped: watch::Sender::new(0),
        })
    }

    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Tells whenever a channel was thrown away.
    pub fn dropped(&self) -> watch::Receiver<u64> {
        self.dropped.subscribe()
    }

    /// A channel to a member that can be reached, whoever that is now.
    pub async fn session(&self) -> Result<Session, Failure> {
        self.channel.get(|_| true, || Box::pin(self.connect())).await
    }

    async fn connect(&self) -> Result<Session, Failure> {
        let mut last = String::new();
        for _ in 0..self.endpoints.len() {
            let (name, endpoint) = &self.endpoints[self.at.load(Ordering::Relaxed) % self.endpoints.len()];
            match tokio::time::timeout(self.timeout, endpoint.connect()).await {
                Ok(Ok(channel)) => {
                    return Ok(Session { number: *self.dropped.borrow(), name: name.clone(), channel });
                }
                Ok(Err(error)) => last = format!("no etcd at {name}: {}", why(&error)),
                Err(_) => last = format!("no etcd at {name}: no connection within {:?}", self.timeout),
            }
            self.at.fetch_add(1, Ordering::Relaxed);
        }
        Err(Failure::Away(last))
    }

    /// This channel is no good: the next member is tried.
    pub async fn give_up(&self, session: &Session) {
        let same = |now: &Session| now.number == session.number;
        let next = || {
            self.at.fetch_add(1, Ordering::Relaxed);
            self.dropped.send_modify(|count| *count += 1);
        };
        self.channel.forget(same, next).await;
    }

    /// One question, one answer.
    pub async fn call<A, B>(&self, path: &'static str, ask: &A) -> Result<B, Failure>
    where
        A: Message,
        B: Message + Default + 'static,
    {
        self.send(path, ask.encode_to_vec().into()).await
    }

    /// What was refused for want of a fresh login is asked again with one.
    async fn send<B: Message + Default + 'static>(
        &self,
        path: &'static str,
        ask: Bytes,
    ) -> Result<B, Failure> {
        let mut tries = 0;
        loop {
            tries += 1;
            let session = self.session().await?;
            let answer = match self.login(&session).await {
                Ok(()) => self.call_at(&session, path, ask.clone()).await,
                Err(failure) => Err(failure),
            };
            match answer {
                Err(failure) if tries == 1 && failure.wants_login() && self.login.is_some() => {
                    self.forget_login()
                }
                // Nothing has happened: another member may be there.
                Err(Failure::Away(_)) if tries < self.endpoints.len().max(2) => self.give_up(&session).await,
                Err(failure) => {
                    if failure.is_of_the_server() {
                        self.give_up(&session).await;
                    }
                    return Err(failure);
                }
                Ok(answer) => return Ok(answer),
            }
        }
    }

    async fn call_at<B>(&self, session: &Session, path: &'static str, ask: Bytes) -> Result<B, Failure>
    where
        B: Message + Default + 'static,
    {
        let mut grpc = Grpc::new(session.channel.clone()).max_decoding_message_size(LARGEST);
        let call = async {
            grpc.ready()
                .await
                .map_err(|error| Failure::Away(format!("{}: {}", session.name, why(&error))))?;
            let request = self.signed(ask);
            let codec = Written(PhantomData::<B>);
            let answer = grpc.unary(request, PathAndQuery::from_static(path), codec).await;
            answer.map(tonic::Response::into_inner).map_err(|status| Failure::of(&status, &session.name))
        };
        match tokio::time::timeout(self.timeout, call).await {
            Ok(answer) => answer,
            Err(_) => Err(Failure::Unheard(format!("{}: no answer within {:?}", session.name, self.timeout))),
        }
    }

    /// Opens a stream both ways. There should be something to send already: etcd says nothing before it has heard something.
    pub async fn stream<A, B>(
        &self,
        session: &Session,
        path: &'static str,
        asks: impl Stream<Item = A> + Send + 'static,
    ) -> Result<Streaming<B>, Failure>
    where
        A: Message + Default + 'static,
        B: Message + Default + 'static,
    {
        self.login(session).await?;
        let mut grpc = Grpc::new(session.channel.clone()).max_decoding_message_size(LARGEST);
        let open = async {
            grpc.ready()
                .await
                .map_err(|error| Failure::Away(format!("{}: {}", session.name, why(&error))))?;
            let codec = ProstCodec::<A, B>::default();
            let answer = grpc.streaming(self.signed(asks), PathAndQuery::from_static(path), codec).await;
            answer.map(tonic::Response::into_inner).map_err(|status| Failure::of(&status, &session.name))
        };
        match tokio::time::timeout(self.timeout, open).await {
            Ok(answer) => answer,
            Err(_) => Err(Failure::Unheard(format!("{}: no stream within {:?}", session.name, self.timeout))),
        }
    }

    /// A transaction that is written down already.
    pub async fn txn(&self, txn: Bytes) -> Result<TxnResponse, Failure> {
        self.send("/etcdserverpb.KV/Txn", txn).await
    }

    async fn login(&self, session: &Session) -> Result<(), Failure> {
        let Some((user, password)) = &self.login else { return Ok(()) };
        if self.token().is_some() {
            return Ok(());
        }
        let ask = AuthenticateRequest { name: user.clone(), password: password.expose().to_owned() };
        let answer: AuthenticateResponse =
            self.call_at(session, "/etcdserverpb.Auth/Authenticate", ask.encode_to_vec().into()).await?;
        *self.token.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(answer.token);
        Ok(())
    }

    fn token(&self) -> Option<String> {
        self.token.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    pub fn forget_login(&self) {
        *self.token.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = None;
    }

    /// With the proof of the login, and with the wish not to be served by a member that has no leader.
    fn signed<T>(&self, ask: T) -> Request<T> {
        let mut request = Request::new(ask);
        request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
        if let Some(token) = self.token().and_then(|token| token.parse().ok()) {
            request.metadata_mut().insert("token", token);
        }
        request
    }
}

/// Sends what is written already: asking again costs nothing then.
struct Written<B>(PhantomData<B>);

struct WrittenEncoder;

impl<B: Message + Default + 'static> Codec for Written<B> {
    type Encode = Bytes;
    type Decode = B;
    type Encoder = WrittenEncoder;
    type Decoder = <ProstCodec<(), B> as Codec>::Decoder;

    fn encoder(&mut self) -> WrittenEncoder {
        WrittenEncoder
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<(), B>::default().decoder()
    }
}

impl Encoder for WrittenEncoder {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(item);
        Ok(())
    }
}

/// The innermost reason: what stands around it says only that something failed.
fn why(error: &(dyn std::error::Error + 'static)) -> String {
    let mut inner = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}
