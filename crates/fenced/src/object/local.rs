//! Objects in a directory of this host. A local file cannot be written on a condition, so those who write there take turns.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread;

use lockkeeper_core::{Error, Fence, IgnorePoison, Result};
use object_store::PutMode;
use object_store::local::LocalFileSystem;
use object_store::path::Path as Name;
use tokio::sync::{Mutex, OwnedMutexGuard, oneshot};

use super::error::{self, to_error};
use super::{ObjectFenced, body, check};

/// Bytes of a part of a name: the store needs some of the 255 for the file that it writes before it renames it.
const PART: usize = 240;

/// Writers to a directory lock it, in every process, also if their stores have different root directories.
#[derive(Debug)]
pub(super) struct DirLocks {
    files: Arc<LocalFileSystem>,
    /// One writer of this process at a time in each directory, so that many writers do not need many threads. Writers in other directories do
    /// not wait with them: the process that has the lock of one may be stopped.
    next: Queues,
}

/// The directories that another process writes to, or waits for.
type Queues = std::sync::Mutex<HashMap<PathBuf, Weak<Mutex<()>>>>;

impl ObjectFenced {
    /// The objects in a directory of this host, which must exist; what is in the files is what would be in the objects of another store.
    ///
    /// A file system has no conditional write. Writers take turns instead, by the kernel's lock on the directory that the
    /// file is in: so all of them must be on this host, and use this.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such directory.
    pub fn local(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let store = match File::open(dir).and_then(|found| found.metadata()) {
            Ok(found) if !found.is_dir() => Err("it is no directory".to_owned()),
            Ok(_) => LocalFileSystem::new_with_prefix(dir).map_err(|e| e.to_string()),
            Err(e) => Err(e.to_string()),
        };
        let store = store.map_err(|why| {
            Error::invalid(format!("objects cannot be kept in {}: {why}. Make it first", dir.display()))
        })?;
        let files = Arc::new(store.with_fsync(true));
        let turns = DirLocks { files: files.clone(), next: Queues::default() };
        Ok(ObjectFenced { store: files, prefix: Name::default(), turns: Some(Arc::new(turns)) })
    }

    /// Looks, compares and writes in one turn.
    pub(super) async fn write_in_turn(
        &self,
        turns: &DirLocks,
        resource: &str,
        fence: Fence,
        value: Option<&[u8]>,
    ) -> Result<()> {
        if resource.split('/').any(|part| part.len() > PART) {
            return Err(Error::invalid(format!("{resource:?} has a part of more than {PART} bytes")));
        }
        let (fenced, path, new) = (self.clone(), self.path(resource)?, body::written(fence, value));
        let file = turns.file(&path)?;
        let place = file.clone();
        let write = async move {
            // A link would be followed by the look, and replaced by the write.
            if fs::symlink_metadata(&place).is_ok_and(|found| !found.is_file()) {
                return Err(Error::invalid(format!("{} is no plain file", place.display())));
            }
            if let Some(found) = fenced.look(&path, body::LONGEST_LINE).await? {
                check(fence, &found)?;
            }
            let Err(e) = fenced.send(&path, PutMode::Overwrite, new.clone()).await else { return Ok(()) };
            // It is still our turn. Not in its place, it was not written; else it may not have been synced.
            let there = fenced.look(&path, usize::MAX).await;
            let undone = there.is_ok_and(|found| found.is_none_or(|found| found.bytes != new));
            Err(to_error(&e, !undone))
        };
        turns.take(file, write).await
    }
}

impl DirLocks {
    /// The file of an object.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the store takes the name for that of an unfinished write (`NAME#1`).
    pub(super) fn file(&self, object: &Name) -> Result<PathBuf> {
        self.files.path_to_filesystem(object).map_err(|e| Error::invalid(e.to_string()))
    }

    /// Where to wait for the directory of a file.
    fn queue(&self, file: &Path) -> Arc<Mutex<()>> {
        let mut all = self.next.lock().ignore_poison();
        all.retain(|_, queue| queue.strong_count() > 0);
        let known = all.entry(file.parent().unwrap_or(file).to_owned()).or_default();
        known.upgrade().unwrap_or_else(|| {
            let queue = Arc::default();
            *known = Arc::downgrade(&queue);
            queue
        })
    }

    /// Writes under the lock of the object, on a thread of its own: the lock lasts until the contents are in place, also if the caller drops its
    /// future, or its runtime ends.
    async fn take(
        &self,
        file: PathBuf,
        work: impl Future<Output = Result<()>> + Send + 'static,
    ) -> Result<()> {
        let next = self.queue(&file).lock_owned().await;
        let (reply, replied) = oneshot::channel();
        let done = thread::Builder::new().name("lockkeeper-turn".into()).spawn(move || {
            let done = in_turn(&file, next, work);
            // No process may be there to hear it.
            _ = reply.send(done);
        });
        done.map_err(|e| Error::Unavailable(format!("no thread to write on: {e}")))?;
        replied.await.unwrap_or_else(|_| Err(Error::Unknown("the thread that wrote has ended".into())))
    }
}

fn in_turn(path: &Path, _next: OwnedMutexGuard<()>, work: impl Future<Output = Result<()>>) -> Result<()> {
    let no_turn = |e: io::Error| {
        error::file(format!("{}: there is no turn to write it: {e}", path.display()), e.kind())
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build().map_err(no_turn)?;
    // Closed behind the work, and the turn is the next one's.
    let _turn = lock(path.parent().unwrap_or(path)).map_err(no_turn)?;
    runtime.block_on(work)
}

fn lock(dir: &Path) -> io::Result<File> {
    loop {
        make(dir)?;
        let turn = File::open(dir)?;
        turn.lock()?;
        // Another process may have removed it meanwhile, and another one may be there now.
        let (locked, there) = (turn.metadata()?, fs::metadata(dir));
        if there.is_ok_and(|there| (there.dev(), there.ino()) == (locked.dev(), locked.ino())) {
            return Ok(turn);
        }
    }
}

/// Makes a directory and those above it that are missing. Each is on the disk before anything is written into it: synced contents in a
/// directory that a power cut takes away are gone.
fn make(dir: &Path) -> io::Result<()> {
    let Some(above) = dir.parent().filter(|_| !dir.is_dir()) else { return Ok(()) };
    make(above)?;
    match fs::create_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        Err(_) if !dir.is_dir() => Err(io::ErrorKind::NotADirectory.into()),
        // The process that was quicker may not have synced it yet.
        _ => File::open(above)?.sync_all(),
    }
}
