//! Wake pipes: how processes wake each other. Every open store with waiters or watchers has a named pipe in the directory
//! beside the database. A message is one number of eight bytes.
//!
//! A pipe also answers two questions about its reader without the database. *Does the reader exist?* Opening a pipe for
//! writing fails at once if no process reads it, also across namespaces. *Does it run?* The reader writes the time into the
//! access time of its pipe about once a second; a stopped process does not.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lockkeeper_core::Result;
use lockkeeper_host::awake_time;
use rustix::fs::{CWD, Mode, OFlags, Timestamps, fstat, futimens, mkfifoat, open};
use rustix::io::Errno;
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::db_path::{FileId, beside, share_like};
use crate::error::io_error;

/// The identity of an open store among all that share the file: 128 random bits.
pub(crate) type Peer = [u8; 16];

/// How often a waiting store refreshes the time on its pipe, and checks its waiters in case a message was lost.
pub(crate) const POLL: Duration = Duration::from_millis(1000);
/// After how long without a refresh other processes skip the waiters of a store.
pub(crate) const SILENCE: Duration = Duration::from_secs(3);

/// How many seconds old a pipe without a reader must be before it is removed: its process may be about to open it.
const MIN_AGE: i64 = 2;
/// How many pipes a process checks when it creates its own.
const MAX_SWEPT: usize = 128;

/// A message is the ticket of a waiter, or one of these. This one: a transaction wrote events.
pub(crate) const EVENTS_WRITTEN: u64 = 0;
/// A store sends this one only to itself: the processes to watch have changed.
pub(crate) const RELOAD: u64 = u64::MAX;

/// The state of another open store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerState {
    /// It reads its pipe, and has refreshed its time.
    Alive,
    /// It has its pipe open, but has not refreshed its time for [`SILENCE`]: it is probably stopped.
    Silent,
    /// No process reads its pipe.
    Gone,
}

/// The directory of pipes.
#[derive(Clone, Debug)]
pub(crate) struct PipeDir {
    database: PathBuf,
    dir: PathBuf,
}

impl PipeDir {
    pub fn beside(database: &Path) -> Self {
        PipeDir { database: database.to_owned(), dir: beside(database, ".wake") }
    }

    fn pipe(&self, peer: &Peer) -> PathBuf {
        self.dir.join(peer.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    }

    fn open(&self, peer: &Peer) -> Result<OwnedFd, Errno> {
        open(self.pipe(peer), OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
    }

    /// The state of a peer. If this process may not open the pipe, the peer counts as alive.
    pub fn peer_state(&self, peer: &Peer) -> PeerState {
        match self.open(peer) {
            Ok(pipe) => match fstat(&pipe) {
                Ok(stat) if awake_time().saturating_sub(last_seen(&stat)) > SILENCE => PeerState::Silent,
                _ => PeerState::Alive,
            },
            Err(Errno::NXIO | Errno::NOENT | Errno::NOTDIR) => PeerState::Gone,
            Err(_) => PeerState::Alive,
        }
    }

    /// Sends a message to a peer. Returns `false` if the peer is gone. A full pipe needs no further message.
    pub fn wake(&self, peer: &Peer, message: u64) -> bool {
        match self.open(peer) {
            Ok(pipe) => {
                let _ = rustix::io::write(&pipe, &message.to_ne_bytes());
                true
            }
            Err(e) => !matches!(e, Errno::NXIO | Errno::NOENT | Errno::NOTDIR),
        }
    }

    /// Removes pipes without a reader, but not new ones. Every process that creates a pipe checks some others, because a
    /// killed process leaves its pipe behind.
    pub fn sweep_dead_pipes(&self) {
        let now = clock_gettime(ClockId::Realtime).tv_sec;
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten().take(MAX_SWEPT) {
            let path = entry.path();
            let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            // A waiting process changes this time about once a second.
            if entry.metadata().is_ok_and(|meta| (meta.ctime() - now).abs() > MIN_AGE)
                && matches!(open(&path, flags, Mode::empty()), Err(Errno::NXIO))
            {
                let _ = fs::remove_file(&path);
            }
        }
    }

    /// Removes the pipe of a peer that is gone.
    pub fn remove_pipe(&self, peer: &Peer) {
        let _ = fs::remove_file(self.pipe(peer));
    }
}

/// The pipe of this store.
#[derive(Debug)]
pub(crate) struct WakePipe {
    path: PathBuf,
    pipe: OwnedFd,
}

impl WakePipe {
    pub fn open(pipes: &PipeDir, peer: &Peer) -> Result<Self> {
        let path = pipes.pipe(peer);
        let not_made = |e: Errno| io_error("cannot make", &path, &io::Error::from(e));
        match fs::create_dir(&pipes.dir) {
            Ok(()) => share_like(&pipes.database, &pipes.dir),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(io_error("cannot make", &pipes.dir, &e)),
        }
        match mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR) {
            Ok(()) | Err(Errno::EXIST) => share_like(&pipes.database, &path),
            Err(e) => return Err(not_made(e)),
        }
        // Opened for writing too, so that reads do not return end-of-file when the last writer closes the pipe. With
        // NOATIME, so that reads do not overwrite the access time.
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let pipe = open(&path, flags | OFlags::NOATIME, Mode::empty());
        let pipe = pipe.or_else(|_| open(&path, flags, Mode::empty())).map_err(not_made)?;
        let wake_pipe = WakePipe { path, pipe };
        wake_pipe.mark_alive();
        Ok(wake_pipe)
    }

    pub fn pipe(&self) -> &OwnedFd {
        &self.pipe
    }

    /// Refreshes the time on the pipe. This needs no transaction and no sync: the time is worthless after a crash.
    pub fn mark_alive(&self) {
        let t = awake_time();
        let at = Timespec { tv_sec: t.as_secs().cast_signed(), tv_nsec: t.subsec_nanos().into() };
        let _ = futimens(&self.pipe, &Timestamps { last_access: at, last_modification: at });
    }

    /// Whether the path still leads to this pipe: another program may have deleted it.
    pub fn is_in_place(&self) -> bool {
        let mine = fstat(&self.pipe).ok().map(|stat| FileId::new(stat.st_dev, stat.st_ino));
        mine == FileId::of(&self.path)
    }

    /// Sends a message to the wake thread of this store.
    pub fn send_to_self(&self, message: u64) {
        let _ = rustix::io::write(&self.pipe, &message.to_ne_bytes());
    }

    /// All messages since the last call.
    pub fn read_messages(&self) -> Vec<u64> {
        let mut messages = Vec::new();
        let mut buffer = [0; 512];
        while let Ok(n) = rustix::io::read(&self.pipe, &mut buffer) {
            let chunks = buffer[..n].chunks_exact(8);
            messages.extend(chunks.map(|chunk| u64::from_ne_bytes(chunk.try_into().expect("8 bytes"))));
            if n < buffer.len() {
                break;
            }
        }
        messages
    }
}

impl Drop for WakePipe {
    fn drop(&mut self) {
        if self.is_in_place() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn last_seen(stat: &rustix::fs::Stat) -> Duration {
    // Not the modification time: every writer of the pipe changes that one.
    Duration::new(u64::try_from(stat.st_atime).unwrap_or(0), u32::try_from(stat.st_atime_nsec).unwrap_or(0))
}
