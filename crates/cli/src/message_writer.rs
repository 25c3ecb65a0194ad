//! Messages that must not hold up the thread that sends them: a thread of their own writes them to stdout or stderr.
//!
//! A pipe without a reader that reads blocks its writer. The thread that ends a command before its lock is gone, and the one that renews
//! the lock, must not be stopped by that, so they only leave their messages here.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use lockkeeper_core::IgnorePoison;
use nix::sys::signal::{SigSet, Signal};
use rustix::event::{PollFd, PollFlags, poll};

/// The most bytes in the queue. Messages beyond it are dropped, and their number is printed later.
const LIMIT: usize = 1 << 20;
/// How long to wait for a reader before something else is written to the same place.
pub const SHORT_FLUSH: Duration = Duration::from_millis(50);
/// How long to wait for a reader before the process ends.
pub const FINAL_FLUSH: Duration = Duration::from_secs(5);

/// The queue of messages for stderr.
pub static STDERR: MessageWriter = MessageWriter::new(Stream::Err);
/// The queue of messages for stdout while a lock is held.
pub static STDOUT: MessageWriter = MessageWriter::new(Stream::Out);

#[derive(Clone, Copy, Debug)]
enum Stream {
    Out,
    Err,
}

/// One of the two, with the messages that wait for it.
#[derive(Debug)]
pub struct MessageWriter {
    stream: Stream,
    state: Mutex<WriterState>,
    changed: Condvar,
}

#[derive(Debug)]
struct WriterState {
    messages: VecDeque<String>,
    bytes: usize,
    dropped: u64,
    /// The thread has taken a message and is not done with it.
    writing: bool,
    started: bool,
}

impl MessageWriter {
    const fn new(stream: Stream) -> Self {
        let state =
            WriterState { messages: VecDeque::new(), bytes: 0, dropped: 0, writing: false, started: false };
        MessageWriter { stream, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Queues `text` behind all earlier messages. Never waits for a reader.
    pub fn enqueue(&'static self, text: String) {
        let mut state = self.lock();
        if state.bytes + text.len() > LIMIT {
            state.dropped += 1;
            return;
        }
        state.bytes += text.len();
        state.messages.push_back(text);
        self.wake(state);
    }

    /// As [`enqueue`](MessageWriter::enqueue), unless a message waits already: for a status line that the next one replaces.
    pub fn enqueue_if_idle(&'static self, text: String) {
        if self.lock().is_idle() {
            self.enqueue(text);
        }
    }

    /// Waits until everything is written, but no longer than `limit`.
    pub fn flush(&'static self, limit: Duration) {
        let end = Instant::now() + limit;
        let mut state = self.lock();
        while !state.is_idle() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.ignore_poison().0;
        }
    }

    /// Starts the thread with the first message: most commands have none.
    fn wake(&'static self, mut state: MutexGuard<'_, WriterState>) {
        if !state.started {
            let spawned = std::thread::Builder::new().name("messages".into()).spawn(|| self.write_all());
            // Without a thread nothing can be written; the next message tries again.
            state.started = spawned.is_ok();
        }
        drop(state);
        self.changed.notify_all();
    }

    fn write_all(&self) {
        // From the background of a terminal that stops those who write (`stty tostop`), a message would stop the whole process.
        let mut ttou = SigSet::empty();
        ttou.add(Signal::SIGTTOU);
        let _ = ttou.thread_block();
        let mut state = self.lock();
        loop {
            let next = match state.messages.pop_front() {
                Some(text) => text,
                None if state.dropped > 0 => {
                    let n = std::mem::take(&mut state.dropped);
                    dropped(n)
                }
                None => {
                    state = self.changed.wait(state).ignore_poison();
                    continue;
                }
            };
            state.bytes = state.bytes.saturating_sub(next.len());
            state.writing = true;
            drop(state);
            // If the stream is closed, there is no other place for the message.
            let _ = match self.stream {
                Stream::Out => write(io::stdout(), next.as_bytes(), rustix::stdio::stdout()),
                Stream::Err => write(io::stderr(), next.as_bytes(), rustix::stdio::stderr()),
            };
            state = self.lock();
            state.writing = false;
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, WriterState> {
        self.state.lock().ignore_poison()
    }
}

/// Whether everything that is written is JSON.
pub static JSON: AtomicBool = AtomicBool::new(false);

fn dropped(n: u64) -> String {
    let text = format!("{n} messages were dropped here, because the reader was too slow");
    match JSON.load(Ordering::Relaxed) {
        true => format!("{}\n", serde_json::json!({ "event": "log", "level": "warn", "message": text })),
        false => format!("lockkeeper: {text}\n"),
    }
}

impl WriterState {
    fn is_idle(&self) -> bool {
        self.messages.is_empty() && !self.writing && self.dropped == 0
    }
}

/// Writes all of it, also where another program has set the terminal or pipe not to block.
fn write(mut to: impl Write, mut bytes: &[u8], fd: impl std::os::fd::AsFd) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.write(bytes).and_then(|n| to.flush().map(|()| n)) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                let _ = poll(&mut [PollFd::new(&fd, PollFlags::OUT)], None);
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
