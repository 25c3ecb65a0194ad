//! How processes wake each other: every open store that waits or watches has a named pipe in the directory beside the
//! database, and reads eight bytes at a time from it.
//!
//! A pipe also answers two questions about its reader without any help from the database. *Is it there?* Opening a pipe
//! for writing fails at once if nobody reads it, in whatever namespace the reader is. *Is it well?* The reader writes
//! the time onto its pipe about once a second; one that is stopped does not.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use lockkeeper_core::Result;
use rustix::fs::{CWD, Mode, OFlags, Timestamps, fstat, futimens, mkfifoat, open};
use rustix::io::Errno;
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::fault::io_fault;
use crate::place::{Identity, beside, share_like};

/// The name of an open store among all that share the file: random, so that no two are ever the same.
pub(crate) type Peer = [u8; 16];

/// How often a store that waits shows that it is well, and looks behind the notifications.
pub(crate) const POLL: Duration = Duration::from_millis(1000);
/// For how long a store may be silent before it is passed over.
pub(crate) const SILENCE: Duration = Duration::from_secs(3);

/// For how many seconds a pipe without a reader is left alone: somebody may just be making it.
const FRESH: i64 = 2;
/// How many pipes are looked at by somebody who makes one.
const SWEPT: usize = 128;

/// What is said to a reader: the ticket to look at, or one of these.
pub(crate) const NEWS: u64 = 0;
/// Only ever said to oneself: the list of processes to watch has changed.
pub(crate) const RELOAD: u64 = u64::MAX;

/// How a peer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// There, and well as far as can be told.
    Here,
    /// There, but silent for so long that it is not waited for.
    Silent,
    /// Not there any more.
    Gone,
}

/// The directory of pipes.
#[derive(Clone, Debug)]
pub(crate) struct Post {
    database: PathBuf,
    dir: PathBuf,
}

impl Post {
    pub fn beside(database: &Path) -> Self {
        Post { database: database.to_owned(), dir: beside(database, ".wake") }
    }

    fn pipe(&self, peer: &Peer) -> PathBuf {
        self.dir.join(peer.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    }

    fn open(&self, peer: &Peer) -> Result<OwnedFd, Errno> {
        open(self.pipe(peer), OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
    }

    /// How a peer is. Who may not open its pipe cannot tell, and believes that it is well.
    pub fn presence(&self, peer: &Peer) -> Presence {
        match self.open(peer) {
            Ok(pipe) => match fstat(&pipe) {
                Ok(stat) if awake().saturating_sub(seen(&stat)) > SILENCE => Presence::Silent,
                _ => Presence::Here,
            },
            Err(Errno::NXIO | Errno::NOENT | Errno::NOTDIR) => Presence::Gone,
            Err(_) => Presence::Here,
        }
    }

    /// Says something to a peer; `false` if it is gone. A full pipe needs no more: its reader has enough to wake it.
    pub fn nudge(&self, peer: &Peer, word: u64) -> bool {
        match self.open(peer) {
            Ok(pipe) => {
                let _ = rustix::io::write(&pipe, &word.to_ne_bytes());
                true
            }
            Err(e) => !matches!(e, Errno::NXIO | Errno::NOENT | Errno::NOTDIR),
        }
    }

    /// Takes away pipes that nobody reads any more, but not one that is just being made. Every process that makes a pipe
    /// does so, and looks at a few: processes that end without a word leave one each.
    pub fn sweep_old(&self) {
        let now = clock_gettime(ClockId::Realtime).tv_sec;
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten().take(SWEPT) {
            let path = entry.path();
            let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            // Who waits changes this time about once a second.
            if entry.metadata().is_ok_and(|meta| (meta.ctime() - now).abs() > FRESH)
                && matches!(open(&path, flags, Mode::empty()), Err(Errno::NXIO))
            {
                let _ = fs::remove_file(&path);
            }
        }
    }

    /// Takes away the pipe of a peer that is gone.
    pub fn sweep(&self, peer: &Peer) {
        let _ = fs::remove_file(self.pipe(peer));
    }
}

/// The pipe of this store.
#[derive(Debug)]
pub(crate) struct Mailbox {
    path: PathBuf,
    pipe: OwnedFd,
}

impl Mailbox {
    pub fn open(post: &Post, peer: &Peer) -> Result<Self> {
        let path = post.pipe(peer);
        let not_made = |e: Errno| io_fault("cannot make", &path, &io::Error::from(e));
        match fs::create_dir(&post.dir) {
            Ok(()) => share_like(&post.database, &post.dir),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(io_fault("cannot make", &post.dir, &e)),
        }
        match mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR) {
            Ok(()) | Err(Errno::EXIST) => share_like(&post.database, &path),
            Err(e) => return Err(not_made(e)),
        }
        // Open for writing too: so it is never at its end when the last writer leaves. And reading must not write the
        // time of day where we write how well we are.
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let pipe = open(&path, flags | OFlags::NOATIME, Mode::empty());
        let pipe = pipe.or_else(|_| open(&path, flags, Mode::empty())).map_err(not_made)?;
        let mailbox = Mailbox { path, pipe };
        mailbox.touch();
        Ok(mailbox)
    }

    pub fn pipe(&self) -> &OwnedFd {
        &self.pipe
    }

    /// Shows that we are well. No transaction and no sync: a moment on a file that no crash needs to keep.
    pub fn touch(&self) {
        let t = awake();
        let at = Timespec { tv_sec: t.as_secs().cast_signed(), tv_nsec: t.subsec_nanos().into() };
        let _ = futimens(&self.pipe, &Timestamps { last_access: at, last_modification: at });
    }

    /// Whether others still find the pipe: somebody may have cleaned up too much.
    pub fn in_place(&self) -> bool {
        let mine = fstat(&self.pipe).ok().map(|stat| Identity::new(stat.st_dev, stat.st_ino));
        mine == Identity::of(&self.path)
    }

    /// Says something to our own reader.
    pub fn say(&self, word: u64) {
        let _ = rustix::io::write(&self.pipe, &word.to_ne_bytes());
    }

    /// Everything that was said since the last time.
    pub fn words(&self) -> Vec<u64> {
        let mut words = Vec::new();
        let mut buffer = [0; 512];
        while let Ok(n) = rustix::io::read(&self.pipe, &mut buffer) {
            words.extend(
                buffer[..n].chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("8"))),
            );
            if n < buffer.len() {
                break;
            }
        }
        words
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        if self.in_place() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn seen(stat: &rustix::fs::Stat) -> Duration {
    // The time of its last change is no good for this: whoever writes into a pipe changes it.
    Duration::new(u64::try_from(stat.st_atime).unwrap_or(0), u32::try_from(stat.st_atime_nsec).unwrap_or(0))
}

/// How long the machine has been awake: CLOCK_MONOTONIC stands still while it sleeps, so that nobody looks stopped when
/// it wakes up. The shift of a time namespace is taken off.
fn awake() -> Duration {
    static SHIFT: OnceLock<i64> = OnceLock::new();
    let shift = *SHIFT.get_or_init(|| {
        let offsets = fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
        offsets.lines().find_map(monotonic_offset).unwrap_or(0)
    });
    let t = clock_gettime(ClockId::Monotonic);
    Duration::from_nanos(u64::try_from(t.tv_sec * 1_000_000_000 + t.tv_nsec - shift).unwrap_or(0))
}

fn monotonic_offset(line: &str) -> Option<i64> {
    let mut words = line.split_whitespace();
    if !matches!(words.next(), Some("monotonic" | "1")) {
        return None;
    }
    let seconds: i64 = words.next()?.parse().ok()?;
    let nanos: i64 = words.next()?.parse().ok()?;
    Some(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}
