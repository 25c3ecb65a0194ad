//! A temporary directory that is removed when it is dropped.

use std::fs;
use std::path::{Path, PathBuf};

/// A directory of its own, removed when this is dropped; kept, and named, when a test fails.
#[derive(Debug)]
pub struct TempDir(PathBuf);

impl TempDir {
    /// Makes one. `what` becomes part of its name.
    ///
    /// # Panics
    /// If the temporary directory cannot be written to.
    pub fn new(what: &str) -> TempDir {
        // Short: the path of a Unix socket in it may have 107 bytes.
        let random = lockkeeper_host::random_128();
        let tag: String = random[..5].iter().map(|b| format!("{b:02x}")).collect();
        let path = std::env::temp_dir().join(format!("lk-{what}-{tag}"));
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
