//! A store in memory that goes wrong as told, in ways that a test server has no switch for.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use lockkeeper_fenced::object::object_store::memory::InMemory;
use lockkeeper_fenced::object::object_store::path::Path;
use lockkeeper_fenced::object::object_store::{
    CopyOptions, Error as Told, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// What becomes of a put.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Trouble {
    /// It is refused, because another one is under way: what S3 calls a `ConditionalRequestConflict`.
    Conflict,
    /// It is done, and the client, which sends it again, gets the answer that its condition is not met.
    DoneThenRefused,
    /// The same, and then the store does not answer a read.
    DoneThenSilent,
    /// It is done, a writer with fence 6 follows, and the client, which sends it again, gets the answer that its condition is not met.
    DoneThenOvertaken,
    /// It is done, a writer with fence 4 follows, and the client, which sends it again, gets the answer that its condition is not met; then the
    /// next put is denied.
    DoneThenOvertakenByALower,
    /// It is done, and the client, which sends it again, gets the answer that its condition is not met; then a read is denied.
    DoneThenDenied,
    /// It is done, the object is deleted, and the client, which sends it again, gets the answer that its condition is not met.
    DoneThenDeleted,
    /// It is done, and the answer is lost.
    DoneThenNoReply,
    /// It is done, whatever its condition.
    Careless,
}

/// What the client says of an answer to a request that it has sent more than once.
const RETRIED: &str = "as told, after 1 retries, max_retries: 10, retry_timeout: 180s";

/// The next so many puts go wrong.
#[derive(Debug)]
pub struct Shaky {
    pub inner: InMemory,
    pub next: Mutex<(Trouble, usize)>,
    silent: AtomicBool,
    denied: AtomicBool,
    denied_put: AtomicBool,
}

impl Shaky {
    pub fn new(trouble: Trouble, times: usize) -> Shaky {
        let next = Mutex::new((trouble, times));
        Shaky {
            inner: InMemory::new(),
            next,
            silent: AtomicBool::new(false),
            denied: AtomicBool::new(false),
            denied_put: AtomicBool::new(false),
        }
    }

    fn next(&self) -> Option<Trouble> {
        let mut next = self.next.lock().unwrap();
        next.1 = next.1.checked_sub(1)?;
        Some(next.0)
    }
}

impl std::fmt::Display for Shaky {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shaky")
    }
}

#[async_trait]
impl ObjectStore for Shaky {
    async fn put_opts(&self, path: &Path, payload: PutPayload, mut options: PutOptions) -> Result<PutResult> {
        let (to, source) = (path.to_string(), "as told");
        if self.denied_put.swap(false, Ordering::SeqCst) {
            return Err(Told::PermissionDenied { path: to, source: source.into() });
        }
        match self.next() {
            None => self.inner.put_opts(path, payload, options).await,
            Some(Trouble::Conflict) => Err(Told::AlreadyExists { path: to, source: source.into() }),
            Some(told @ (Trouble::DoneThenRefused | Trouble::DoneThenSilent)) => {
                self.silent.store(told == Trouble::DoneThenSilent, Ordering::SeqCst);
                self.inner.put_opts(path, payload, options).await?;
                Err(Told::Precondition { path: to, source: source.into() })
            }
            Some(Trouble::DoneThenOvertaken) => {
                self.inner.put_opts(path, payload, options).await?;
                self.inner.put(path, "lockkeeper-fence 6\nsix".into()).await?;
                Err(Told::Precondition { path: to, source: RETRIED.into() })
            }
            Some(Trouble::DoneThenOvertakenByALower) => {
                self.inner.put_opts(path, payload, options).await?;
                self.inner.put(path, "lockkeeper-fence 4\nfour".into()).await?;
                self.denied_put.store(true, Ordering::SeqCst);
                Err(Told::Precondition { path: to, source: RETRIED.into() })
            }
            Some(told @ (Trouble::DoneThenDenied | Trouble::DoneThenDeleted)) => {
                self.denied.store(told == Trouble::DoneThenDenied, Ordering::SeqCst);
                self.inner.put_opts(path, payload, options).await?;
                if told == Trouble::DoneThenDeleted {
                    self.inner.delete(path).await?;
                }
                Err(Told::Precondition { path: to, source: RETRIED.into() })
            }
            Some(Trouble::DoneThenNoReply) => {
                self.inner.put_opts(path, payload, options).await?;
                Err(Told::Generic { store: "Shaky", source: source.into() })
            }
            Some(Trouble::Careless) => {
                options.mode = PutMode::Overwrite;
                self.inner.put_opts(path, payload, options).await
            }
        }
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        if self.silent.swap(false, Ordering::SeqCst) {
            return Err(Told::Generic { store: "Shaky", source: "as told".into() });
        }
        if self.denied.swap(false, Ordering::SeqCst) {
            return Err(Told::PermissionDenied { path: path.to_string(), source: "as told".into() });
        }
        self.inner.get_opts(path, options).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
