//! The registry of stores: which URL opens which store, and which feature brings it. All other code that opens a store by its URL calls this.

use std::sync::Arc;

use lockkeeper_core::{Error, Result, Store};
use lockkeeper_host::Clock;

/// A kind of store: the schemes of its URLs, their forms, and the feature that brings it.
struct StoreKind {
    schemes: &'static [&'static str],
    urls: &'static [&'static str],
    feature: &'static str,
    built_in: bool,
}

/// All kinds of stores, in the order in which errors and `--help` list them.
const KINDS: [StoreKind; 8] = [
    StoreKind {
        schemes: &["sqlite"],
        urls: &["sqlite:PATH"],
        feature: "sqlite",
        built_in: cfg!(feature = "sqlite"),
    },
    StoreKind {
        schemes: &["postgres", "postgresql"],
        urls: &["postgres://[USER@]HOST[:PORT]/DATABASE"],
        feature: "postgres",
        built_in: cfg!(feature = "postgres"),
    },
    StoreKind {
        schemes: &["redis", "rediss"],
        urls: &["redis://HOST[:PORT]", "redis+sentinel://HOSTS/MASTER", "redis+cluster://HOSTS"],
        feature: "redis",
        built_in: cfg!(feature = "redis"),
    },
    StoreKind {
        schemes: &["redlock", "redlocks"],
        urls: &["redlock://HOST,HOST,HOST"],
        feature: "redlock",
        built_in: cfg!(feature = "redlock"),
    },
    StoreKind {
        schemes: &["etcd", "etcds"],
        urls: &["etcd://HOST,HOST,HOST"],
        feature: "etcd",
        built_in: cfg!(feature = "etcd"),
    },
    StoreKind {
        schemes: &["zk", "zks"],
        urls: &["zk://HOST,HOST,HOST"],
        feature: "zookeeper",
        built_in: cfg!(feature = "zookeeper"),
    },
    StoreKind {
        schemes: &["dynamodb"],
        urls: &["dynamodb://REGION/TABLE"],
        feature: "dynamodb",
        built_in: cfg!(feature = "dynamodb"),
    },
    StoreKind {
        schemes: &["memory"],
        urls: &["memory:"],
        feature: "memory",
        built_in: cfg!(feature = "memory"),
    },
];

/// The URL forms of the stores in this build.
pub fn schemes() -> Vec<&'static str> {
    KINDS.iter().filter(|kind| kind.built_in).flat_map(|kind| kind.urls).copied().collect()
}

/// The error for a URL whose store is not in this build: a store that exists is named with its feature.
fn not_built_in(scheme: &str, rest: &str) -> Error {
    let base = scheme.split('+').next().unwrap_or(scheme);
    if let Some(kind) = KINDS.iter().find(|kind| kind.schemes.contains(&base)) {
        let feature = kind.feature;
        return Error::Unsupported(format!(
            "the store {base:?} is not in this build: add features = [\"{feature}\"] to lockkeeper in Cargo.toml; for the command, \
             cargo install --path crates/cli --features {feature}"
        ));
    }
    // The error repeats only what is certainly a scheme: in a URL without one, this text may be part of a
    // password.
    let kind = if rest.starts_with("//") { format!("{scheme:?}") } else { "of this kind".into() };
    Error::invalid(format!("there is no store {kind}. Known are {}", schemes().join(", ")))
}

pub(crate) async fn open(url: &str, clock: Arc<dyn Clock>) -> Result<Arc<dyn Store>> {
    // A build without any store has no use for it.
    _ = &clock;
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
        "memory" => Err(Error::invalid("memory: takes nothing after the colon")),
        #[cfg(feature = "sqlite")]
        "sqlite" => {
            let mut options = lockkeeper_sqlite::Options::from_url(url)?;
            options.clock = clock;
            // No user typed the default path, so its directory cannot be a typing error: create it.
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
        _ => Err(not_built_in(scheme, rest)),
    }
}

/// The result of [`init`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    /// [`init`] created what the store needs.
    Made,
    /// Everything that the store needs existed already.
    WasThere,
    /// The store creates what it needs when it is opened; [`init`] opened it.
    Opened,
}

/// Creates what a store needs before it can be opened: for DynamoDB its table, which costs money and is
/// therefore created only on request. Every other store creates what it needs when it is opened, so `init`
/// opens it.
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

/// The directory in an environment variable, if it is an absolute path.
fn absolute_dir(variable: &str) -> Option<std::path::PathBuf> {
    std::env::var_os(variable).map(std::path::PathBuf::from).filter(|dir| dir.is_absolute())
}

/// The URL of the default store, an SQLite file: for root `/var/lib/lockkeeper`, shared by the machine;
/// else `$XDG_STATE_HOME/lockkeeper`, else `~/.local/state/lockkeeper`, shared by all processes of the
/// user.
pub fn default_url() -> Result<String> {
    let dir = if rustix::process::geteuid().is_root() {
        "/var/lib".into()
    } else if let Some(state) = absolute_dir("XDG_STATE_HOME") {
        // The XDG specification says that programs ignore a relative path.
        state
    } else if let Some(home) = absolute_dir("HOME") {
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

#[cfg(test)]
mod tests {
    use super::{KINDS, not_built_in};
    use lockkeeper_core::Error;

    #[test]
    fn the_error_for_a_store_outside_this_build_names_its_feature() {
        for kind in &KINDS {
            for scheme in kind.schemes {
                let Error::Unsupported(message) = not_built_in(scheme, "//h") else {
                    panic!("{scheme} is a store")
                };
                assert!(message.contains(&format!("features = [\"{}\"]", kind.feature)), "{message}");
            }
        }
        let Error::Unsupported(message) = not_built_in("redis+cluster", "//h") else {
            panic!("redis+cluster is a form of redis")
        };
        assert!(message.contains("[\"redis\"]"), "{message}");
        assert!(matches!(not_built_in("mysql", "//h"), Error::Invalid(_)));
    }
}
