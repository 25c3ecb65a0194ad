//! Plain values with a fence beside each: a value under the user's own key, which every Redis client can read, and its
//! fence (fencing token) in a key of its own.

use std::time::Duration;

use lockkeeper_core::{Error, Fence, LockName, Result};
use lockkeeper_store_kit::IoThread;
use redis::{Value, cmd};

use crate::config::Options;
use crate::error::unexpected_reply;
use crate::keys::KeyGroup;
use crate::router::Router;
use crate::runner::ScriptRunner;
use crate::statements::{PUT_VALUE, ScriptCall, millis};

/// How much longer than its value the server keeps a fence: longer than a request can be in flight.
const FENCE_OUTLIVES: Duration = Duration::from_secs(60 * 60);

/// Values in Redis that a late writer cannot overwrite. It takes any server that a cache may use, also one that evicts keys.
pub struct FencedValues {
    runner: ScriptRunner,
    // Last, because dropping it ends the thread.
    _io: IoThread,
}

impl std::fmt::Debug for FencedValues {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FencedValues({:?})", self.runner.options.servers)
    }
}

impl FencedValues {
    /// Connects. [`Options::prefix`] stands before the key of each value.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if no server replies, [`Error::Denied`] if the password is wrong.
    pub async fn open(options: Options) -> Result<Self> {
        options.check()?;
        let io = IoThread::start("lockkeeper-values")
            .map_err(|error| Error::Unavailable(format!("no thread for the connection: {error}")))?;
        let (servers, access) = (options.servers.clone(), options.access.clone());
        let router = Router::new(servers, access, io.handle().clone(), None, None);
        let values = FencedValues { runner: ScriptRunner::new(options, router), _io: io };
        values.runner.router.call_any(&cmd("PING")).await?;
        Ok(values)
    }

    /// A value and its fence, read in one step.
    ///
    /// # Errors
    /// As every call; [`Error::Invalid`] if the key is not a name.
    pub async fn get(&self, key: &str) -> Result<Option<(Vec<u8>, Fence)>> {
        let (group, keys) = self.keys(key)?;
        let mut read = cmd("MGET");
        read.arg(&keys);
        match self.runner.router.call(group.slot(), &read).await? {
            Value::Array(found) => match &found[..] {
                [Value::BulkString(value), Value::BulkString(fence)] => {
                    Ok(Some((value.clone(), parse_fence(fence)?)))
                }
                [_, _] => Ok(None),
                _ => Err(unexpected_reply()),
            },
            _ => Err(unexpected_reply()),
        }
    }

    /// Stores a value for `ttl`, unless the server has a newer fence for its key. `Ok(Err(fence))`: it has, and this is the
    /// fence.
    ///
    /// # Errors
    /// As every call; [`Error::Invalid`] if the key is not a name.
    pub async fn put(
        &self,
        key: &str,
        value: &[u8],
        fence: Fence,
        ttl: Duration,
    ) -> Result<Result<(), Fence>> {
        let (group, keys) = self.keys(key)?;
        let call = ScriptCall::new(&PUT_VALUE, &keys)
            .arg(format!("{:016}", fence.get()))
            .arg(millis(ttl))
            .arg(millis(ttl.saturating_add(FENCE_OUTLIVES)))
            .arg(value);
        match self.runner.run(group, &call).await? {
            Value::BulkString(newer) if newer.is_empty() => Ok(Ok(())),
            Value::BulkString(newer) => Ok(Err(parse_fence(&newer)?)),
            _ => Err(unexpected_reply()),
        }
    }

    /// The key of a value and the key of its fence, which is in the same hash slot.
    fn keys(&self, key: &str) -> Result<(KeyGroup, [String; 2])> {
        let (keys, name) = (&self.runner.keys, LockName::new(key)?);
        let (group, value) = (keys.group(&name), keys.lock_key(&name));
        let fence = format!("{}value-fence:{value}", keys.group_prefix(group));
        Ok((group, [value, fence]))
    }
}

fn parse_fence(text: &[u8]) -> Result<Fence> {
    let number = std::str::from_utf8(text).ok().and_then(|digits| digits.parse().ok());
    Fence::new(number.ok_or_else(unexpected_reply)?)
}
