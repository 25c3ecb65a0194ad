//! Writes the file of a job on a thread of its own: the numbers of before are read, changed and written whole, by a rename.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockkeeper_core::IgnorePoison;
use rustix::fs::{FlockOperation, flock};

use super::numbers::{JobLabels, JobNumbers};
use crate::text::plain;

/// How long the end of a call waits for the file. A disk that hangs must not keep a job from ending.
const FLUSH: Duration = Duration::from_secs(5);
/// The most bytes that are read of the file of before.
const FILE_BYTES: u64 = 64 << 10;

/// The most changes that are kept for a disk that does not take them.
const KEPT: usize = 1000;

type Change = Box<dyn Fn(&mut JobNumbers) + Send>;

enum FileOrder {
    Change(Change),
    /// Answers when everything of before is written.
    Flush(SyncSender<()>),
}

/// The handle to the thread that writes the file. The thread starts with the first change.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    labels: JobLabels,
    orders: Option<Sender<FileOrder>>,
    failure: Arc<Mutex<Option<String>>>,
}

impl MetricsFile {
    pub fn new(path: PathBuf, labels: JobLabels) -> Self {
        // The command may change to another directory later; this process does not.
        let path = std::path::absolute(&path).unwrap_or(path);
        MetricsFile { path, labels, orders: None, failure: Arc::default() }
    }

    /// Changes the numbers in the file, later.
    pub fn change(&mut self, change: impl Fn(&mut JobNumbers) + Send + 'static) {
        if self.orders.is_none() {
            self.orders = self.start();
        }
        if let Some(orders) = &self.orders {
            let _ = orders.send(FileOrder::Change(Box::new(change)));
        }
    }

    fn start(&self) -> Option<Sender<FileOrder>> {
        let (orders, receiver) = mpsc::channel();
        let (path, labels, failure) = (self.path.clone(), self.labels.clone(), self.failure.clone());
        let run = move || serve(&path, &labels, &failure, &receiver);
        let started = std::thread::Builder::new().name("lockkeeper-metrics".into()).spawn(run);
        match started {
            Ok(_) => Some(orders),
            Err(e) => {
                *self.failure.lock().ignore_poison() = Some(describe(&self.path, &e));
                None
            }
        }
    }

    /// Waits a moment until everything is written. Returns why not.
    pub fn flush(&self) -> Option<String> {
        if let Some(orders) = &self.orders {
            let (done, is_done) = mpsc::sync_channel(1);
            let sent = orders.send(FileOrder::Flush(done)).is_ok();
            if !sent || is_done.recv_timeout(FLUSH).is_err() {
                let hangs = io::Error::new(io::ErrorKind::TimedOut, "the disk does not answer");
                return self.failure().or_else(|| Some(describe(&self.path, &hangs)));
            }
        }
        self.failure()
    }

    /// Why the file was not written, once.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().ignore_poison().take()
    }
}

fn describe(path: &Path, e: &io::Error) -> String {
    format!("the metrics were not written to {}: {e}", plain(&path.to_string_lossy()))
}

fn serve(path: &Path, labels: &JobLabels, failure: &Mutex<Option<String>>, orders: &Receiver<FileOrder>) {
    // Changes that could not be written stay, for the next time.
    let mut changes = Vec::new();
    while let Ok(order) = orders.recv() {
        let mut flushes = Vec::new();
        for order in std::iter::once(order).chain(orders.try_iter()) {
            match order {
                FileOrder::Change(change) if changes.len() < KEPT => changes.push(change),
                FileOrder::Change(_) => {}
                FileOrder::Flush(done) => flushes.push(done),
            }
        }
        if !changes.is_empty() {
            let written = update(path, labels, &changes);
            if written.is_ok() {
                changes.clear();
            }
            *failure.lock().ignore_poison() = written.err().map(|e| describe(path, &e));
        }
        flushes.iter().for_each(|done| _ = done.send(()));
    }
}

/// Applies the changes to the file. The directory is locked meanwhile, so that no call of the same job undoes the count of another.
fn update(path: &Path, labels: &JobLabels, changes: &[Change]) -> io::Result<()> {
    // A link stays a link.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let found = fs::symlink_metadata(&path).ok();
    if found.as_ref().is_some_and(|found| !found.is_file()) {
        return Err(io::Error::other("it is no regular file"));
    }
    let dir = path.parent().ok_or_else(|| io::Error::other("it is in no directory"))?;
    let lock = File::open(dir)?;
    flock(&lock, FlockOperation::LockExclusive)?;
    let mut text = String::new();
    if found.is_some() {
        // A file that is not text, or not ours, is replaced.
        let _ = File::open(&path)?.take(FILE_BYTES).read_to_string(&mut text);
    }
    let mut job = JobNumbers::parse(&text, labels).unwrap_or_default();
    let new = TempMetrics::create(&path, found.as_ref())?;
    changes.iter().for_each(|change| change(&mut job));
    new.replace(&path, &job.render(labels))
}

/// The new file beside the old one. A name that does not end with `.prom` is not read by node-exporter.
struct TempMetrics {
    file: File,
    path: Option<PathBuf>,
}

impl TempMetrics {
    /// With the mode and the owner of the old file; a new one may be read by all, because node-exporter is another user.
    fn create(path: &Path, old: Option<&fs::Metadata>) -> io::Result<Self> {
        let mut name = OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        name.push(format!(".{}", std::process::id()));
        let temp = path.with_file_name(name);
        // Left by a process with this pid that was killed.
        let _ = fs::remove_file(&temp);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&temp)?;
        let new = TempMetrics { file, path: Some(temp) };
        if let Some(old) = old {
            // Only root can keep the owner of a file of another user.
            let _ = std::os::unix::fs::fchown(&new.file, Some(old.uid()), Some(old.gid()));
            new.file.set_permissions(Permissions::from_mode(old.mode() & 0o777))?;
        }
        Ok(new)
    }

    fn replace(mut self, path: &Path, text: &str) -> io::Result<()> {
        self.file.write_all(text.as_bytes())?;
        if let Some(temp) = &self.path {
            fs::rename(temp, path)?;
        }
        self.path = None;
        Ok(())
    }
}

impl Drop for TempMetrics {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
    }
}
