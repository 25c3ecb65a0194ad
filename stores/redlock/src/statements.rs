//! The Lua scripts that the store runs on a node.

use std::sync::LazyLock;
use std::time::Duration;

use lockkeeper_redis::{Connection, Failure};
use redis::{Arg, Cmd, Script, ToRedisArgs, Value, cmd};

/// A script and its hash.
pub struct Lua {
    code: &'static str,
    hash: LazyLock<String>,
    /// Whether its reads, and any write that the node may refuse, come before the writes that take effect: then an error has changed
    /// nothing.
    all_or_nothing: bool,
}

macro_rules! lua {
    ($name:ident, $file:literal) => {
        lua!($name, $file, all_or_nothing: false);
    };
    ($name:ident, $file:literal, all_or_nothing: $whole:literal) => {
        pub static $name: Lua = {
            const CODE: &str =
                concat!(include_str!("lua/common.lua"), include_str!(concat!("lua/", $file, ".lua")));
            Lua {
                code: CODE,
                hash: LazyLock::new(|| Script::new(CODE).get_hash().to_owned()),
                all_or_nothing: $whole,
            }
        };
    };
}

lua!(LOCK, "lock", all_or_nothing: true);
lua!(FENCE, "fence", all_or_nothing: true);
lua!(RELEASE, "release");
lua!(RENEW, "renew");
lua!(RESTORE, "restore");
lua!(INSPECT, "inspect", all_or_nothing: true);
lua!(BREAK, "break");
lua!(REVOKE, "revoke");
lua!(RAISE, "raise");

/// A call of a script with its keys and arguments.
#[derive(Clone)]
pub struct ScriptCall {
    lua: &'static Lua,
    by_hash: Cmd,
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

    /// The call with the whole script, which also loads it into the server's cache.
    fn in_full(&self) -> Cmd {
        let mut full = cmd("EVAL");
        full.arg(self.lua.code);
        for part in self.by_hash.args_iter().skip(2) {
            if let Arg::Simple(part) = part {
                full.arg(part);
            }
        }
        full
    }

    /// Runs it at one node.
    pub async fn run(&self, connection: &Connection) -> Result<Value, Failure> {
        let answer = match connection.call(&self.by_hash).await {
            // A restart, or SCRIPT FLUSH. Nothing has happened yet.
            Err(failure) if failure.is("NOSCRIPT") => connection.call(&self.in_full()).await,
            answer => answer,
        };
        match answer {
            Err(failure) if self.lua.all_or_nothing => Err(failure.of_script_without_partial_writes()),
            answer => answer,
        }
    }
}

pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
