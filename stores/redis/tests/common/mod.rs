//! Tools of the tests with real servers.
#![allow(dead_code, reason = "every test uses some of it")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper::{Lockkeeper, SystemClock};
use lockkeeper_core::{Error, Fence, Grant, LockRequest, Outcome, Purpose, RenewOutcome, Result, Store};
use lockkeeper_redis::{Options, RedisStore};
use lockkeeper_testkit::laws::{request, soon, with};
use lockkeeper_testkit::servers::{Server, redis_call};

/// One client: a store with connections of its own.
pub type Client = Arc<dyn Store>;

pub async fn try_open(url: &str) -> Result<Client> {
    let options = Options::from_url(url)?;
    let store = soon("the store opens, or says why not", RedisStore::open(options)).await?;
    Ok(Arc::new(store))
}

/// A server on a busy machine may need longer than a short `timeout` for its first answer.
pub async fn open(url: &str) -> Client {
    let opened = async {
        loop {
            match try_open(url).await {
                Ok(store) => return store,
                Err(Error::Unavailable(_) | Error::Unknown(_)) => {}
                Err(error) => panic!("{url} was to open: {error:?}"),
            }
        }
    };
    soon("the store opens", opened).await
}

/// The error of `open`.
pub async fn refused_at_open(url: &str) -> Error {
    match try_open(url).await {
        Ok(store) => panic!("{url} was not to open: {:?}", store.profile()),
        Err(error) => error,
    }
}

/// The store of one server.
pub async fn client_of(server: &Server) -> Client {
    open(&url(server)).await
}

pub fn url(server: &Server) -> String {
    format!("redis://{}", server.addr())
}

pub fn keeper(store: &Client) -> Lockkeeper {
    Lockkeeper::with_store(store.clone(), Arc::new(SystemClock))
}

/// A command of a client who runs the server: it must work.
pub fn tell(addr: SocketAddr, command: &[&str]) -> String {
    redis_call(addr, command).unwrap_or_else(|e| panic!("{addr} refuses {command:?}: {e}"))
}

/// How many milliseconds a key has left.
pub fn pttl(addr: SocketAddr, key: &str) -> i64 {
    tell(addr, &["PTTL", key]).parse().expect("PTTL is a number")
}

pub fn ask_for(text: &str, ttl: Duration) -> LockRequest {
    with(request(text), |request| request.ttl = ttl)
}

/// The error with which a request ends.
pub async fn failed(store: &Client, request: &LockRequest) -> Error {
    match soon("the request ends", store.acquire(request)).await {
        Err(error) => error,
        Ok(answer) => panic!("the request was to fail: {answer:?}"),
    }
}

/// The error is of this kind, and its text has all of these words in it.
#[track_caller]
pub fn says(error: &Error, outcome: Outcome, words: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.outcome(), outcome, "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
}

/// The store may not be used for correctness, and the reason has all of these words in it.
#[track_caller]
pub fn not_for_correctness(store: &Client, words: &[&str]) {
    let refused = store.profile().allows(Purpose::Correctness);
    says(&refused.expect_err("it is not for correctness"), Outcome::Unsupported, words);
}

pub async fn renew(store: &Client, grant: &Grant) -> RenewOutcome {
    let answer = soon("a renewal is answered", store.renew(std::slice::from_ref(grant))).await;
    answer.expect("a renewal works").remove(0)
}

/// Every fence is higher than the one before.
#[track_caller]
pub fn grow(fences: &[Fence]) {
    assert!(fences.is_sorted_by(|a, b| a < b), "fences go back: {fences:?}");
}
