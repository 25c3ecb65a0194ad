//! The steps: each one runs under the flock of the directory, so it is atomic for every process of the host.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;

use lockkeeper_core::{BootInstant, Fence, LockName, Result, WallTime};
use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::codec::StoredLock;
use crate::error::{unavailable, unknown};
use crate::keys::{LOCK_SUFFIX, lock_file};

/// The directory while this step holds its flock. A dead process holds no flock, so no step waits for one.
pub struct LockedFiles<'a> {
    dir: &'a Path,
    boot: &'a Option<String>,
    _flock: File,
}

impl<'a> LockedFiles<'a> {
    /// Waits for the flock. Nothing has changed if this fails.
    pub fn open(dir: &'a Path, boot: &'a Option<String>) -> Result<Self> {
        // A new open file description each time: two steps of one process that share one would not exclude each other.
        let file = File::options().create(true).append(true).open(dir.join("guard")).map_err(unavailable)?;
        flock(&file, FlockOperation::LockExclusive).map_err(unavailable)?;
        Ok(LockedFiles { dir, boot, _flock: file })
    }

    /// The lock, if its lease has not ended. The holders of an earlier boot are gone.
    pub fn read(&self, name: &LockName, now: BootInstant) -> Result<Option<StoredLock>> {
        self.read_live(&lock_file(self.dir, name), now)
    }

    /// All locks that are held.
    pub fn read_all(&self, now: BootInstant) -> Result<Vec<StoredLock>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(self.dir).map_err(unavailable)? {
            let path = entry.map_err(unavailable)?.path();
            if path.to_string_lossy().ends_with(LOCK_SUFFIX) {
                all.extend(self.read_live(&path, now)?);
            }
        }
        Ok(all)
    }

    fn read_live(&self, path: &Path, now: BootInstant) -> Result<Option<StoredLock>> {
        let lock = read_json::<StoredLock>(path)?;
        Ok(lock.filter(|lock| lock.boot == *self.boot && lock.expires() > now))
    }

    pub fn write(&self, lock: &StoredLock) -> Result<()> {
        self.write_json(&lock_file(self.dir, &lock.name), lock)
    }

    pub fn remove(&self, name: &LockName) -> Result<()> {
        match fs::remove_file(lock_file(self.dir, name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(unknown(error)),
            _ => Ok(()),
        }
    }

    /// Counts the fence on: one counter for all names, in a file that no release removes.
    pub fn next_fence(&self, wall: WallTime) -> Result<Fence> {
        let path = self.dir.join("fence");
        let next = Fence::after(read_json(&path)?, wall)?;
        self.write_json(&path, &next)?;
        Ok(next)
    }

    /// A rename, so that a process that dies while it writes leaves the old file whole.
    fn write_json(&self, path: &Path, value: &impl Serialize) -> Result<()> {
        let (new, bytes) = (self.dir.join("new"), serde_json::to_vec(value).map_err(unknown)?);
        fs::write(&new, bytes).and_then(|()| fs::rename(&new, path)).map_err(unknown)
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| unavailable(format!("{} is damaged: {error}", path.display()))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unavailable(error)),
    }
}
