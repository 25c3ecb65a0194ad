//! Files that refuse a late writer.
//!
//! The file stays a plain file that every program can read. Its mark is beside it, in `.FILE.fence`, and is
//! also the lock of all writers. Both are replaced as a whole, by renaming. **The mark comes first**: it is
//! on the disk before the new contents are in place. A crash in between leaves a mark that is too high, so
//! the write can be repeated and older ones are refused. The other order would leave new contents under an
//! old mark, which would admit the next late writer.

mod dir;
mod mark;
mod paths;
mod temp;

pub use dir::FencedDir;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use lockkeeper_core::{Error, Fence, Result};

use crate::{GuardedValue, count_verdict};
use mark::FileMark;
use paths::FilePaths;
use temp::TempFile;

/// One file that refuses writes older than one it has taken. Any number of processes of one host may write to it.
///
/// All of this blocks, for as long as the disk takes and while another writer has its lock.
#[derive(Clone, Debug)]
pub struct FencedFile {
    path: PathBuf,
}

impl FencedFile {
    /// The file at `path`, which need not exist. A link is followed when the file is written: the mark is beside what it points to.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        FencedFile { path: path.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the contents. They are on the disk when this returns.
    ///
    /// # Errors
    /// [`Error::Stale`] if a higher fence was seen, and [`Error::Unavailable`] if the disk does not take it: then the file is
    /// as it was. [`Error::Unknown`] if the new contents are there, and may be gone after a power cut.
    pub fn write(&self, fence: Fence, contents: &[u8]) -> Result<()> {
        self.write_from(fence, contents).map(drop)
    }

    /// The same with contents of any length, which are read to their end before other writers have to wait.
    /// Returns their length.
    ///
    /// # Errors
    /// As [`FencedFile::write`].
    pub fn write_from(&self, fence: Fence, mut contents: impl Read) -> Result<u64> {
        let paths = FilePaths::find(&self.path)?;
        // A writer that is stale already need not send the rest. Marks never go down, so the answer stays right.
        count_verdict("file", check(mark::read_unlocked(&paths)?, fence))?;
        let mut temp =
            TempFile::new(&paths).map_err(|e| paths.error("a file beside it cannot be made", &e))?;
        let length =
            temp.fill(&mut contents).map_err(|e| paths.error("its new contents cannot be written", &e))?;
        let mark = raise(&paths, fence)?;
        temp.replace(&paths.file).map_err(|e| paths.error("it cannot be replaced", &e))?;
        temp::sweep(&paths);
        paths.sync().map_err(|e| Error::Unknown(paths.describe("its directory cannot be synced", &e)))?;
        drop(mark);
        Ok(length)
    }

    /// Removes the file and keeps the mark. Deleting nothing is no error, and counts.
    ///
    /// # Errors
    /// As [`FencedFile::write`].
    pub fn delete(&self, fence: Fence) -> Result<()> {
        let paths = FilePaths::find(&self.path)?;
        let mark = raise(&paths, fence)?;
        match fs::remove_file(&paths.file) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(paths.error("it cannot be removed", &e));
            }
            _ => {}
        }
        paths.sync().map_err(|e| Error::Unknown(paths.describe("its directory cannot be synced", &e)))?;
        drop(mark);
        Ok(())
    }

    /// The mark and the contents that belong together. `None`: no writer has written here with a fence,
    /// whatever the file holds.
    ///
    /// After a crash in the middle of a write the mark is that of the write, and the contents are those of before.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if it cannot be read; [`Error::Invalid`] if it is no plain file, or its mark is damaged.
    pub fn read(&self) -> Result<Option<GuardedValue>> {
        let paths = FilePaths::find(&self.path)?;
        let Some(mark) = FileMark::shared(&paths)? else { return Ok(None) };
        let Some(fence) = mark.seen() else { return Ok(None) };
        match fs::read(&paths.file) {
            Ok(value) => Ok(Some(GuardedValue { fence, value: Some(value) })),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Some(GuardedValue { fence, value: None })),
            Err(e) => Err(paths.error("it cannot be read", &e)),
        }
    }

    /// The highest fence that was seen, without the contents.
    ///
    /// # Errors
    /// As [`FencedFile::read`].
    pub fn mark(&self) -> Result<Option<Fence>> {
        mark::read_unlocked(&FilePaths::find(&self.path)?)
    }
}

fn check(seen: Option<Fence>, presented: Fence) -> Result<()> {
    match seen {
        Some(seen) if presented < seen => Err(Error::Stale { presented, seen }),
        _ => Ok(()),
    }
}

/// Locks the mark, checks the fence, and writes the mark to the disk. No other process writes until the
/// result is dropped.
fn raise(paths: &FilePaths, fence: Fence) -> Result<FileMark> {
    let mut mark = FileMark::exclusive(paths)?;
    count_verdict("file", check(mark.seen(), fence))?;
    if mark.seen() == Some(fence) {
        // The mark of a write that crashed may have been renamed and not synced.
        return paths.sync().map(|()| mark).map_err(|e| paths.error("its directory cannot be synced", &e));
    }
    mark.raise(paths, fence).map_err(|e| paths.error("its mark cannot be written", &e))?;
    Ok(mark)
}

/// Whether two openings are of one file.
fn same(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let (open, named) = (file.metadata()?, fs::metadata(path)?);
    Ok((open.dev(), open.ino()) == (named.dev(), named.ino()))
}
