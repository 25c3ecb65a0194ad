//! The file that tells a command which partitions it works on, in a private directory that is removed at the end.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::PathBuf;

use lockkeeper::{Attempt, Fence};
use lockkeeper_host::random_128;
use serde_json::Value;

/// The directory with the file, and with the files by which the command says that it has finished a partition.
#[derive(Debug)]
pub struct PartitionsFile {
    dir: PathBuf,
}

impl PartitionsFile {
    /// Makes the directory, which only this user may enter.
    pub fn create() -> io::Result<PartitionsFile> {
        let random = &Attempt::from_bytes(random_128()).to_hex()[..16];
        let dir = std::path::absolute(std::env::temp_dir())?;
        let dir = dir.join(format!("lockkeeper-{}-{random}", std::process::id()));
        // The path is a variable of the command and a line of the watchdog's messages.
        if dir.to_str().is_none_or(|path| path.contains('\n')) {
            return Err(io::Error::other(
                "the path of the temporary directory is not plain text: set TMPDIR",
            ));
        }
        // Fails if it exists: another user may have made it.
        DirBuilder::new().mode(0o700).create(&dir)?;
        Ok(PartitionsFile { dir })
    }

    pub fn dir(&self) -> String {
        self.dir.display().to_string()
    }

    /// The file for the command.
    pub fn path(&self) -> String {
        self.dir.join("partitions.json").display().to_string()
    }

    /// The file that the command creates when it has finished a partition. The fence is in its name, so that a late one says nothing about
    /// the same partition under a later grant.
    pub fn done_path(&self, number: u32, fence: Fence) -> String {
        self.dir.join(format!("done-{number}-{fence}")).display().to_string()
    }

    /// Whether the command has created that file.
    pub fn is_done(&self, number: u32, fence: Fence) -> bool {
        fs::symlink_metadata(self.done_path(number, fence)).is_ok()
    }

    /// Forgets that the command has finished a partition.
    pub fn clear_done(&self, number: u32, fence: Fence) {
        let _ = fs::remove_file(self.done_path(number, fence));
    }

    /// Replaces the content in one step: a reader sees the old one or the new one.
    pub fn write(&self, content: &Value) -> io::Result<()> {
        let new = self.dir.join("partitions.json.new");
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(format!("{content}\n").as_bytes())?;
        fs::rename(new, self.path())
    }
}

impl Drop for PartitionsFile {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}
