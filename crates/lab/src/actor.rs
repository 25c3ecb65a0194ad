//! A worker as its director sees it: a child process that can be stopped, continued and killed.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Sender;

use lockkeeper_testkit::stop;
use rustix::process::{Pid, Signal, kill_process};

use crate::event::{LabEvent, LabEventKind};
use crate::worker::WorkerPlan;

/// The subcommand that runs a worker.
pub const WORKER_SUBCOMMAND: &str = "lab-worker";

/// The process of a worker. Dropping it kills the process.
#[derive(Debug)]
pub struct ActorProcess {
    child: Child,
    stdin: ChildStdin,
    /// Whether the director ended it.
    pub killed: bool,
}

impl ActorProcess {
    /// Starts `program` as this worker. Its events go to `events`.
    pub fn start(program: &Path, plan: &WorkerPlan, events: Sender<LabEvent>) -> io::Result<ActorProcess> {
        let stderr = File::options().create(true).append(true).open(plan.dir.join("stderr"))?;
        let mut child = Command::new(program)
            // The name is for people who look at the list of processes.
            .args([WORKER_SUBCOMMAND, &plan.actor])
            // A group of its own: a Ctrl-C is for the director, which ends this process then.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()?;
        let (mut stdin, stdout) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let mut first = serde_json::to_vec(plan)?;
        first.push(b'\n');
        stdin.write_all(&first)?;
        let actor = plan.actor.clone();
        std::thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(|line| line.ok());
            for event in lines.filter_map(|line| serde_json::from_str(&line).ok()) {
                let _ = events.send(event);
            }
            let _ = events.send(LabEvent::now(actor, LabEventKind::Gone));
        });
        Ok(ActorProcess { child, stdin, killed: false })
    }

    /// Sends a command to the worker.
    pub fn send(&mut self, line: &str) -> io::Result<()> {
        self.stdin.write_all(format!("{line}\n").as_bytes())
    }

    /// Stops it, and returns when each of its threads has stopped; outside of a transaction, if its store is this database.
    pub fn stop(&self, database: Option<&Path>) {
        match database {
            Some(database) => stop::stop_between_transactions(self.child.id(), database),
            None => stop::stop(self.child.id()),
        }
    }

    /// Lets it continue.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills it, and returns when it is gone.
    pub fn kill(&mut self) {
        self.killed = true;
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }

    /// Whether it has ended by itself with an error. Call it only after its [`LabEventKind::Gone`].
    pub fn has_failed(&mut self) -> bool {
        !self.killed && !self.child.wait().is_ok_and(|status| status.success())
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a child has a pid");
        // It may have ended: until it is waited for, no other process has its number.
        let _ = kill_process(pid, signal);
    }
}

impl Drop for ActorProcess {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.kill();
        }
    }
}
