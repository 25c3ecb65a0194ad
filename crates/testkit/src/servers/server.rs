//! A server process of a test: start, wait until it answers, stop, kill, restart.

use std::fmt;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use super::process::{Launch, kill_tree, pid, signal_tree, wait_for_end};
use super::{Port, TempDir};

/// Long enough for a JVM on a busy machine.
const START: Duration = Duration::from_secs(60);
const STOP: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(10);

/// How one kind of server is run.
pub trait Program: Send + Sync {
    /// The name of the program in messages and of its directory.
    fn name(&self) -> &str;
    /// How many ports it needs.
    fn ports(&self) -> usize;
    /// Where it listens.
    fn host(&self) -> Ipv4Addr {
        Ipv4Addr::LOCALHOST
    }
    /// Makes what has to be there before the first start: configuration files, a data directory.
    fn prepare(&self, place: &ServerSite) -> io::Result<()>;
    /// The command that runs the program in the foreground.
    fn launch(&self, place: &ServerSite) -> Launch;
    /// Really talks to it: `Ok` when it does what it is there for. Called again and again, so it must not wait long.
    fn ping(&self, place: &ServerSite, pid: u32) -> io::Result<()>;
    /// The signal that ends the program soon, without waiting for its clients to leave.
    fn stop_signal(&self) -> Signal;
}

/// Where a server lives: a directory and ports of its own.
#[derive(Debug)]
pub struct ServerSite {
    dir: TempDir,
    host: Ipv4Addr,
    ports: Vec<Port>,
}

impl ServerSite {
    /// Its directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The path of something in its directory.
    pub fn join(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The address of its first port, or of another one.
    pub fn addr(&self, nth: usize) -> SocketAddr {
        (self.host, self.ports[nth].number()).into()
    }

    /// How many ports it has.
    pub fn ports(&self) -> usize {
        self.ports.len()
    }

    fn log(&self) -> PathBuf {
        self.join("log")
    }
}

/// A server that runs for a test. Dropping it kills it and removes its directory.
///
/// Everything here blocks, for as long as a real server takes.
pub struct Server {
    program: Box<dyn Program>,
    place: ServerSite,
    child: Option<Child>,
}

impl Server {
    /// Starts a server and waits until it answers. If another process took its port just then, it tries another.
    ///
    /// # Panics
    /// If it does not start; its log is in the message.
    pub fn start(program: impl Program + 'static) -> Server {
        let mut tries = 0..5;
        loop {
            let place = ServerSite {
                dir: TempDir::new(program.name()),
                host: program.host(),
                ports: (0..program.ports()).map(|_| Port::claim()).collect(),
            };
            let prepared = program.prepare(&place);
            let failed = match prepared.and_then(|()| up(&program, &place)) {
                Ok(child) => return Server { program: Box::new(program), place, child: Some(child) },
                Err(why) => why,
            };
            if !port_was_taken(&place) || tries.next().is_none() {
                panic!("{}", report(&program, &place, &failed));
            }
        }
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.place.addr(0)
    }

    /// Its directory and all its ports.
    pub fn place(&self) -> &ServerSite {
        &self.place
    }

    /// Its process, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Whether it does what it is there for, now.
    ///
    /// # Errors
    /// If it does not run, or does not answer soon, or not as it should.
    pub fn ready(&self) -> io::Result<()> {
        let pid = self.pid().ok_or_else(|| io::Error::other("it does not run"))?;
        self.program.ping(&self.place, pid)
    }

    /// All that it has written to its log so far.
    pub fn log(&self) -> String {
        read_log(&self.place)
    }

    /// Asks it to end, and waits until it has. One that does not want to is killed.
    pub fn stop(&mut self) {
        self.resume();
        let Some(child) = &mut self.child else { return };
        let _ = kill_process(pid(child.id()), self.program.stop_signal());
        if !wait_for_end(child, STOP).unwrap_or(false) {
            eprintln!("{} did not stop: it is killed", self.program.name());
        }
        self.kill9();
    }

    /// Kills it and all that it started, and waits until it is gone. Its data stay.
    pub fn kill9(&mut self) {
        if let Some(child) = self.child.take() {
            end(child);
        }
    }

    /// Stops it in its tracks (SIGSTOP): the kernel still accepts connections for it, and no reply comes.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets it go on after [`Server::pause`].
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Starts it again with its old data and port; one that still runs is stopped first.
    ///
    /// # Panics
    /// If it does not start; its log is in the message.
    pub fn restart(&mut self) {
        self.stop();
        match up(&*self.program, &self.place) {
            Ok(child) => self.child = Some(child),
            Err(why) => panic!("{}", report(&*self.program, &self.place, &why)),
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(child) = &self.child {
            signal_tree(child.id(), signal);
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({}, {}, pid {:?})", self.program.name(), self.addr(), self.pid())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill9();
    }
}

fn end(mut child: Child) {
    if matches!(child.try_wait(), Ok(None)) {
        kill_tree(child.id());
    }
    let _ = child.wait();
}

/// Starts it and waits until it answers.
fn up(program: &dyn Program, place: &ServerSite) -> io::Result<Child> {
    let mut child = program.launch(place).spawn(&place.log())?;
    match answers(program, place, &mut child) {
        Ok(()) => Ok(child),
        Err(why) => {
            end(child);
            Err(why)
        }
    }
}

fn answers(program: &dyn Program, place: &ServerSite, child: &mut Child) -> io::Result<()> {
    let deadline = Instant::now() + START;
    loop {
        let answer = program.ping(place, child.id());
        // The waiting is for its end, so that a failed start is known at once. An answer of one that has ended came
        // from another process on its port.
        let pause = if answer.is_ok() { Duration::ZERO } else { POLL };
        if wait_for_end(child, pause)? {
            let status = child.wait()?;
            return Err(io::Error::other(format!("it ended with {status}")));
        }
        match answer {
            Ok(()) => return Ok(()),
            Err(e) if Instant::now() > deadline => {
                return Err(io::Error::other(format!("no good answer within {START:?}: {e}")));
            }
            Err(_) => {}
        }
    }
}

fn read_log(place: &ServerSite) -> String {
    String::from_utf8_lossy(&fs::read(place.log()).unwrap_or_default()).into_owned()
}

fn port_was_taken(place: &ServerSite) -> bool {
    read_log(place).to_lowercase().contains("address already in use")
}

fn report(program: &dyn Program, place: &ServerSite, why: &io::Error) -> String {
    let log = read_log(place);
    let lines: Vec<&str> = log.lines().collect();
    let tail = lines[lines.len().saturating_sub(60)..].join("\n");
    let launch = program.launch(place);
    let (name, dir) = (program.name(), place.dir().display());
    format!("{name} did not start: {why}\nrun as: {launch:?}\nin: {dir}\nthe end of its log:\n{tail}")
}
