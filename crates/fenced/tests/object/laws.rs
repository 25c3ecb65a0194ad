//! The laws. What is in memory has no other processes, so the story is told to S3 and to local files.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use async_trait::async_trait;
use lockkeeper_core::{Fence, Result};
use lockkeeper_fenced::object::ObjectFenced;
use lockkeeper_fenced::object::object_store::local::LocalFileSystem;
use lockkeeper_fenced::object::object_store::memory::InMemory;
use lockkeeper_fenced::object::object_store::path::Path;
use lockkeeper_fenced::object::object_store::{Error as Told, ObjectStore, ObjectStoreExt};
use lockkeeper_fenced::{Fenced, GuardedValue};
use lockkeeper_testkit::fenced::FencedHarness;
use lockkeeper_testkit::servers::{Server, TempDir};

use crate::{open, s3, server};

/// A place of its own for each law.
fn number() -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    COUNT.fetch_add(1, Ordering::Relaxed).to_string()
}

/// What people do without a fence.
struct Plain(Arc<dyn ObjectStore>, String);

impl Plain {
    fn path(&self, resource: &str) -> Path {
        Path::from(format!("{}/{resource}", self.1))
    }
}

#[async_trait]
impl Fenced for Plain {
    async fn put(&self, resource: &str, _: Fence, value: &[u8]) -> Result<()> {
        self.0.put(&self.path(resource), value.to_vec().into()).await.unwrap();
        Ok(())
    }

    async fn delete(&self, resource: &str, _: Fence) -> Result<()> {
        self.0.delete(&self.path(resource)).await.unwrap();
        Ok(())
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        match self.0.get(&self.path(resource)).await {
            Ok(found) => {
                let value = Some(found.bytes().await.unwrap().to_vec());
                Ok(Some(GuardedValue { fence: Fence::MIN, value }))
            }
            Err(Told::NotFound { .. }) => Ok(None),
            Err(e) => panic!("{e}"),
        }
    }
}

struct Memory(String);

static STORES: LazyLock<Mutex<HashMap<String, Arc<InMemory>>>> = LazyLock::new(Default::default);

fn memory(address: &str) -> Arc<dyn ObjectStore> {
    STORES.lock().unwrap()[address].clone()
}

#[async_trait]
impl FencedHarness for Memory {
    async fn start() -> Option<Self> {
        let name = number();
        STORES.lock().unwrap().insert(name.clone(), Arc::new(InMemory::new()));
        Some(Memory(name))
    }

    fn address(&self) -> String {
        self.0.clone()
    }

    async fn client(address: &str) -> Arc<dyn Fenced> {
        Arc::new(open(&memory(address), "").await)
    }

    async fn twin(address: &str) -> Arc<dyn Fenced> {
        Arc::new(Plain(memory(address), "twin".into()))
    }
}

struct Local(TempDir);

#[async_trait]
impl FencedHarness for Local {
    async fn start() -> Option<Self> {
        Some(Local(TempDir::new("objects")))
    }

    fn address(&self) -> String {
        self.0.path().display().to_string()
    }

    async fn client(address: &str) -> Arc<dyn Fenced> {
        Arc::new(ObjectFenced::local(address).unwrap())
    }

    async fn twin(address: &str) -> Arc<dyn Fenced> {
        Arc::new(Plain(Arc::new(LocalFileSystem::new_with_prefix(address).unwrap()), "twin".into()))
    }
}

struct S3(Arc<Server>, String);

#[async_trait]
impl FencedHarness for S3 {
    /// The server answers some 200 requests in a second, and a story takes a dozen.
    const INTERLEAVINGS: u64 = 25;

    async fn start() -> Option<Self> {
        Some(S3(server().await?, number()))
    }

    fn address(&self) -> String {
        format!("{} {}", self.0.addr(), self.1)
    }

    async fn client(address: &str) -> Arc<dyn Fenced> {
        let (addr, prefix) = address.split_once(' ').unwrap();
        Arc::new(open(&s3(addr), prefix).await)
    }

    async fn twin(address: &str) -> Arc<dyn Fenced> {
        let (addr, prefix) = address.split_once(' ').unwrap();
        Arc::new(Plain(s3(addr), prefix.into()))
    }
}

mod in_memory {
    use super::*;
    use lockkeeper_testkit::fenced_law_tests;
    lockkeeper_testkit::every_fenced_law!(fenced_law_tests, Memory);
}

mod on_local_files {
    use super::*;
    lockkeeper_testkit::fenced_laws!(Local);
}

mod on_s3 {
    use super::*;
    lockkeeper_testkit::fenced_laws!(S3);
}
