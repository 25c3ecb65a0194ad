//! A temporary directory that is removed when it is dropped.

use std::fs;
use std::path::{Path, PathBuf};

/// The environment variable that names the directory in which [`TempDir::new`] makes its directories, instead of the temporary one: a
/// disk of its own, whose power a test can cut.
pub const SERVERS_DIR: &str = "LOCKKEEPER_SERVERS_DIR";

/// A directory of its own, removed when this is dropped; kept, and named, when a test fails.
#[derive(Debug)]
pub struct TempDir(PathBuf);

impl TempDir {
    /// Makes one. `what` becomes part of its name.
    ///
    /// # Panics
    /// If the temporary directory cannot be written to.
    pub fn new(what: &str) -> TempDir {
        let parent = std::env::var_os(SERVERS_DIR).map_or_else(std::env::temp_dir, PathBuf::from);
        TempDir::below(&parent, what)
    }

    /// The same, in the temporary directory whatever [`SERVERS_DIR`] says: for files that must outlive the disk of the servers.
    ///
    /// # Panics
    /// If the temporary directory cannot be written to.
    pub fn outside(what: &str) -> TempDir {
        TempDir::below(&std::env::temp_dir(), what)
    }

    fn below(parent: &Path, what: &str) -> TempDir {
        // Short: the path of a Unix socket in it may have 107 bytes.
        let random = lockkeeper_host::random_128();
        let tag: String = random[..5].iter().map(|b| format!("{b:02x}")).collect();
        let path = parent.join(format!("lk-{what}-{tag}"));
        fs::create_dir(&path).unwrap_or_else(|e| panic!("cannot make {}: {e}", path.display()));
        TempDir(path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The path of something in it.
    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("kept for a look: {}", self.0.display());
        } else {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}
