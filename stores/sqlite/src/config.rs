//! Options of the store, and the URL that gives them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Error, Result};
use lockkeeper_host::{Clock, SystemClock};

/// How long the store waits for the write lock of the file while no process writes.
pub(crate) const NO_PROGRESS_LIMIT: Duration = Duration::from_secs(5);

/// How to open a store.
///
/// ```
/// # use lockkeeper_sqlite::Options;
/// let options = Options::from_url("sqlite:/var/lib/app/locks.db")?;
/// assert_eq!(options.path.to_str(), Some("/var/lib/app/locks.db"));
/// # Ok::<(), lockkeeper_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    /// The database. The store keeps other files beside it: `-wal` and `-shm` (SQLite's), `.floor` (a lower bound for
    /// fences that outlives the database) and `.wake/` (the pipes of waiting processes).
    pub path: PathBuf,
    /// The clock: the machine's own, unless a test uses a virtual one.
    pub clock: Arc<dyn Clock>,
    /// Create the directory of the file (only its owner may read it) if it is missing. Off by default: a mistyped path
    /// would give a second, empty set of locks.
    pub create_dir: bool,
    /// Accept a file on a network file system or FUSE. Off by default: SQLite's shared memory and file
    /// locks are not shared between hosts there.
    pub network_fs: bool,
}

impl Options {
    /// The file at `path`, with the machine's clock.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Options { path: path.into(), clock: Arc::new(SystemClock), create_dir: false, network_fs: false }
    }

    /// From `sqlite:relative`, `sqlite:/absolute` or `sqlite:///absolute`, optionally with `?network_fs=allow`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is no such URL, has no path, or has an unknown option.
    pub fn from_url(url: &str) -> Result<Self> {
        let rest = url.strip_prefix("sqlite:").ok_or_else(|| {
            Error::invalid(format!("{url:?} is not the URL of an SQLite store: sqlite:PATH is"))
        })?;
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let path = match path.strip_prefix("//") {
            Some(absolute) if absolute.starts_with('/') => absolute,
            Some(_) => {
                return Err(Error::invalid(format!(
                    "{url:?} names a host: an SQLite store is a file of this one, sqlite:///PATH"
                )));
            }
            None => path,
        };
        if path.is_empty() {
            return Err(Error::invalid(format!("{url:?} has no path: sqlite:PATH is needed")));
        }
        let mut options = Options::new(path);
        for option in query.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("network_fs", "allow")) => options.network_fs = true,
                Some(("network_fs", other)) => {
                    return Err(Error::invalid(format!(
                        "network_fs is {other:?}: only \"allow\" is possible"
                    )));
                }
                _ => {
                    return Err(Error::invalid(format!(
                        "{option:?} is not an option of an SQLite store: network_fs=allow is"
                    )));
                }
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_parsed_and_incomplete_ones_refused() {
        let path = |url| Options::from_url(url).unwrap().path.to_str().unwrap().to_owned();
        assert_eq!(path("sqlite:locks.db"), "locks.db");
        assert_eq!(path("sqlite:/var/lib/locks.db"), "/var/lib/locks.db");
        assert_eq!(path("sqlite:///var/lib/locks.db"), "/var/lib/locks.db");
        assert!(Options::from_url("sqlite:x?network_fs=allow").unwrap().network_fs);
        assert!(!Options::from_url("sqlite:x").unwrap().network_fs);
        for bad in [
            "sqlite:",
            "sqlite://",
            "sqlite://host/path",
            "redis://x",
            "locks.db",
            "sqlite:x?network_fs",
            "sqlite:x?network_fs=yes",
            "sqlite:x?mode=ro",
        ] {
            assert!(matches!(Options::from_url(bad), Err(Error::Invalid(_))), "{bad:?}");
        }
    }
}
