//! The connection to the cluster. The client talks to one member at a time, and fails over to the next when the member
//! is silent or says that it cannot serve. A failed channel is never reused: a hidden reconnect could repeat a request
//! that etcd has already applied.

use std::marker::PhantomData;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
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
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::config::Options;
use crate::error::Failure;
use crate::proto::{AuthenticateRequest, AuthenticateResponse, TxnResponse};
use lockkeeper_core::{Error, IgnorePoison, Result, Secret};
use lockkeeper_store_kit::SingleFlight;

/// A range with many values may be large.
const MAX_REPLY_BYTES: usize = 256 << 20;
/// etcd closes the connection of a client that pings more than once in five seconds.
const PING_INTERVAL: Duration = Duration::from_secs(10);

pub struct Connection {
    endpoints: Vec<(String, Endpoint)>,
    login: Option<(String, Secret)>,
    timeout: Duration,
    /// The index of the member in use, or of the one to try next.
    current: AtomicUsize,
    member: SingleFlight<MemberChannel, Failure>,
    token: Mutex<Option<String>>,
    /// Counts failed channels, so that streams on them are reopened on the next one.
    failed_channels: watch::Sender<u64>,
    /// The longest lease, in seconds, that etcd has given to a request for a shorter one.
    pub shortest_lease: AtomicU64,
}

/// A channel to one member.
#[derive(Clone)]
pub struct MemberChannel {
    number: u64,
    name: String,
    grpc: Channel,
}

impl Connection {
    pub fn new(options: &Options) -> Result<Self> {
        let scheme = if options.tls.is_some() { "https" } else { "http" };
        let mut endpoints = Vec::new();
        for server in &options.servers {
            let bad = |why: &dyn std::fmt::Display| Error::invalid(format!("{server} cannot be used: {why}"));
            let mut endpoint = Endpoint::from_shared(format!("{scheme}://{server}"))
                .map_err(|error| bad(&error))?
                .connect_timeout(options.timeout)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(PING_INTERVAL)
                .keep_alive_timeout(options.timeout)
                .keep_alive_while_idle(true);
            if let Some(tls) = &options.tls {
                endpoint = endpoint.tls_config(tls.clone()).map_err(|error| bad(&error))?;
            }
            endpoints.push((server.clone(), endpoint));
        }
        Ok(Connection {
            endpoints,
            login: options.login.clone(),
            timeout: options.timeout,
            current: AtomicUsize::new(0),
            member: SingleFlight::default(),
            token: Mutex::default(),
            failed_channels: watch::Sender::new(0),
            shortest_lease: AtomicU64::new(0),
        })
    }

    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Changes whenever a channel has failed.
    pub fn failed_channels(&self) -> watch::Receiver<u64> {
        self.failed_channels.subscribe()
    }

    /// A channel to a member that is reachable now.
    pub async fn channel(&self) -> Result<MemberChannel, Failure> {
        self.member.get(|_| true, || Box::pin(self.connect())).await
    }

    async fn connect(&self) -> Result<MemberChannel, Failure> {
        let mut last = String::new();
        for _ in 0..self.endpoints.len() {
            let (name, endpoint) =
                &self.endpoints[self.current.load(Ordering::Relaxed) % self.endpoints.len()];
            match tokio::time::timeout(self.timeout, endpoint.connect()).await {
                Ok(Ok(grpc)) => {
                    return Ok(MemberChannel {
                        number: *self.failed_channels.borrow(),
                        name: name.clone(),
                        grpc,
                    });
                }
                Ok(Err(error)) => last = format!("no etcd at {name}: {}", innermost_cause(&error)),
                Err(_) => last = format!("no etcd at {name}: no connection within {:?}", self.timeout),
            }
            self.current.fetch_add(1, Ordering::Relaxed);
        }
        Err(Failure::NotSent(last))
    }

    /// Gives this channel up and selects the next member.
    pub async fn fail_over(&self, channel: &MemberChannel) {
        let same = |now: &MemberChannel| now.number == channel.number;
        let next = || {
            self.current.fetch_add(1, Ordering::Relaxed);
            self.failed_channels.send_modify(|count| *count += 1);
        };
        self.member.forget(same, next).await;
    }

    /// One request and its reply.
    pub async fn call<A, B>(&self, path: &'static str, request: &A) -> Result<B, Failure>
    where
        A: Message,
        B: Message + Default + 'static,
    {
        self.send(path, request.encode_to_vec().into()).await
    }

    /// Sends a request, and logs in again if etcd rejects it because the login has expired.
    async fn send<B: Message + Default + 'static>(
        &self,
        path: &'static str,
        request: Bytes,
    ) -> Result<B, Failure> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let channel = self.channel().await?;
            let reply = match self.login(&channel).await {
                Ok(()) => self.call_at(&channel, path, request.clone()).await,
                Err(failure) => Err(failure),
            };
            match reply {
                Err(failure) if attempts == 1 && failure.needs_login() && self.login.is_some() => {
                    self.forget_login()
                }
                // etcd has applied nothing: another member may be reachable.
                Err(Failure::NotSent(_)) if attempts < self.endpoints.len().max(2) => {
                    self.fail_over(&channel).await
                }
                Err(failure) => {
                    if failure.concerns_member() {
                        self.fail_over(&channel).await;
                    }
                    return Err(failure);
                }
                Ok(reply) => return Ok(reply),
            }
        }
    }

    async fn call_at<B: Message + Default + 'static>(
        &self,
        channel: &MemberChannel,
        path: &'static str,
        request: Bytes,
    ) -> Result<B, Failure> {
        let request = self.with_metadata(request);
        let call = async move |mut grpc: Grpc<Channel>| {
            grpc.unary(request, PathAndQuery::from_static(path), PreEncoded(PhantomData::<B>)).await
        };
        self.within_timeout(channel, call).await
    }

    /// Opens a stream in both directions. `requests` should already hold one: etcd sends no response headers before
    /// the first request.
    pub async fn stream<A, B>(
        &self,
        channel: &MemberChannel,
        path: &'static str,
        requests: impl Stream<Item = A> + Send + 'static,
    ) -> Result<Streaming<B>, Failure>
    where
        A: Message + Default + 'static,
        B: Message + Default + 'static,
    {
        self.login(channel).await?;
        let requests = self.with_metadata(requests);
        let open = async move |mut grpc: Grpc<Channel>| {
            grpc.streaming(requests, PathAndQuery::from_static(path), ProstCodec::<A, B>::default()).await
        };
        self.within_timeout(channel, open).await
    }

    /// Runs a call when the channel is ready for it.
    async fn within_timeout<T>(
        &self,
        channel: &MemberChannel,
        call: impl AsyncFnOnce(Grpc<Channel>) -> Result<Response<T>, Status>,
    ) -> Result<T, Failure> {
        let mut grpc = Grpc::new(channel.grpc.clone()).max_decoding_message_size(MAX_REPLY_BYTES);
        let reply = async {
            let not_ready =
                |error| Failure::NotSent(format!("{}: {}", channel.name, innermost_cause(&error)));
            grpc.ready().await.map_err(not_ready)?;
            call(grpc).await.map(Response::into_inner).map_err(|status| Failure::of(&status, &channel.name))
        };
        let silent = |_| Failure::NoReply(format!("{}: no reply within {:?}", channel.name, self.timeout));
        tokio::time::timeout(self.timeout, reply).await.map_err(silent)?
    }

    /// A transaction that is already encoded.
    pub async fn txn(&self, txn: Bytes) -> Result<TxnResponse, Failure> {
        self.send("/etcdserverpb.KV/Txn", txn).await
    }

    async fn login(&self, channel: &MemberChannel) -> Result<(), Failure> {
        let Some((user, password)) = &self.login else { return Ok(()) };
        if self.token().is_some() {
            return Ok(());
        }
        let request = AuthenticateRequest { name: user.clone(), password: password.expose().to_owned() };
        let reply: AuthenticateResponse =
            self.call_at(channel, "/etcdserverpb.Auth/Authenticate", request.encode_to_vec().into()).await?;
        *self.token.lock().ignore_poison() = Some(reply.token);
        Ok(())
    }

    fn token(&self) -> Option<String> {
        self.token.lock().ignore_poison().clone()
    }

    pub fn forget_login(&self) {
        *self.token.lock().ignore_poison() = None;
    }

    /// Adds the login token, and asks a member without a leader to reject the request.
    fn with_metadata<T>(&self, request: T) -> Request<T> {
        let mut request = Request::new(request);
        request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
        if let Some(token) = self.token().and_then(|token| token.parse().ok()) {
            request.metadata_mut().insert("token", token);
        }
        request
    }
}

/// A codec for encoded requests, so that a retry does not encode again.
struct PreEncoded<B>(PhantomData<B>);

struct PreEncodedEncoder;

impl<B: Message + Default + 'static> Codec for PreEncoded<B> {
    type Encode = Bytes;
    type Decode = B;
    type Encoder = PreEncodedEncoder;
    type Decoder = <ProstCodec<(), B> as Codec>::Decoder;

    fn encoder(&mut self) -> PreEncodedEncoder {
        PreEncodedEncoder
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<(), B>::default().decoder()
    }
}

impl Encoder for PreEncodedEncoder {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(item);
        Ok(())
    }
}

/// The innermost error: the outer ones only say that something failed.
fn innermost_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut inner = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}
