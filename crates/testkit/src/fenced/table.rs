//! Resources with planted bugs, which the laws of fenced resources must catch.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{Error, Fence, Result};
use lockkeeper_fenced::{Fenced, GuardedValue};

/// Ways in which a resource can be wrong about fences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each name says it all")]
pub enum ResourceBug {
    CheckRemoved,
    WritesWhatItRefuses,
    SwapsTheNumbers,
    MarkStandsStill,
    EqualIsRefused,
    DeleteUnchecked,
    DeleteForgets,
    DeletesOnlyWhatIsThere,
    OneMarkForAll,
    FoldsNames,
    CutsValues,
    EmptyIsDeleted,
    ComparesAsText,
    ComparesAsFloats,
    ChecksFirst,
    WritesLater,
}

type Rows = HashMap<String, GuardedValue>;

/// The rule itself, in the memory of this process: what the adapters are compared with. It can be spoilt in one way.
#[derive(Clone, Debug, Default)]
pub struct FaultyResource {
    bug: Option<ResourceBug>,
    rows: Arc<Mutex<Rows>>,
}

impl FaultyResource {
    /// A table that is wrong in this way.
    pub fn bugged(bug: ResourceBug) -> Self {
        FaultyResource { bug: Some(bug), ..FaultyResource::default() }
    }

    fn has(&self, bug: ResourceBug) -> bool {
        self.bug == Some(bug)
    }

    /// Whether `presented` is to be refused.
    fn late(&self, presented: Fence, seen: Fence, deletes: bool) -> bool {
        match self.bug {
            Some(ResourceBug::CheckRemoved) => false,
            Some(ResourceBug::DeleteUnchecked) if deletes => false,
            Some(ResourceBug::EqualIsRefused) => presented <= seen,
            Some(ResourceBug::ComparesAsText) => presented.to_string() < seen.to_string(),
            Some(ResourceBug::ComparesAsFloats) => (presented.get() as f32) < seen.get() as f32,
            _ => presented < seen,
        }
    }

    fn check(&self, rows: &Rows, row: &str, fence: Fence, deletes: bool) -> Result<()> {
        match rows.get(row).map(|row| row.fence) {
            Some(seen) if self.late(fence, seen, deletes) => {
                let swapped = self.has(ResourceBug::SwapsTheNumbers);
                let (presented, seen) = if swapped { (seen, fence) } else { (fence, seen) };
                Err(Error::Stale { presented, seen })
            }
            _ => Ok(()),
        }
    }

    fn set(&self, rows: &mut Rows, row: String, fence: Fence, value: Option<Vec<u8>>) {
        if value.is_none()
            && (self.has(ResourceBug::DeleteForgets)
                || self.has(ResourceBug::DeletesOnlyWhatIsThere) && !rows.contains_key(&row))
        {
            rows.remove(&row);
            return;
        }
        let fence = if self.has(ResourceBug::MarkStandsStill) {
            rows.get(&row).map_or(fence, |row| row.fence)
        } else {
            fence
        };
        rows.insert(row, GuardedValue { fence, value });
    }

    fn row(&self, resource: &str) -> String {
        match self.bug {
            Some(ResourceBug::OneMarkForAll) => String::new(),
            Some(ResourceBug::FoldsNames) => {
                resource.to_lowercase().replace(|c: char| !c.is_ascii_alphanumeric(), "_")
            }
            _ => resource.to_owned(),
        }
    }

    fn value(&self, value: &[u8]) -> Option<Vec<u8>> {
        match self.bug {
            Some(ResourceBug::CutsValues) => value.split(|b| *b == 0).next().map(<[u8]>::to_vec),
            Some(ResourceBug::EmptyIsDeleted) if value.is_empty() => None,
            _ => Some(value.to_vec()),
        }
    }

    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().expect("no test panics while it has the lock")
    }

    async fn write(&self, resource: &str, fence: Fence, value: Option<Vec<u8>>) -> Result<()> {
        let row = self.row(resource);
        match self.bug {
            Some(ResourceBug::ChecksFirst) => {
                self.check(&self.rows(), &row, fence, value.is_none())?;
                // Others get their turn in between; the older, the later.
                tokio::time::sleep(Duration::from_millis(2 * (4 - fence.get() % 4))).await;
                self.set(&mut self.rows(), row, fence, value);
                return Ok(());
            }
            Some(ResourceBug::WritesLater) => self.again_if_given_up(row.clone(), fence, value.clone()).await,
            _ => {}
        }
        let mut rows = self.rows();
        let checked = self.check(&rows, &row, fence, value.is_none());
        if checked.is_ok() || self.has(ResourceBug::WritesWhatItRefuses) {
            self.set(&mut rows, row, fence, value);
        }
        checked
    }

    /// Repeats a write that its caller dropped halfway, later and without the check.
    async fn again_if_given_up(&self, row: String, fence: Fence, value: Option<Vec<u8>>) {
        let table = self.clone();
        let (done, given_up) = tokio::sync::oneshot::channel::<()>();
        tokio::spawn(async move {
            if given_up.await.is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
                table.set(&mut table.rows(), row, fence, value);
            }
        });
        tokio::task::yield_now().await;
        let _ = done.send(());
    }
}

#[async_trait]
impl Fenced for FaultyResource {
    async fn put(&self, resource: &str, fence: Fence, value: &[u8]) -> Result<()> {
        self.write(resource, fence, self.value(value)).await
    }

    async fn delete(&self, resource: &str, fence: Fence) -> Result<()> {
        self.write(resource, fence, None).await
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        Ok(self.rows().get(&self.row(resource)).cloned())
    }
}
