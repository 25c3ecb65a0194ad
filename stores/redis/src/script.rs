//! Exactly what we say to Redis.

use std::sync::LazyLock;

use redis::{Arg, Cmd, Script, ToRedisArgs, Value, cmd};

use crate::fault::Failure;
use crate::fleet::{Fleet, Split};
use crate::link::Link;

/// A script and its hash.
pub struct Lua {
    code: &'static str,
    hash: LazyLock<String>,
}

macro_rules! lua {
    ($name:ident, $($part:literal),+) => {
        pub static $name: Lua = {
            const CODE: &str = concat!($(include_str!(concat!("lua/", $part, ".lua"))),+);
            Lua { code: CODE, hash: LazyLock::new(|| Script::new(CODE).get_hash().to_owned()) }
        };
    };
}

lua!(ACQUIRE, "acquire_head", "common", "acquire");
lua!(RELEASE, "release_head", "common", "release");
lua!(RENEW, "renew_head", "common", "renew");
lua!(BREAK, "break_head", "common", "break");
lua!(REVOKE, "revoke_head", "common", "revoke");
lua!(POLL, "poll_head", "common", "poll");
lua!(INSPECT, "inspect");
lua!(WRITE, "write");
lua!(SPLIT_LOCK, "split_head", "common", "split_tools", "split_lock");
lua!(SPLIT_HOLDS, "split_head", "common", "split_tools", "split_holds");
lua!(SPLIT_ENDS, "split_ends");
lua!(SPLIT_QUEUE, "split_queue");
lua!(SPLIT_TOMBSTONE, "split_tombstone");
lua!(SPLIT_FENCE, "split_fence");

/// Teaches a server all of them, so that the first calls need not. One that has forgotten them is taught again.
pub async fn teach(server: &Link) -> Result<(), Failure> {
    let usual = [&ACQUIRE, &RELEASE, &RENEW, &BREAK, &REVOKE, &POLL, &INSPECT, &WRITE];
    let split = [&SPLIT_LOCK, &SPLIT_HOLDS, &SPLIT_ENDS, &SPLIT_QUEUE, &SPLIT_TOMBSTONE, &SPLIT_FENCE];
    let all = usual.into_iter().chain(split);
    let mut lessons = redis::Pipeline::with_capacity(usual.len() + split.len());
    for lua in all {
        lessons.cmd("SCRIPT").arg("LOAD").arg(lua.code);
    }
    server.calls(&lessons).await.map(|_| ())
}

/// A call of a script with its keys and arguments.
pub struct Call {
    lua: &'static Lua,
    /// By the script's hash, which the server may have forgotten.
    pub by_hash: Cmd,
}

impl Call {
    pub fn new<K: ToRedisArgs>(lua: &'static Lua, keys: &[K]) -> Self {
        let mut by_hash = cmd("EVALSHA");
        by_hash.arg(lua.hash.as_str()).arg(keys.len()).arg(keys);
        Call { lua, by_hash }
    }

    pub fn arg(mut self, part: impl ToRedisArgs) -> Self {
        self.by_hash.arg(part);
        self
    }

    /// The call with the whole script, which also teaches it to the server.
    pub fn in_full(&self) -> Cmd {
        let mut full = cmd("EVAL");
        full.arg(self.lua.code);
        for part in self.by_hash.args_iter().skip(2) {
            if let Arg::Simple(part) = part {
                full.arg(part);
            }
        }
        full
    }

    /// Runs it where `slot` is. While the slot moves and the keys are on two nodes, it is sent again for a while.
    pub async fn run(&self, fleet: &Fleet, slot: u16) -> Result<Value, Failure> {
        self.run_when(fleet, slot, Split::SendAgain).await
    }

    pub async fn run_when(&self, fleet: &Fleet, slot: u16, split: Split) -> Result<Value, Failure> {
        match fleet.call_when(slot, &self.by_hash, split).await {
            // A restart, a fail-over or SCRIPT FLUSH. Nothing has happened yet.
            Err(failure) if failure.is("NOSCRIPT") => fleet.call_when(slot, &self.in_full(), split).await,
            answer => answer,
        }
    }
}
