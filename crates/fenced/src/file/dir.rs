//! A directory of fenced files, one for each resource.

use std::fmt::Write;
use std::path::PathBuf;

use async_trait::async_trait;
use lockkeeper_core::{Error, Fence, Result};

use super::FencedFile;
use crate::{Fenced, GuardedValue};

/// A directory of [`FencedFile`]s, one for each resource.
///
/// Letters, digits, `-`, `_` and dots that are not the first stay as they are in the name of the file; every other byte becomes `%XX`.
#[derive(Clone, Debug)]
pub struct FencedDir {
    dir: PathBuf,
}

impl FencedDir {
    /// The files in `dir`, which must exist.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        FencedDir { dir: dir.into() }
    }

    /// The file of a resource.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the name is empty, or longer than the name of a file may be.
    pub fn file(&self, resource: &str) -> Result<FencedFile> {
        let mut name = String::new();
        for (nth, byte) in resource.bytes().enumerate() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => name.push(byte.into()),
                b'.' if nth > 0 => name.push('.'),
                _ => write!(name, "%{byte:02X}").expect("text grows"),
            }
        }
        // The names beside it are longer, and 255 is the most.
        if name.is_empty() || name.len() > 220 {
            return Err(Error::invalid(format!("{resource:?} gives no name of a file of 1 to 220 bytes")));
        }
        Ok(FencedFile::new(self.dir.join(name)))
    }

    /// On a thread that may block. Given up, it goes on to its end, which is as good as any: it checks when it writes.
    async fn on<T: Send + 'static>(
        &self,
        resource: &str,
        work: impl FnOnce(FencedFile) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let file = self.file(resource)?;
        let done = tokio::task::spawn_blocking(move || work(file)).await;
        done.unwrap_or_else(|e| Err(Error::Unknown(format!("the thread that wrote has ended: {e}"))))
    }
}

#[async_trait]
impl Fenced for FencedDir {
    async fn put(&self, resource: &str, fence: Fence, value: &[u8]) -> Result<()> {
        let value = value.to_vec();
        self.on(resource, move |file| file.write(fence, &value)).await
    }

    async fn delete(&self, resource: &str, fence: Fence) -> Result<()> {
        self.on(resource, move |file| file.delete(fence)).await
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        self.on(resource, |file| file.read()).await
    }
}
