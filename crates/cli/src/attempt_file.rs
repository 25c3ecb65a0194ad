//! The file in which a candidate keeps its attempt (`elect --resume`). A process with the leader's attempt is the leader, so the
//! file is a secret, and only one process at a time may use it.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use lockkeeper::{Attempt, Lockkeeper, Outcome};
use rustix::fs::{FlockOperation, flock};

use crate::exit::ExitFailure;
use crate::text::plain;

/// The version of the format, before the attempt. Raise it when the format changes, and keep reading the old one.
const VERSION: &str = "v1 ";

/// An open and locked file with an attempt in it.
#[derive(Debug)]
pub struct AttemptFile {
    path: PathBuf,
    /// Locked for as long as it is open: a second process with the same proof would be a second leader.
    file: File,
    attempt: Attempt,
}

impl AttemptFile {
    /// Opens or creates the file, and reads its attempt. A new attempt is written before it is used.
    pub fn open(path: &Path) -> Result<AttemptFile, ExitFailure> {
        let shown = plain(&path.to_string_lossy()).into_owned();
        let bad = |what: String| ExitFailure::new(Outcome::Invalid, format!("--resume {shown}: {what}"));
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.open(path).map_err(|e| bad(e.to_string()))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            ExitFailure::new(Outcome::Busy, format!("--resume {shown}: another process uses it"))
                .next("give every candidate a file of its own")
        })?;
        let mode = file.metadata().map_err(|e| bad(e.to_string()))?.mode();
        if mode & 0o077 != 0 {
            return Err(bad(
                "other users may read it, and a process that has its content is the leader".into()
            )
            .next(format!("chmod 600 {shown}")));
        }
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(|e| bad(e.to_string()))?;
        if text.is_empty() {
            let mut resume = AttemptFile { path: path.to_owned(), file, attempt: Lockkeeper::new_attempt() };
            resume.write()?;
            return Ok(resume);
        }
        let attempt =
            text.strip_prefix(VERSION).and_then(|hex| Attempt::from_hex(hex.trim_end()).ok()).ok_or_else(
                || bad("it is not a file of this version of the program".into()).next("name another file"),
            )?;
        Ok(AttemptFile { path: path.to_owned(), file, attempt })
    }

    pub fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// A new proof, for a new campaign.
    pub fn renew(&mut self) -> Result<(), ExitFailure> {
        self.attempt = Lockkeeper::new_attempt();
        self.write()
    }

    fn write(&mut self) -> Result<(), ExitFailure> {
        let text = format!("{VERSION}{}\n", self.attempt.to_hex());
        // As long as before and in one call: a kill leaves the old one or the new one.
        let written = self.file.rewind().and_then(|()| self.file.write_all(text.as_bytes()));
        written.and_then(|()| self.file.sync_data()).map_err(|e| {
            let shown = plain(&self.path.to_string_lossy()).into_owned();
            ExitFailure::new(Outcome::Unavailable, format!("--resume {shown} cannot be written: {e}"))
        })
    }

    /// Removes the file: the leader has resigned, and there is no term to resume.
    pub fn remove(self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLDEN: &str = include_str!("../tests/golden/attempt-v1");

    fn write(name: &str, text: &str) -> PathBuf {
        let unique = Lockkeeper::new_attempt().to_hex();
        let path = std::env::temp_dir().join(format!("lockkeeper-{name}-{unique}"));
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        path
    }

    /// The stored format: the file that this version writes, and that every later version must read.
    #[test]
    fn the_golden_file_is_read_and_written() {
        let path = write("golden", GOLDEN);
        let mut file = AttemptFile::open(&path).unwrap();
        assert_eq!(file.attempt(), Attempt::from_bytes([7; 16]));
        file.renew().unwrap();
        assert_ne!(std::fs::read_to_string(&path).unwrap(), GOLDEN);
        file.attempt = Attempt::from_bytes([7; 16]);
        file.write().unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), GOLDEN);
        file.remove();
        assert!(!path.exists());
    }

    #[test]
    fn a_file_of_another_version_is_refused() {
        for text in ["v2 07070707070707070707070707070707\n", "v1 seven\n", "notes\n"] {
            let path = write("other", text);
            assert!(AttemptFile::open(&path).is_err(), "{text:?}");
            std::fs::remove_file(path).unwrap();
        }
    }
}
