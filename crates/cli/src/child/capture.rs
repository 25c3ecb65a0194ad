//! What a command prints: passed on as it comes, and kept up to a limit.

use std::io::{PipeReader, PipeWriter, Read, Write};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::oneshot;

/// What is kept of each stream.
pub const KEPT: usize = 1 << 20;
/// How much is still read when the command has ended: a pipe has less, unless somebody it left behind goes on writing.
const AFTER_THE_END: usize = 1 << 20;

/// The ends that the command writes to.
#[derive(Debug)]
pub struct Pipes {
    pub out: PipeWriter,
    pub err: PipeWriter,
}

/// What was printed, as far as it was kept.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Kept {
    pub bytes: Vec<u8>,
    /// There was more.
    pub cut: bool,
}

/// Both streams of a command, on their way through us.
pub struct Capture {
    out: oneshot::Receiver<Kept>,
    err: oneshot::Receiver<Kept>,
    /// Closed when the command has ended: what it left behind may keep the pipes open for ever.
    ended: PipeWriter,
}

impl Capture {
    /// Begins to pass on. Threads, because a reader of ours that is slow must not keep us from ending the command.
    pub fn start() -> std::io::Result<(Capture, Pipes)> {
        let (out_reader, out) = std::io::pipe()?;
        let (err_reader, err) = std::io::pipe()?;
        let (told, ended) = std::io::pipe()?;
        let capture = Capture {
            out: pass_on(out_reader, told.try_clone()?, std::io::stdout()),
            err: pass_on(err_reader, told, std::io::stderr()),
            ended,
        };
        Ok((capture, Pipes { out, err }))
    }

    /// The command has ended: what it printed.
    pub async fn finish(self) -> (Kept, Kept) {
        drop(self.ended);
        (self.out.await.unwrap_or_default(), self.err.await.unwrap_or_default())
    }
}

fn pass_on(
    mut from: PipeReader,
    ended: PipeReader,
    mut to: impl Write + Send + 'static,
) -> oneshot::Receiver<Kept> {
    let (tell, told) = oneshot::channel();
    std::thread::spawn(move || {
        let mut kept = Kept::default();
        let (mut chunk, mut left) = (vec![0; 64 << 10], AFTER_THE_END);
        while readable(&from, &ended, &mut left) {
            let n = match from.read(&mut chunk) {
                Ok(0) | Err(_) => break,
                Ok(n) => n,
            };
            left = left.saturating_sub(n).max(1);
            let room = KEPT - kept.bytes.len();
            kept.bytes.extend_from_slice(&chunk[..n.min(room)]);
            kept.cut |= n > room;
            // Nobody listens any more: closing our end tells the command so, as it would be without us.
            if to.write_all(&chunk[..n]).and_then(|()| to.flush()).is_err() {
                break;
            }
        }
        let _ = tell.send(kept);
    });
    told
}

/// Waits until there is something to read. False: the command has ended, and all it printed has been read.
fn readable(from: &PipeReader, ended: &PipeReader, left: &mut usize) -> bool {
    loop {
        let mut fds = [PollFd::new(from, PollFlags::IN), PollFd::new(ended, PollFlags::IN)];
        match poll(&mut fds, None::<&Timespec>) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return false,
            Ok(_) => {}
        }
        let over = !fds[1].revents().is_empty();
        if !over {
            *left = AFTER_THE_END;
        }
        return !fds[0].revents().is_empty() && (!over || *left > 1);
    }
}
