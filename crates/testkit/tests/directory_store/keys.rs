//! The files of the directory, and the hash under which an attempt is stored.

use std::path::{Path, PathBuf};

use lockkeeper_core::LockName;
use sha2::{Digest, Sha256};

/// The end of the name of every lock's file.
pub const LOCK_SUFFIX: &str = ".lock";

/// A name may have 512 bytes and slashes, a file name 255 and none: the hash names the file, and its content has the name.
pub fn lock_file(dir: &Path, name: &LockName) -> PathBuf {
    dir.join(hash(name.as_str().as_bytes()) + LOCK_SUFFIX)
}

pub fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
