//! Objects of S3 and other stores with conditional writes: the mark is the first line of the object.
//!
//! It is not in the metadata, which would leave the object as it is, because the ETag of S3 is a digest of the bytes alone. Another process
//! who writes the same bytes with a newer fence would leave the ETag as it was, and a late writer's `If-Match` would pass.

mod body;
mod error;
mod local;

pub use body::parse;
// The crate of the object stores.
pub use object_store;

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::StreamExt;
use lockkeeper_core::{Error, Fence, Result};
use object_store::path::Path;
use object_store::{
    Error as StoreError, GetOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions, UpdateVersion,
};

use crate::{Fenced, GuardedValue, verdict};
use error::{cannot, to_error};
use local::DirLocks;

/// Each try that fails is one that another client has won, and with a higher fence it is the last.
const TRIES: usize = 32;

/// Objects whose writers are checked, each by its name below a prefix.
#[derive(Clone, Debug)]
pub struct ObjectFenced {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    /// `Some`: nothing can be written on a condition there.
    turns: Option<Arc<DirLocks>>,
}

/// The object that a read has found: its version, and its bytes or the first of them.
struct FoundObject {
    version: UpdateVersion,
    bytes: Vec<u8>,
}

impl ObjectFenced {
    /// The objects below a prefix (`""`: all of them), in a store that can write on a condition. It is asked: with a write whose
    /// condition cannot be met, so that nothing is written.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it cannot, or does not heed the condition. Local files cannot: for them there is [`ObjectFenced::local`].
    pub async fn open(store: Arc<dyn ObjectStore>, prefix: &str) -> Result<Self> {
        let prefix = Path::parse(prefix).map_err(|e| Error::invalid(e.to_string()))?;
        let fenced = ObjectFenced { store, prefix, turns: None };
        let probe = fenced.path("lockkeeper-probe")?;
        let nowhere = UpdateVersion { e_tag: Some("\"lockkeeper\"".into()), version: Some("1".into()) };
        match fenced.send(&probe, PutMode::Update(nowhere), Vec::new()).await {
            Err(StoreError::Precondition { .. } | StoreError::NotFound { .. }) => Ok(fenced),
            Err(e) => Err(to_error(&e, false)),
            Ok(_) => {
                let _ = fenced.store.delete(&probe).await;
                Err(cannot("it took a write whose condition was not met."))
            }
        }
    }

    /// The object of a resource: its name, as it is, below the prefix.
    fn path(&self, resource: &str) -> Result<Path> {
        let whole = match self.prefix.as_ref() {
            "" => resource.to_owned(),
            prefix => format!("{prefix}/{resource}"),
        };
        let path = Path::parse(&whole).map_err(|e| Error::invalid(e.to_string()))?;
        if let Some(turns) = &self.turns {
            turns.file(&path)?;
        }
        // A slash at either end is left out by `parse`: two names would be one object.
        match !resource.is_empty() && path.as_ref() == whole {
            true => Ok(path),
            false => Err(Error::invalid(format!("{whole:?} cannot be the name of an object"))),
        }
    }

    async fn send(&self, path: &Path, mode: PutMode, bytes: Vec<u8>) -> Result<(), StoreError> {
        let options = PutOptions { mode, ..PutOptions::default() };
        self.store.put_opts(path, bytes.into(), options).await.map(|_| ())
    }

    /// Reads the object, as many bytes of it as `enough`.
    async fn look(&self, path: &Path, enough: usize) -> Result<Option<FoundObject>> {
        let found = match self.store.get_opts(path, GetOptions::default()).await {
            Ok(found) => found,
            Err(StoreError::NotFound { source, .. }) if !source.to_string().contains("NoSuchBucket") => {
                return Ok(None);
            }
            Err(e) => return Err(to_error(&e, false)),
        };
        let version = UpdateVersion { e_tag: found.meta.e_tag.clone(), version: found.meta.version.clone() };
        if version.e_tag.is_none() && version.version.is_none() {
            return Err(cannot("it tells no ETag and no version."));
        }
        let (mut stream, mut bytes) = (found.into_stream(), Vec::new());
        while bytes.len() < enough
            && let Some(part) = stream.next().await
        {
            bytes.extend_from_slice(&part.map_err(|e| to_error(&e, false))?);
        }
        Ok(Some(FoundObject { version, bytes }))
    }

    async fn write(&self, resource: &str, fence: Fence, value: Option<&[u8]>) -> Result<()> {
        match &self.turns {
            Some(turns) => self.write_in_turn(turns, resource, fence, value).await,
            None => self.write_if_unchanged(resource, fence, value).await,
        }
    }

    /// Looks, compares, and writes on the condition that it is still what was looked at; again if it is not.
    async fn write_if_unchanged(&self, resource: &str, fence: Fence, value: Option<&[u8]>) -> Result<()> {
        let (path, new) = (self.path(resource)?, body::written(fence, value));
        let mut found = self.look(&path, body::LONGEST_LINE).await?;
        let mut unknown = None;
        for _ in 0..TRIES {
            if let Some(found) = &found {
                check(fence, found).map_err(|stale| unknown.take().unwrap_or(stale))?;
            }
            let mode = found.as_ref().map_or(PutMode::Create, |found| PutMode::Update(found.version.clone()));
            let failure = match self.send(&path, mode, new.clone()).await {
                Ok(()) => return Ok(()),
                Err(failure @ (StoreError::Precondition { .. } | StoreError::AlreadyExists { .. })) => {
                    failure
                }
                // Some stores say so of an object that is gone; of one that was never there, it is the bucket.
                Err(failure @ StoreError::NotFound { .. }) if found.is_some() => failure,
                // A try of an earlier round may have been done.
                Err(failure) => return Err(unknown.unwrap_or_else(|| to_error(&failure, true))),
            };
            unknown = unknown.or(error::retried(&failure));
            let now = match self.look(&path, usize::MAX).await {
                Ok(now) => now,
                Err(look) => return Err(unknown.unwrap_or_else(|| unknown_after(look, &failure))),
            };
            match &now {
                // It was ours: a client that sends again what it has not heard the end of meets its own write.
                Some(now) if now.bytes == new => return Ok(()),
                None if found.is_some() => return Err(unknown.unwrap_or_else(|| gone(&path))),
                _ => found = now,
            }
        }
        Err(Error::Unknown(format!(
            "{path} was written by others each time, {TRIES} times: send the same again"
        )))
    }
}

fn check(fence: Fence, found: &FoundObject) -> Result<()> {
    body::mark(&found.bytes)?.map_or(Ok(()), |mark| verdict("object", fence, mark))
}

/// The look after a write that was refused has failed: the write may have been done by a try before the one that was refused.
fn unknown_after(look: Error, failure: &StoreError) -> Error {
    match look {
        Error::Unavailable(why) => Error::Unknown(format!("{failure}, and then: {why}")),
        other => other,
    }
}

fn gone(path: &Path) -> Error {
    Error::Lost(format!(
        "{path} was deleted while it was to be written, by a program that checks no fence, and its mark with it: \
         look whether you are still wanted before you write it anew"
    ))
}

#[async_trait]
impl Fenced for ObjectFenced {
    async fn put(&self, resource: &str, fence: Fence, value: &[u8]) -> Result<()> {
        self.write(resource, fence, Some(value)).await
    }

    async fn delete(&self, resource: &str, fence: Fence) -> Result<()> {
        self.write(resource, fence, None).await
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        let Some(found) = self.look(&self.path(resource)?, usize::MAX).await? else { return Ok(None) };
        let unmarked =
            || Error::invalid(format!("{resource:?} has no mark yet: the first fenced write gives it one"));
        body::parse(&found.bytes)?.ok_or_else(unmarked).map(Some)
    }
}
