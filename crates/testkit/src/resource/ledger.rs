//! A ledger file that checks fences: the protected resource of tests with real processes.

use std::io;
use std::path::PathBuf;

use lockkeeper_core::{Error, Fence, Result};

use super::{Accepted, Log, append, unavailable};

/// A ledger with an entry for each key, which checks the fence of every reader and every writer.
///
/// It does not know that a key is to be entered once: it takes as many entries as it is given with a good fence. That there is
/// one is up to those who look first, and enter only if there is nothing. Between the two anything may happen, so a look
/// counts: from then on every process with a lower fence is refused. Without that, a process that looked and was then stopped
/// would enter what its successor has entered meanwhile.
#[derive(Clone, Debug)]
pub struct Ledger {
    dir: PathBuf,
    fenced: bool,
}

impl Ledger {
    /// The book whose pages are files in `dir`, which must be there.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Ledger { dir: dir.into(), fenced: true }
    }

    /// The twin that takes everything: it shows what the fence is there for.
    pub fn unfenced(dir: impl Into<PathBuf>) -> Self {
        Ledger { dir: dir.into(), fenced: false }
    }

    /// The entry of `key`, if there is one. From here on the ledger refuses processes with a lower fence.
    ///
    /// # Errors
    /// [`Error::Stale`] if a higher fence was seen; [`Error::Unavailable`] if the file cannot be read or written.
    pub fn look(&self, key: &str, fence: Fence) -> Result<Option<String>> {
        // A look is written down as well, without words.
        self.write(key, fence, "")?;
        Ok(self.entries(key)?.into_iter().next().map(|entry| entry.value))
    }

    /// Enters `value` under `key`.
    ///
    /// # Errors
    /// [`Error::Stale`] if a higher fence was seen; [`Error::Unavailable`] if the file cannot be written.
    pub fn enter(&self, key: &str, fence: Fence, value: &str) -> Result<()> {
        self.write(key, fence, value)
    }

    /// Everything that was entered under `key`, in order.
    pub fn entries(&self, key: &str) -> Result<Vec<Accepted>> {
        let all = Log(self.dir.join(key)).all().map_err(unavailable)?;
        Ok(all.into_iter().filter(|line| !line.value.is_empty()).collect())
    }

    fn write(&self, key: &str, fence: Fence, value: &str) -> Result<()> {
        let log = Log(self.dir.join(key));
        // Locked over both, so that no process writes between the check of the highest fence and the write.
        let mut file = log.locked().map_err(unavailable)?;
        let seen = highest(&mut file).map_err(unavailable)?;
        match seen {
            Some(seen) if self.fenced && fence < seen => Err(Error::Stale { presented: fence, seen }),
            _ => append(&file, &Accepted { fence, value: value.to_owned() }).map_err(unavailable),
        }
    }
}

/// The last line has it: a lower one is never written.
fn highest(file: &mut std::fs::File) -> io::Result<Option<Fence>> {
    Ok(super::last(file)?.map(|line| line.fence))
}
