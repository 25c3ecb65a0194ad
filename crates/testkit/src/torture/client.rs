//! The client processes of a run, as the process sees them that starts them.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use lockkeeper_host::{Clock, SystemClock};
use rustix::process::{Pid, Signal, kill_process};

use super::{ProcessEnd, TrafficPlan};

/// The program that runs [`super::run_traffic_client`], and the arguments that make it do so.
#[derive(Clone, Debug)]
pub struct ClientProgram {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
}

/// A client process. Dropping it kills it.
#[derive(Debug)]
pub struct TrafficProcess {
    proc: String,
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl TrafficProcess {
    /// Starts a client.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(program: &ClientProgram, plan: &TrafficPlan) -> io::Result<TrafficProcess> {
        let mut child = Command::new(&program.program)
            .args(&program.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut input = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let output = BufReader::new(child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?);
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            output
                .lines()
                .map_while(Result::ok)
                .take_while(|line| sender.send(line.clone()).is_ok())
                .for_each(drop);
        });
        writeln!(input, "{}", serde_json::to_string(plan)?)?;
        Ok(TrafficProcess { proc: plan.proc.clone(), child, input: Some(input), lines })
    }

    /// Its name in the history.
    pub fn proc(&self) -> &str {
        &self.proc
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it says `word`.
    ///
    /// # Errors
    /// If it ends before, or says nothing for too long.
    pub fn wait_for(&self, word: &str, patience: Duration) -> io::Result<()> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) if line == word => return Ok(()),
                Ok(_) => {}
                Err(error) => {
                    return Err(io::Error::other(format!(
                        "client {} did not say {word:?}: {error}",
                        self.proc
                    )));
                }
            }
        }
    }

    /// Blocks its runtime for so long.
    ///
    /// # Errors
    /// If it has ended.
    pub fn starve(&mut self, span: Duration) -> io::Result<()> {
        let input = self.input.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        writeln!(input, "starve {}", span.as_millis())
    }

    /// Lets it go on after it was stopped.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills it, and waits until it is gone.
    ///
    /// # Errors
    /// If it cannot be waited for.
    pub fn kill(&mut self) -> io::Result<ProcessEnd> {
        // A store of this host grants its locks to others the moment it is dead: its holds end before that.
        let at = SystemClock.now().as_nanos();
        self.signal(Signal::KILL);
        self.child.wait()?;
        Ok(ProcessEnd { proc: self.proc.clone(), at })
    }

    /// Asks it to stop. [`TrafficProcess::finish`] waits for that.
    pub fn stop(&mut self) {
        self.input = None;
    }

    /// Waits until it has stopped.
    ///
    /// # Errors
    /// If it fails, or takes too long.
    pub fn finish(mut self, patience: Duration) -> io::Result<()> {
        self.stop();
        let deadline = Instant::now() + patience;
        loop {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => {
                    return Err(io::Error::other(format!("client {} ended with {status}", self.proc)));
                }
                None if Instant::now() > deadline => {
                    return Err(io::Error::other(format!(
                        "client {} did not stop within {patience:?}",
                        self.proc
                    )));
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // A process that has ended needs no signal.
            _ = kill_process(pid, signal);
        }
    }
}

impl Drop for TrafficProcess {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        _ = self.child.wait();
    }
}
