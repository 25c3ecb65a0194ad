//! The output of a command for `once` and `cached`: kept up to a limit, and forwarded as it comes or held back.
//!
//! For each stream one thread reads and keeps, and another thread forwards. A slow reader of this process delays the command, as it
//! would without this process, but delays neither the handling of the command's end nor that of a signal. A reader that has gone
//! away does not change what is kept.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper_core::IgnorePoison;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use tokio::sync::oneshot;

use crate::signals::SignalStream;

/// How much of each stream is kept.
pub const KEPT: usize = 1 << 20;
/// How much is still read when the command has ended: a pipe has less, unless a process that it left behind goes on writing.
const AFTER_THE_END: usize = 1 << 20;

/// How long a slow reader is waited for when a signal has ended the command.
const AFTER_A_SIGNAL: Duration = Duration::from_secs(1);

/// The ends that the command writes to.
#[derive(Debug)]
pub struct CommandPipes {
    pub out: PipeWriter,
    pub err: PipeWriter,
}

/// The output of the command, as far as it was kept.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CapturedStream {
    pub bytes: Vec<u8>,
    /// There was more.
    pub cut: bool,
}

/// Everything that is known at the end.
#[derive(Debug)]
pub struct CapturedOutput {
    pub out: CapturedStream,
    pub err: CapturedStream,
    /// Why not all of it was passed on, other than that the reader had gone away.
    pub undelivered: Option<io::Error>,
    /// A signal ended the wait for a slow reader.
    pub signal: Option<Signal>,
}

/// Both streams of a command, on their way through us.
pub struct OutputCapture {
    out: (oneshot::Receiver<io::Result<CapturedStream>>, Arc<ChunkHandover>),
    err: (oneshot::Receiver<io::Result<CapturedStream>>, Arc<ChunkHandover>),
    /// Closed when the command has ended: what it left behind may keep the pipes open for ever.
    ended: PipeWriter,
}

impl OutputCapture {
    /// Forwards both streams, and keeps the beginning of each.
    pub fn start() -> io::Result<(OutputCapture, CommandPipes)> {
        Self::start_with(io::stdout(), KEPT)
    }

    /// Keeps up to `most` bytes of stdout and forwards none of them: the caller prints them if the command succeeds. Forwards stderr.
    pub fn hold_stdout_back(most: usize) -> io::Result<(OutputCapture, CommandPipes)> {
        Self::start_with(io::sink(), most)
    }

    fn start_with(
        stdout: impl Write + Send + 'static,
        most: usize,
    ) -> io::Result<(OutputCapture, CommandPipes)> {
        let (out_reader, out) = io::pipe()?;
        let (err_reader, err) = io::pipe()?;
        let (writer, ended) = io::pipe()?;
        let capture = OutputCapture {
            out: pass_on(out_reader, writer.try_clone()?, stdout, most)?,
            err: pass_on(err_reader, writer, io::stderr(), KEPT)?,
            ended,
        };
        Ok((capture, CommandPipes { out, err }))
    }

    /// The command has ended: what it printed, all of which has been read. A reader that does not read is waited for until a
    /// signal comes, or only for a moment if one had been passed on to the command (`asked`).
    pub async fn finish(
        self,
        asked: Option<Signal>,
        signals: &mut SignalStream,
    ) -> io::Result<CapturedOutput> {
        drop(self.ended);
        let handovers = [self.out.1, self.err.1];
        let (out, err) = (self.out.0, self.err.0);
        let mut both = std::pin::pin!(async { (out.await, err.await) });
        let patience = if asked.is_some() { AFTER_A_SIGNAL } else { Duration::MAX };
        let read = signals.race(tokio::time::timeout(patience, both.as_mut())).await;
        let ended = match &read {
            Ok(Ok(_)) => None,
            Ok(Err(_)) => asked,
            Err(signal) => Some(*signal),
        };
        let (kept, signal) = match (read, ended) {
            (Ok(Ok(kept)), _) => (kept, None),
            (_, signal) => {
                handovers.iter().for_each(|handover| handover.change(|state| state.abandoned = true));
                (both.await, signal)
            }
        };
        // Unless a thread panicked, both have sent.
        let (Ok(out), Ok(err)) = kept else { return Err(io::Error::other("its output was lost")) };
        // A part of the output is no result: the next caller would take it for all there was.
        let (out, err) = (out?, err?);
        let undelivered = handovers.iter().find_map(|handover| handover.lock().error.take());
        let undelivered = undelivered.filter(|e| e.kind() != io::ErrorKind::BrokenPipe);
        Ok(CapturedOutput { out, err, undelivered, signal })
    }
}

/// The state that one thread hands to the other.
#[derive(Debug, Default)]
struct ChunkHandover {
    state: Mutex<ChunkHandoverState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ChunkHandoverState {
    chunk: Option<Vec<u8>>,
    /// Nothing follows.
    over: bool,
    /// It cannot be written any more.
    error: Option<io::Error>,
    /// The capture no longer waits for the reader of its output.
    abandoned: bool,
}

impl ChunkHandoverState {
    fn is_open(&self) -> bool {
        self.error.is_none() && !self.abandoned
    }
}

impl ChunkHandover {
    fn lock(&self) -> MutexGuard<'_, ChunkHandoverState> {
        self.state.lock().ignore_poison()
    }

    fn change(&self, change: impl FnOnce(&mut ChunkHandoverState)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Gives a chunk to the thread that passes it on, when that is done with the one before. False: it is not passed on.
    fn give(&self, chunk: Option<Vec<u8>>) -> bool {
        let state = self.lock();
        let waited = self.changed.wait_while(state, |state| state.is_open() && state.chunk.is_some());
        let mut state = waited.ignore_poison();
        state.over = chunk.is_none();
        let open = state.is_open();
        state.chunk = chunk;
        drop(state);
        self.changed.notify_all();
        open
    }

    fn write_to(&self, mut to: impl Write) {
        loop {
            let state = self.lock();
            let waited = self.changed.wait_while(state, |state| state.chunk.is_none() && !state.over);
            let state = waited.ignore_poison();
            // The chunk stays in the state until it is written: the reading thread waits for that before it gives the next one.
            let Some(chunk) = state.chunk.clone() else { return };
            drop(state);
            let written = to.write_all(&chunk).and_then(|()| to.flush());
            self.change(|state| match written {
                Ok(()) => state.chunk = None,
                Err(e) => state.error = Some(e),
            });
            if self.lock().error.is_some() {
                return;
            }
        }
    }
}

fn pass_on(
    from: PipeReader,
    ended: PipeReader,
    to: impl Write + Send + 'static,
    most: usize,
) -> io::Result<(oneshot::Receiver<io::Result<CapturedStream>>, Arc<ChunkHandover>)> {
    let (sender, receiver) = oneshot::channel();
    let handover = Arc::new(ChunkHandover::default());
    let writing = handover.clone();
    std::thread::Builder::new().spawn(move || writing.write_to(to))?;
    let reading = handover.clone();
    std::thread::Builder::new().spawn(move || {
        let kept = read(from, &ended, &reading, most);
        // Waits for the last chunk to be written.
        reading.give(None);
        let _ = sender.send(kept);
    })?;
    Ok((receiver, handover))
}

/// Reads to the end, and keeps the first `most` bytes. If the reader of the output has gone away, the thread reads on until it has
/// them; then it closes the pipe, and the command gets EPIPE as it would without this process.
fn read(
    mut from: PipeReader,
    ended: &PipeReader,
    handover: &ChunkHandover,
    most: usize,
) -> io::Result<CapturedStream> {
    let mut kept = CapturedStream::default();
    let (mut chunk, mut left) = (vec![0; 64 << 10], AFTER_THE_END);
    let mut heard = true;
    while (heard || !kept.cut) && readable(&from, ended, &mut left)? {
        let n = match from.read(&mut chunk) {
            Ok(0) => break,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(unreadable(&e)),
            Ok(n) => n,
        };
        left = left.saturating_sub(n).max(1);
        let room = most - kept.bytes.len();
        kept.bytes.extend_from_slice(&chunk[..n.min(room)]);
        kept.cut |= n > room;
        heard = heard && handover.give(Some(chunk[..n].to_vec()));
    }
    Ok(kept)
}

fn unreadable(e: &io::Error) -> io::Error {
    io::Error::other(format!("its output could not be read: {e}"))
}

/// Waits until there is something to read. False: the command has ended, and all it printed has been read.
fn readable(from: &PipeReader, ended: &PipeReader, left: &mut usize) -> io::Result<bool> {
    loop {
        let mut fds = [PollFd::new(from, PollFlags::IN), PollFd::new(ended, PollFlags::IN)];
        match poll(&mut fds, None::<&Timespec>) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(unreadable(&e.into())),
            Ok(_) => {}
        }
        let over = !fds[1].revents().is_empty();
        if !over {
            *left = AFTER_THE_END;
        }
        return Ok(!fds[0].revents().is_empty() && (!over || *left > 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The thread kept the bytes before a failure as if they were the whole output.
    #[test]
    fn a_stream_that_cannot_be_read_is_no_result() {
        let directory: std::os::fd::OwnedFd = std::fs::File::open("/").unwrap().into();
        let (ended, _command) = io::pipe().unwrap();
        assert!(read(PipeReader::from(directory), &ended, &ChunkHandover::default(), KEPT).is_err());
    }
}
