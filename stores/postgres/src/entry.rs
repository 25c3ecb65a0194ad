//! What goes over the wire, and back: hashes, terms, and the JSON of the functions.

use lockkeeper_core::{
    Ask, Attempt, Busy, Error, Fence, Held, Holder, LockName, LockView, Mode, Queued, Result, Wall,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// What the tables know an attempt by. It cannot be turned round: reading a table is not holding a lock.
pub(crate) fn hash(attempt: &Attempt) -> Vec<u8> {
    let digest = ring::digest::digest(&ring::digest::SHA256, attempt.as_bytes());
    digest.as_ref()[..16].to_vec()
}

/// The same in digits, as messages have it.
pub(crate) fn hex(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What is unusual about an ask; most have nothing.
pub(crate) fn terms(ask: &Ask) -> Option<String> {
    let mut terms = serde_json::Map::new();
    let mut put = |key: &str, value: Value| _ = terms.insert(key.to_owned(), value);
    match ask.mode {
        Mode::Exclusive => {}
        Mode::Shared => put("mode", json!(-1)),
        Mode::Permit(n) => put("mode", json!(n)),
    }
    if let Some(owner) = &ask.owner {
        put("owner", json!(owner.to_hex()));
    }
    if !ask.lock_delay.is_zero() {
        put("delay", json!(micros(ask.lock_delay)));
    }
    if !ask.min_hold.is_zero() {
        put("min", json!(micros(ask.min_hold)));
    }
    if ask.claim.names.count() > 1 {
        put("names", ask.claim.names.iter().map(LockName::as_str).collect());
    }
    (!terms.is_empty()).then(|| Value::Object(terms).to_string())
}

pub(crate) fn micros(span: std::time::Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

/// The holder as it is written down.
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
    u64::try_from(number).ok().map(Fence::new).unwrap_or_else(|| Err(odd()))
}

/// An answer that we did not expect.
pub(crate) fn odd() -> Error {
    Error::Unknown("PostgreSQL gave an answer that makes no sense".into())
}

/// What `view` says.
#[derive(Deserialize)]
pub(crate) struct Shown {
    name: String,
    held: Vec<ShownHeld>,
    waiting: usize,
    line: Vec<ShownQueued>,
    delayed: Option<u64>,
}

#[derive(Deserialize)]
struct ShownHeld {
    holder: String,
    fence: u64,
    mode: i64,
    since: u64,
    left: u64,
    lingers: bool,
    revoked: Option<String>,
}

#[derive(Deserialize)]
struct ShownQueued {
    holder: String,
    mode: i64,
    since: u64,
}

impl Shown {
    pub fn read(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|_| odd())
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// As a view; `None` if there is nothing to see.
    pub fn view(self) -> Result<Option<LockView>> {
        let nothing = self.held.is_empty() && self.waiting == 0 && self.delayed.is_none();
        let view = LockView {
            name: LockName::new(&self.name)?,
            held: self.held.into_iter().map(ShownHeld::held).collect::<Result<_>>()?,
            line: self.line.into_iter().map(ShownQueued::queued).collect::<Result<_>>()?,
            waiting: self.waiting,
            delayed_ms: self.delayed.map(|us| us.div_ceil(1000)),
        };
        Ok((!nothing).then_some(view))
    }

    pub fn busy(self) -> Result<Busy> {
        let held = self.held.into_iter().map(ShownHeld::held).collect::<Result<_>>()?;
        Ok(Busy { name: LockName::new(&self.name)?, held, waiting: self.waiting })
    }
}

impl ShownHeld {
    fn held(self) -> Result<Held> {
        Ok(Held {
            holder: holder(&self.holder).ok_or_else(odd)?,
            fence: Fence::new(self.fence)?,
            mode: mode_of(self.mode),
            since: Wall::from_micros(self.since),
            expires_in_ms: self.left.div_ceil(1000),
            lingering: self.lingers,
            revoked: self.revoked,
        })
    }
}

impl ShownQueued {
    fn queued(self) -> Result<Queued> {
        Ok(Queued {
            holder: holder(&self.holder).ok_or_else(odd)?,
            mode: mode_of(self.mode),
            since: Wall::from_micros(self.since),
        })
    }
}
