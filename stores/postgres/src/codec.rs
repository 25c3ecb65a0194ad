//! The encoding of requests and replies: hashes, terms, and the JSON of the SQL functions.

use lockkeeper_core::{
    Attempt, Busy, Error, Fence, Holder, HolderView, LockName, LockRequest, LockView, Mode, Result,
    WaiterView, WallTime,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// The hash by which the tables know an attempt. It cannot be reversed: a role that reads a table cannot act as a holder.
pub(crate) fn hash(attempt: &Attempt) -> Vec<u8> {
    let digest = ring::digest::digest(&ring::digest::SHA256, attempt.as_bytes());
    digest.as_ref()[..16].to_vec()
}

/// A hash in hexadecimal digits, as notifications contain it.
pub(crate) fn hex(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The terms of a request that the fast path does not handle; most requests have none.
pub(crate) fn terms(request: &LockRequest) -> Option<String> {
    let mut terms = serde_json::Map::new();
    let mut put = |key: &str, value: Value| _ = terms.insert(key.to_owned(), value);
    match request.mode {
        Mode::Exclusive => {}
        Mode::Shared => put("mode", json!(-1)),
        Mode::Permit(n) => put("mode", json!(n)),
    }
    if let Some(owner) = &request.owner {
        put("owner", json!(owner.to_hex()));
    }
    if !request.lock_delay.is_zero() {
        put("delay", json!(micros(request.lock_delay)));
    }
    if !request.min_hold.is_zero() {
        put("min", json!(micros(request.min_hold)));
    }
    if request.key.names.count() > 1 {
        put("names", request.key.names.iter().map(LockName::as_str).collect());
    }
    (!terms.is_empty()).then(|| Value::Object(terms).to_string())
}

pub(crate) fn micros(duration: std::time::Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// The holder as the tables keep it.
pub(crate) fn holder_text(holder: &Holder) -> String {
    serde_json::to_string(holder).unwrap_or_default()
}

pub(crate) fn holder(text: &str) -> Option<Holder> {
    serde_json::from_str(text).ok()
}

pub(crate) fn mode_of(number: i64) -> Mode {
    match number {
        0 => Mode::Exclusive,
        n => u32::try_from(n).map_or(Mode::Shared, Mode::Permit),
    }
}

pub(crate) fn fence(number: i64) -> Result<Fence> {
    u64::try_from(number).ok().map(Fence::new).unwrap_or_else(|| Err(unexpected_reply()))
}

/// The error for a reply that this client cannot read.
pub(crate) fn unexpected_reply() -> Error {
    crate::error::Failure::unexpected_reply().into()
}

/// The reply of the SQL function `inspect`.
#[derive(Deserialize)]
pub(crate) struct ViewJson {
    name: String,
    held: Vec<HolderJson>,
    waiting: usize,
    queue: Vec<WaiterJson>,
    delayed: Option<u64>,
}

#[derive(Deserialize)]
struct HolderJson {
    holder: String,
    fence: u64,
    mode: i64,
    since: u64,
    expires_in: u64,
    lingers: bool,
    revoked: Option<String>,
}

#[derive(Deserialize)]
struct WaiterJson {
    holder: String,
    mode: i64,
    since: u64,
}

impl ViewJson {
    pub fn parse(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|_| unexpected_reply())
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The view of the lock; `None` if it is free, without waiters and without a lock-delay.
    pub fn into_view(self) -> Result<Option<LockView>> {
        let idle = self.held.is_empty() && self.waiting == 0 && self.delayed.is_none();
        let view = LockView {
            name: LockName::new(&self.name)?,
            held: self.held.into_iter().map(HolderJson::into_view).collect::<Result<_>>()?,
            queue: self.queue.into_iter().map(WaiterJson::into_view).collect::<Result<_>>()?,
            waiting: self.waiting,
            delayed_ms: self.delayed.map(|us| us.div_ceil(1000)),
        };
        Ok((!idle).then_some(view))
    }

    pub fn into_busy(self) -> Result<Busy> {
        let held = self.held.into_iter().map(HolderJson::into_view).collect::<Result<_>>()?;
        Ok(Busy { name: LockName::new(&self.name)?, held, waiting: self.waiting })
    }
}

impl HolderJson {
    fn into_view(self) -> Result<HolderView> {
        Ok(HolderView {
            holder: holder(&self.holder).ok_or_else(unexpected_reply)?,
            fence: Fence::new(self.fence)?,
            mode: mode_of(self.mode),
            since: WallTime::from_micros(self.since),
            expires_in_ms: self.expires_in.div_ceil(1000),
            lingering: self.lingers,
            revoked: self.revoked,
        })
    }
}

impl WaiterJson {
    fn into_view(self) -> Result<WaiterView> {
        Ok(WaiterView {
            holder: holder(&self.holder).ok_or_else(unexpected_reply)?,
            mode: mode_of(self.mode),
            since: WallTime::from_micros(self.since),
        })
    }
}
