//! Starting programs so that they never outlive the test, and sending signals to all that they started.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{OnceLock, mpsc};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

/// A program to run.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// As whom, if not as the user of the test. Only root can ask for this.
    pub user: Option<String>,
    /// Variables of its environment, besides those of the test.
    pub env: Vec<(OsString, OsString)>,
}

impl Launch {
    /// A program and its arguments, as the user of the test.
    pub fn new<A: Into<OsString>>(program: impl Into<PathBuf>, args: impl IntoIterator<Item = A>) -> Self {
        let args = args.into_iter().map(Into::into).collect();
        Launch { program: program.into(), args, user: None, env: Vec::new() }
    }

    /// The command, with the output going to the end of `log`. It dies with the test, even if that is killed.
    fn command(&self, log: &Path) -> io::Result<Command> {
        let log = File::options().create(true).append(true).open(log)?;
        let mut command = Command::new("setpriv");
        if let Some(user) = &self.user {
            command.args(["--reuid", user, "--regid", user, "--init-groups"]);
        }
        command.args(["--pdeathsig", "KILL"]).arg(&self.program).args(&self.args);
        command.envs(self.env.iter().map(|(key, value)| (key, value)));
        // A group of its own: a Ctrl-C in the terminal is for the test, which then ends this.
        command.process_group(0).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(command)
    }

    /// Starts it and does not wait.
    pub fn spawn(&self, log: &Path) -> io::Result<Child> {
        spawn(self.command(log)?)
    }

    /// Runs it to its end, which has to be a good one.
    pub fn run(&self, log: &Path) -> io::Result<()> {
        let status = self.spawn(log)?.wait()?;
        let bad = || io::Error::other(format!("{} ended with {status}", self.program.display()));
        status.success().then_some(()).ok_or_else(bad)
    }
}

type ServerProcess = (Command, mpsc::Sender<io::Result<Child>>);

/// The death signal comes when the *thread* ends that started the child: so one thread that never ends starts all.
fn spawn(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<mpsc::Sender<ServerProcess>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, queue) = mpsc::channel::<ServerProcess>();
        let work = move || {
            for (mut command, answer) in queue {
                let _ = answer.send(command.spawn());
            }
        };
        std::thread::Builder::new().name("spawner".into()).spawn(work).expect("a thread can be started");
        jobs
    });
    let (answer, answered) = mpsc::channel();
    spawner.send((command, answer)).expect("the spawner runs");
    answered.recv().expect("the spawner answers")
}

/// Waits until the process has ended; `false` if it runs on after `span`.
pub(super) fn wait_for_end(child: &mut Child, span: Duration) -> io::Result<bool> {
    if child.try_wait()?.is_some() {
        return Ok(true);
    }
    let fd: OwnedFd = pidfd_open(pid(child.id()), PidfdFlags::empty())?;
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timespec(span)))?;
    Ok(child.try_wait()?.is_some())
}

fn timespec(span: Duration) -> Timespec {
    Timespec { tv_sec: span.as_secs() as i64, tv_nsec: span.subsec_nanos().into() }
}

pub(super) fn pid(id: u32) -> Pid {
    i32::try_from(id).ok().and_then(Pid::from_raw).expect("a child has a pid")
}

/// Sends a signal to a process and to all its descendants, and returns who they are. PostgreSQL puts each of its
/// children into a session of its own, where a signal to the group does not find them.
pub(super) fn signal_tree(root: u32, signal: Signal) -> Vec<u32> {
    let _ = kill_process(pid(root), signal);
    let mut tree = vec![root];
    // The parent comes first: a stopped one starts no more. So a second look finds those that came in between.
    while let Some(child) = processes().find(|(id, parent)| tree.contains(parent) && !tree.contains(id)) {
        let _ = kill_process(pid(child.0), signal);
        tree.push(child.0);
    }
    tree
}

/// Kills a process and all its descendants, and waits until the last of them is gone: PostgreSQL does not start again
/// while one of its old children still has the shared memory. They are stopped first, because a child whose parent is
/// gone cannot be found any more.
pub(super) fn kill_tree(root: u32) {
    let tree = signal_tree(root, Signal::STOP);
    let open = |id: &u32| pidfd_open(pid(*id), PidfdFlags::empty()).ok();
    let ends: Vec<OwnedFd> = tree.iter().filter_map(open).collect();
    for id in tree {
        let _ = kill_process(pid(id), Signal::KILL);
    }
    for end in ends {
        let _ = poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&timespec(Duration::from_secs(20))));
    }
}

/// Every process and its parent.
fn processes() -> impl Iterator<Item = (u32, u32)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let id = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        // The name stands in brackets and may hold anything; then come the state and the parent.
        let parent = stat[stat.rfind(')')? + 1..].split_whitespace().nth(1)?.parse().ok()?;
        Some((id, parent))
    })
}
