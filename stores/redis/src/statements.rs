//! The scripts of this store, and how a call of one is built and sent.

use std::sync::LazyLock;
use std::time::Duration;

use redis::{Arg, Cmd, Script, ToRedisArgs, Value, cmd};

use crate::connection::Connection;
use crate::error::Failure;
use crate::router::{OnSplitKeys, Router};

/// A script and its SHA-1 hash.
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
lua!(LIMIT, "limit");
lua!(PUT_VALUE, "put_value");
// One key each, for locks whose slot is being migrated: see `slot_migration.rs`.
lua!(MIGRATING_LOCK, "migrating_head", "common", "migrating_tools", "migrating_lock");
lua!(MIGRATING_HOLDS, "migrating_head", "common", "migrating_tools", "migrating_holds");
lua!(MIGRATING_ENDS, "migrating_ends");
lua!(MIGRATING_QUEUE, "migrating_queue");
lua!(MIGRATING_TOMBSTONE, "migrating_tombstone");
lua!(MIGRATING_FENCE, "migrating_fence");

/// Loads all scripts into a server's script cache, so that the first calls find them there.
pub async fn load_scripts(server: &Connection) -> Result<(), Failure> {
    let usual = [&ACQUIRE, &RELEASE, &RENEW, &BREAK, &REVOKE, &POLL, &INSPECT, &WRITE, &LIMIT];
    let migrating = [
        &MIGRATING_LOCK,
        &MIGRATING_HOLDS,
        &MIGRATING_ENDS,
        &MIGRATING_QUEUE,
        &MIGRATING_TOMBSTONE,
        &MIGRATING_FENCE,
    ];
    let mut loads = redis::Pipeline::with_capacity(usual.len() + migrating.len());
    for lua in usual.into_iter().chain(migrating) {
        loads.cmd("SCRIPT").arg("LOAD").arg(lua.code);
    }
    server.calls(&loads).await.map(|_| ())
}

/// A call of a script with its keys and arguments.
pub struct ScriptCall {
    lua: &'static Lua,
    /// `EVALSHA`, which fails with `NOSCRIPT` if the server does not have the script in its cache.
    pub by_hash: Cmd,
}

impl ScriptCall {
    pub fn new<K: ToRedisArgs>(lua: &'static Lua, keys: &[K]) -> Self {
        let mut by_hash = cmd("EVALSHA");
        by_hash.arg(lua.hash.as_str()).arg(keys.len()).arg(keys);
        ScriptCall { lua, by_hash }
    }

    pub fn arg(mut self, part: impl ToRedisArgs) -> Self {
        self.by_hash.arg(part);
        self
    }

    /// `EVAL` with the source of the script, which also puts it into the server's cache.
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

    /// Runs the script on the node of `slot`.
    pub async fn run(&self, router: &Router, slot: u16, split: OnSplitKeys) -> Result<Value, Failure> {
        match router.call_when(slot, &self.by_hash, split).await {
            // After a restart, a fail-over or `SCRIPT FLUSH`. The server has not run anything yet.
            Err(failure) if failure.is("NOSCRIPT") => router.call_when(slot, &self.in_full(), split).await,
            reply => reply,
        }
    }
}

/// A duration as the scripts take it.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
