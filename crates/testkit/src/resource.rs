//! Resources that a lock protects, for tests: files that check the fence, that do not, and that lose updates.

mod ledger;

pub use ledger::Ledger;

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use lockkeeper_core::{Error, Fence, Result};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

/// A write that a resource took.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Accepted {
    /// With this fence.
    pub fence: Fence,
    /// Writing this.
    pub value: String,
}

/// A file that refuses writes older than one it has taken. Any number of processes may share it.
#[derive(Clone, Debug)]
pub struct CheckedFile(Log);

impl CheckedFile {
    /// The resource at `path`. It is made by the first write.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        CheckedFile(Log(path.into()))
    }

    /// Writes `value`, unless a higher fence was seen. The fence of the newest write is taken again: a holder may write
    /// more than once.
    ///
    /// # Errors
    /// [`Error::Stale`] if a higher fence was seen; [`Error::Unavailable`] if the file cannot be written.
    pub fn write(&self, fence: Fence, value: impl Into<String>) -> Result<()> {
        let mut file = self.0.locked().map_err(unavailable)?;
        match last(&mut file).map_err(unavailable)? {
            Some(Accepted { fence: seen, .. }) if fence < seen => {
                Err(Error::Stale { presented: fence, seen })
            }
            _ => append(&file, &Accepted { fence, value: value.into() }).map_err(unavailable),
        }
    }

    /// The highest fence and the value that came with it last.
    pub fn read(&self) -> Result<Option<Accepted>> {
        self.0.locked().and_then(|mut file| last(&mut file)).map_err(unavailable)
    }

    /// All writes that it took, in the order in which it took them.
    pub fn accepted(&self) -> Result<Vec<Accepted>> {
        self.0.all().map_err(unavailable)
    }
}

/// The twin of [`CheckedFile`] that takes everything: it shows what the fence is there for.
#[derive(Clone, Debug)]
pub struct UncheckedFile(Log);

impl UncheckedFile {
    /// The resource at `path`. It is made by the first write.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        UncheckedFile(Log(path.into()))
    }

    /// Writes `value`, whatever the fence.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the file cannot be written.
    pub fn write(&self, fence: Fence, value: impl Into<String>) -> Result<()> {
        let file = self.0.locked().map_err(unavailable)?;
        append(&file, &Accepted { fence, value: value.into() }).map_err(unavailable)
    }

    /// All writes that it took, in the order in which it took them.
    pub fn accepted(&self) -> Result<Vec<Accepted>> {
        self.0.all().map_err(unavailable)
    }
}

fn unavailable(e: io::Error) -> Error {
    Error::Unavailable(e.to_string())
}

/// One line of JSON per write. The last line is the state: there is no second place that a kill could leave behind.
#[derive(Clone, Debug)]
struct Log(PathBuf);

/// The longest line: what is read to find the last one.
const LINE: u64 = 64 << 10;

impl Log {
    /// Opens and locks it. Each call opens it anew: flock tells openings apart, so it works for threads as well.
    fn locked(&self) -> io::Result<File> {
        let file = File::options().create(true).append(true).read(true).open(&self.0)?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(file)
    }

    fn all(&self) -> io::Result<Vec<Accepted>> {
        let mut text = String::new();
        self.locked()?.read_to_string(&mut text)?;
        text.lines().map(parse).collect()
    }
}

fn parse(line: &str) -> io::Result<Accepted> {
    serde_json::from_str(line).map_err(io::Error::other)
}

fn append(mut file: &File, write: &Accepted) -> io::Result<()> {
    let mut line = serde_json::to_vec(write)?;
    line.push(b'\n');
    if line.len() as u64 > LINE {
        return Err(io::Error::other("the value is too long"));
    }
    // One call: a kill comes before or after it, never within.
    if file.write(&line)? != line.len() {
        return Err(io::Error::other("half of it was written"));
    }
    Ok(())
}

fn last(file: &mut File) -> io::Result<Option<Accepted>> {
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LINE)))?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail)?;
    let lines = tail.strip_suffix(b"\n").unwrap_or(&tail);
    let line = lines.rsplit(|b| *b == b'\n').next().filter(|line| !line.is_empty());
    line.map(|line| parse(&String::from_utf8_lossy(line))).transpose()
}

/// A counter in a file that is read, then written: two at once lose an update, unless a lock keeps them apart.
#[derive(Clone, Debug)]
pub struct CounterFile(PathBuf);

impl CounterFile {
    /// The counter at `path`, which begins at 0.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        CounterFile(path.into())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Its value.
    pub fn get(&self) -> io::Result<u64> {
        match fs::read_to_string(&self.0) {
            // Just made, and not yet written to.
            Ok(text) if text.is_empty() => Ok(0),
            Ok(text) => text.trim().parse().map_err(io::Error::other),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(e) => Err(e),
        }
    }

    /// Adds one, badly: others get their turn between the reading and the writing.
    pub fn increment(&self) -> io::Result<u64> {
        self.increment_with(std::thread::yield_now)
    }

    /// Adds one, badly: `between` happens between the reading and the writing.
    pub fn increment_with(&self, between: impl FnOnce()) -> io::Result<u64> {
        let next = self.get()? + 1;
        between();
        self.set(next)?;
        Ok(next)
    }

    /// Adds one, badly: other tasks get their turn between the reading and the writing.
    pub async fn increment_async(&self) -> io::Result<u64> {
        let next = self.get()? + 1;
        tokio::task::yield_now().await;
        self.set(next)?;
        Ok(next)
    }

    /// Adds one, badly: two milliseconds pass between the reading and the writing.
    pub async fn increment_slowly(&self) -> io::Result<u64> {
        let next = self.get()? + 1;
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        self.set(next)?;
        Ok(next)
    }

    fn set(&self, value: u64) -> io::Result<()> {
        // Always as long as before and in one call: a reader sees the old number or the new one, never half of it.
        let file = File::options().create(true).truncate(false).write(true).open(&self.0)?;
        rustix::io::pwrite(&file, format!("{value:020}\n").as_bytes(), 0)?;
        Ok(())
    }
}
