//! The one registry of stores.

use std::sync::Arc;

use lockkeeper_core::{Error, Result, Store};
use lockkeeper_host::Clock;

/// The schemes of the stores that this build knows, with what follows them.
pub fn schemes() -> Vec<&'static str> {
    let mut known = Vec::new();
    if cfg!(feature = "sqlite") {
        known.push("sqlite:PATH");
    }
    if cfg!(feature = "postgres") {
        known.push("postgres://[USER@]HOST[:PORT]/DATABASE");
    }
    if cfg!(feature = "redis") {
        known.extend(["redis://HOST[:PORT]", "redis+sentinel://HOSTS/MASTER", "redis+cluster://HOSTS"]);
    }
    if cfg!(feature = "redlock") {
        known.push("redlock://HOST,HOST,HOST");
    }
    if cfg!(feature = "etcd") {
        known.push("etcd://HOST,HOST,HOST");
    }
    if cfg!(feature = "zookeeper") {
        known.push("zk://HOST,HOST,HOST");
    }
    if cfg!(feature = "dynamodb") {
        known.push("dynamodb://REGION/TABLE");
    }
    if cfg!(feature = "memory") {
        known.push("memory:");
    }
    known
}

pub(crate) async fn open(url: &str, clock: Arc<dyn Clock>) -> Result<Arc<dyn Store>> {
    let Some((scheme, rest)) = url.split_once(':') else {
        return Err(Error::invalid(format!(
            "this is not the URL of a store: a scheme and a colon are missing. Known are {}",
            schemes().join(", ")
        )));
    };
    match scheme {
        #[cfg(feature = "memory")]
        "memory" if rest.is_empty() => Ok(Arc::new(lockkeeper_memory::MemoryStore::new(clock))),
        #[cfg(feature = "memory")]
        "memory" => {
            Err(Error::invalid("memory: takes nothing after the colon"))
        }
        #[cfg(feature = "sqlite")]
        "sqlite" => {
            let mut options = lockkeeper_sqlite::Options::from_url(url)?;
            options.clock = clock;
            // Nobody typed the default path, so nobody mistyped it.
            options.create_dir = default_url().is_ok_and(|default| default == url);
            Ok(Arc::new(lockkeeper_sqlite::SqliteStore::open(options)?))
        }
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => Ok(Arc::new(crate::postgres::open(url, clock).await?)),
        #[cfg(feature = "redis")]
        _ if matches!(scheme.split('+').next(), Some("redis" | "rediss")) => {
            let mut options = lockkeeper_redis::Options::from_url(url)?;
            options.clock = clock;
            Ok(Arc::new(lockkeeper_redis::RedisStore::open(options).await?))
        }
        #[cfg(feature = "redlock")]
        "redlock" | "redlocks" => {
            let mut options = lockkeeper_redlock::Options::from_url(url)?;
            options.clock = clock;
            Ok(Arc::new(lockkeeper_redlock::RedlockStore::open(options).await?))
        }
        #[cfg(feature = "etcd")]
        "etcd" | "etcds" => {
            let mut options = lockkeeper_etcd::Options::from_url(url)?;
            options.clock = clock;
            Ok(Arc::new(lockkeeper_etcd::EtcdStore::open(options).await?))
        }
        #[cfg(feature = "zookeeper")]
        "zk" | "zks" => {
            let mut options = lockkeeper_zookeeper::Options::from_url(url)?;
            options.clock = clock;
            Ok(Arc::new(lockkeeper_zookeeper::ZooKeeperStore::open(options).await?))
        }
        #[cfg(feature = "dynamodb")]
        "dynamodb" => {
            let mut options = lockkeeper_dynamodb::Options::from_url(url)?;
            options.clock = clock;
            Ok(Arc::new(lockkeeper_dynamodb::DynamoStore::open(options).await?))
        }
        // Known by name and left out: whoever types it should not have to guess.
        #[cfg(not(feature = "dynamodb"))]
        "dynamodb" => Err(Error::Unsupported(
            "this was built without DynamoDB: cargo install --path crates/cli --features dynamodb, or the feature \"dynamodb\" of \
             the library"
                .into(),
        )),
        // Repeated only if it is a scheme for certain: of an address without one, this may be a part of the password.
        _ => Err(Error::invalid(format!(
            "there is no store {} in this build. Known are {}",
            if rest.starts_with("//") { format!("{scheme:?}") } else { "of this kind".into() },
            schemes().join(", ")
        ))),
    }
}

/// What [`init`] found to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    /// What the store needs was made.
    Made,
    /// What it needs was there.
    WasThere,
    /// It makes what it needs itself, whenever it is opened, and now it was.
    Opened,
}

/// Makes what a store needs before it can be opened: for DynamoDB its table, which costs money and is made only when asked for. Every
/// other store is opened, which is all that it needs.
///
/// # Errors
/// As [`crate::Lockkeeper::open`].
pub async fn init(url: &str) -> Result<Init> {
    #[cfg(feature = "dynamodb")]
    if url.starts_with("dynamodb:") {
        let made = lockkeeper_dynamodb::init(lockkeeper_dynamodb::Options::from_url(url)?).await?;
        return Ok(match made {
            lockkeeper_dynamodb::Init::Made => Init::Made,
            lockkeeper_dynamodb::Init::WasThere => Init::WasThere,
        });
    }
    open(url, Arc::new(lockkeeper_host::SystemClock)).await?;
    Ok(Init::Opened)
}

/// The directory in an environment variable.
fn absolute(variable: &str) -> Option<std::path::PathBuf> {
    std::env::var_os(variable).map(std::path::PathBuf::from).filter(|dir| dir.is_absolute())
}

/// Where locks go when nobody says where: an embedded file that all processes of this user share, or, for root, of the
/// machine: `/var/lib/lockkeeper`, else `$XDG_STATE_HOME/lockkeeper`, else `~/.local/state/lockkeeper`.
pub fn default_url() -> Result<String> {
    let dir = if rustix::process::geteuid().is_root() {
        "/var/lib".into()
    } else if let Some(state) = absolute("XDG_STATE_HOME") {
        // Its specification says that a relative path is to be ignored.
        state
    } else if let Some(home) = absolute("HOME") {
        home.join(".local/state")
    } else if let Some(home) = std::env::var_os("HOME").filter(|dir| !dir.is_empty()) {
        return Err(Error::invalid(format!(
            "HOME is {home:?}, which is not an absolute path: each directory would have locks of its own. Name a store, for \
             instance sqlite:PATH"
        )));
    } else {
        return Err(Error::invalid(
            "there is no HOME to keep locks in: name a store, for instance sqlite:PATH",
        ));
    };
    let path = dir.join("lockkeeper/locks.db");
    match path.to_str() {
        Some(path) => Ok(format!("sqlite:{path}")),
        None => Err(Error::invalid(format!("{} is not UTF-8: name a store, as sqlite:PATH", path.display()))),
    }
}
