//! The mark of a fenced file, which is also the lock of its writers.

use std::fs::{self, File};
use std::io;

use lockkeeper_core::{Error, Fence, Result};

use super::paths::FilePaths;
use super::same;
use super::temp::TempFile;

/// The mark, locked: the file with the number in it is also what writers wait for.
pub(super) struct FileMark {
    /// Closing them ends the turn: the mark that was found, and the one that was put in its place.
    _lock: File,
    _raised: Option<TempFile>,
    seen: Option<Fence>,
}

impl FileMark {
    /// One's turn to write. The mark is made, empty, if there is none.
    pub fn exclusive(paths: &FilePaths) -> Result<FileMark> {
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(&paths.mark);
        FileMark::locked(paths, open, File::lock)
            .map_err(|e| paths.error("its mark cannot be locked", &e))?
            .read(paths)
    }

    /// One's turn to read. `None`: there is no mark.
    pub fn shared(paths: &FilePaths) -> Result<Option<FileMark>> {
        match FileMark::locked(paths, || File::open(&paths.mark), File::lock_shared) {
            Ok(lock) => lock.read(paths).map(Some),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(paths.error("its mark cannot be locked", &e)),
        }
    }

    /// Locks the mark. The writer before may have replaced the file that this one waited for: then lock the
    /// new file.
    fn locked(
        paths: &FilePaths,
        open: impl Fn() -> io::Result<File>,
        lock: impl Fn(&File) -> io::Result<()>,
    ) -> io::Result<MarkLock> {
        loop {
            let file = open()?;
            lock(&file)?;
            match same(&file, &paths.mark) {
                Ok(true) => return Ok(MarkLock(file)),
                Ok(false) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
    }

    pub fn seen(&self) -> Option<Fence> {
        self.seen
    }

    /// Replaces the mark by a higher one. The new file is locked before any other process can see it, so
    /// writers wait for it from now on.
    pub fn raise(&mut self, paths: &FilePaths, fence: Fence) -> io::Result<()> {
        let mut raised = TempFile::new(paths)?;
        raised.fill(&mut format!("{fence}\n").as_bytes())?;
        raised.replace(&paths.mark)?;
        self._raised = Some(raised);
        paths.sync()
    }
}

struct MarkLock(File);

impl MarkLock {
    fn read(self, paths: &FilePaths) -> Result<FileMark> {
        let seen = read_unlocked(paths)?;
        Ok(FileMark { _lock: self.0, _raised: None, seen })
    }
}

/// The mark, without waiting for a lock. A damaged one is never taken for none.
pub(super) fn read_unlocked(paths: &FilePaths) -> Result<Option<Fence>> {
    let text = match fs::read(&paths.mark) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(paths.error("its mark cannot be read", &e)),
    };
    // The mark was created by a writer that has not written yet.
    if text.is_empty() {
        return Ok(None);
    }
    let number = std::str::from_utf8(&text).ok().and_then(|text| text.strip_suffix('\n')?.parse().ok());
    number.and_then(|number| Fence::new(number).ok()).map(Some).ok_or_else(|| {
        let mark = paths.mark.display();
        Error::invalid(format!(
            "{mark} is damaged: it is to hold one number, the highest fence that was seen; write it there, or delete the file \
             if no writer of before is left"
        ))
    })
}
