//! The files of the directory: one for each held lock, one with the last fence, and one whose flock guards them all.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use lockkeeper_core::{
    Attempt, BootInstant, Error, Fence, Holder, HolderView, LockName, Mode, Result, WallTime,
};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

const LOCK_SUFFIX: &str = ".lock";

/// A held lock, as its file has it.
#[derive(Serialize, Deserialize)]
pub struct StoredLock {
    pub name: LockName,
    /// Never the attempt itself: a user who may read the directory must not be able to release the lock.
    pub attempt_hash: String,
    pub fence: Fence,
    pub holder: Holder,
    pub since: WallTime,
    /// On the boot-time clock, so only with the boot that it belongs to.
    pub expires_ns: u64,
    pub boot: Option<String>,
}

impl StoredLock {
    pub fn belongs_to(&self, attempt: &Attempt) -> bool {
        self.attempt_hash == hash(attempt.as_bytes())
    }

    pub fn view(&self, now: BootInstant) -> HolderView {
        let left = BootInstant::from_nanos(self.expires_ns).since(now);
        HolderView {
            holder: self.holder.clone(),
            fence: self.fence,
            mode: Mode::Exclusive,
            since: self.since,
            // Rounded up: a lease that still runs never shows zero.
            expires_in_ms: left.as_nanos().div_ceil(1_000_000) as u64,
            lingering: false,
            revoked: None,
        }
    }
}

/// The directory while this step holds its flock. A dead process holds no flock, so no step waits for one.
pub struct LockedFiles<'a> {
    dir: &'a Path,
    boot: &'a Option<String>,
    _flock: File,
}

impl<'a> LockedFiles<'a> {
    /// Waits for the flock. Nothing has changed if this fails.
    pub fn open(dir: &'a Path, boot: &'a Option<String>) -> Result<Self> {
        let open = || -> io::Result<File> {
            // A new open file description each time: two steps of one process that share one would not exclude each other.
            let file = File::options().create(true).append(true).open(dir.join("guard"))?;
            flock(&file, FlockOperation::LockExclusive)?;
            Ok(file)
        };
        let flock = open().map_err(|error| Error::Unavailable(format!("{}: {error}", dir.display())))?;
        Ok(LockedFiles { dir, boot, _flock: flock })
    }

    /// The lock, if its lease has not ended. The holders of an earlier boot are gone.
    pub fn read(&self, name: &LockName, now: BootInstant) -> Result<Option<StoredLock>> {
        self.read_path(&self.path(name), now)
    }

    /// All locks that are held, in the order of their names.
    pub fn read_all(&self, now: BootInstant) -> Result<Vec<StoredLock>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(self.dir).map_err(unreadable)? {
            let path = entry.map_err(unreadable)?.path();
            if path.to_string_lossy().ends_with(LOCK_SUFFIX) {
                all.extend(self.read_path(&path, now)?);
            }
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    fn read_path(&self, path: &Path, now: BootInstant) -> Result<Option<StoredLock>> {
        let Some(bytes) = read_if_present(path)? else { return Ok(None) };
        let lock: StoredLock = serde_json::from_slice(&bytes)
            .map_err(|error| Error::Unavailable(format!("{} is damaged: {error}", path.display())))?;
        Ok((lock.boot == *self.boot && BootInstant::from_nanos(lock.expires_ns) > now).then_some(lock))
    }

    pub fn write(&self, lock: &StoredLock) -> Result<()> {
        let bytes = serde_json::to_vec(lock).map_err(|error| Error::Unknown(error.to_string()))?;
        self.replace(&self.path(&lock.name), &bytes)
    }

    pub fn remove(&self, name: &LockName) -> Result<()> {
        match fs::remove_file(self.path(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(unknown(error)),
            _ => Ok(()),
        }
    }

    /// Counts the fence on: one counter for all names, in a file that no release removes.
    pub fn next_fence(&self, wall: WallTime) -> Result<Fence> {
        let path = self.dir.join("fence");
        let last = match read_if_present(&path)? {
            Some(bytes) => {
                let number = String::from_utf8_lossy(&bytes)
                    .parse()
                    .map_err(|error| Error::Unavailable(format!("{} is damaged: {error}", path.display())))?;
                Some(Fence::new(number)?)
            }
            None => None,
        };
        let next = Fence::after(last, wall)?;
        self.replace(&path, next.to_string().as_bytes())?;
        Ok(next)
    }

    /// A rename, so that a process that dies while it writes leaves the old file whole.
    fn replace(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let new = self.dir.join("new");
        fs::write(&new, bytes).and_then(|()| fs::rename(&new, path)).map_err(unknown)
    }

    /// A name may have 512 bytes and slashes, a file name 255 and none: the file is named by the hash, and its content has the name.
    fn path(&self, name: &LockName) -> PathBuf {
        self.dir.join(hash(name.as_str().as_bytes()) + LOCK_SUFFIX)
    }
}

pub fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read_if_present(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unreadable(error)),
    }
}

/// A read failed before the step changed anything.
fn unreadable(error: io::Error) -> Error {
    Error::Unavailable(error.to_string())
}

/// A write failed, and may have reached the directory.
fn unknown(error: io::Error) -> Error {
    Error::Unknown(error.to_string())
}
