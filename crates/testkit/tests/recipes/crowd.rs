//! Many processes that use one recipe, and are killed at random.

use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use lockkeeper::{Clock, SystemClock};
use lockkeeper_testkit::history::{History, HistoryEvent, Operation, OperationPhase};
use rustix::process::{Pid, Signal, kill_process};

/// A smaller number, unless the long suites are wanted.
pub fn times(full: u64, usual: u64) -> u64 {
    if std::env::var_os("LOCKKEEPER_FULL").is_some() { full } else { usual }
}

/// A number below `n`, by the operating system's dice.
pub fn below(n: usize) -> usize {
    let [a, b, c, d, ..] = lockkeeper_host::random_128();
    u32::from_ne_bytes([a, b, c, d]) as usize % n
}

/// A process that uses a recipe.
pub fn recipe(what: &str, args: &[String]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_recipe"))
        .arg(what)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts")
}

/// Processes that do the same, of which any may be killed, and begins anew, or be stopped for a while.
pub struct Crowd {
    what: &'static str,
    /// The arguments of each.
    args: Vec<Vec<String>>,
    children: Vec<Child>,
    stopped: Option<(usize, Instant)>,
    /// Who was killed, and a moment before that.
    pub killed: Vec<(u32, u64)>,
    pub stops: u64,
}

impl Crowd {
    pub fn new(what: &'static str, args: Vec<Vec<String>>) -> Crowd {
        let children = args.iter().map(|args| recipe(what, args)).collect();
        Crowd { what, args, children, stopped: None, killed: Vec::new(), stops: 0 }
    }

    /// The same for all.
    pub fn alike(what: &'static str, count: usize, args: &[String]) -> Crowd {
        Crowd::new(what, vec![args.to_vec(); count])
    }

    fn runs(&mut self, at: usize) -> bool {
        self.children[at].try_wait().unwrap().is_none()
    }

    fn signal(&mut self, at: usize, signal: Signal) {
        if self.runs(at) {
            kill_process(Pid::from_raw(self.children[at].id() as i32).unwrap(), signal).unwrap();
        }
    }

    /// Another process.
    pub fn other_than(&self, pid: u32) -> u32 {
        let others: Vec<u32> = self.children.iter().map(Child::id).filter(|other| *other != pid).collect();
        others[below(others.len())]
    }

    /// Which of them it is, by its pid; any, if that is no more.
    fn find(&self, pid: Option<u32>) -> usize {
        let found = pid.and_then(|pid| self.children.iter().position(|child| child.id() == pid));
        found.unwrap_or_else(|| below(self.children.len()))
    }

    /// Kills one of them, this one if it is given, and starts another in its place. Returns what it had printed. One that has
    /// come to its end is left alone.
    pub fn kill_one(&mut self, pid: Option<u32>) -> String {
        let at = self.find(pid);
        if !self.runs(at) {
            return String::new();
        }
        self.killed.push((self.children[at].id(), SystemClock.now().as_nanos()));
        self.children[at].kill().unwrap();
        let fresh = recipe(self.what, &self.args[at]);
        let killed = std::mem::replace(&mut self.children[at], fresh).wait_with_output().unwrap();
        if self.stopped.is_some_and(|(stopped, _)| stopped == at) {
            self.stopped = None;
        }
        String::from_utf8_lossy(&killed.stdout).into_owned()
    }

    /// Stops one of them in its tracks for as long as `span`, while the others go on. One at a time; `false`: not now.
    pub fn stop_one(&mut self, pid: Option<u32>, span: Duration) -> bool {
        let at = self.find(pid);
        if self.stopped.is_some() || !self.runs(at) {
            return false;
        }
        self.signal(at, Signal::STOP);
        self.stopped = Some((at, Instant::now() + span));
        self.stops += 1;
        true
    }

    /// Lets the one that is stopped go on when its time is over.
    pub fn go_on(&mut self) {
        if let Some((at, _)) = self.stopped.take_if(|(_, until)| *until <= Instant::now()) {
            self.signal(at, Signal::CONT);
        }
    }

    /// Waits until all have come to their end. Returns what each had printed.
    pub fn finish(mut self) -> Vec<(ExitStatus, String)> {
        if let Some((_, until)) = self.stopped {
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
            self.go_on();
        }
        let ends = std::mem::take(&mut self.children).into_iter().map(|child| {
            let end = child.wait_with_output().unwrap();
            (end.status, String::from_utf8_lossy(&end.stdout).into_owned())
        });
        ends.collect()
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The history, in which the dead believe nothing any more.
pub fn history_of(path: &Path, killed: &[(u32, u64)]) -> History {
    let told = History::read(path).unwrap();
    let elected = told
        .events()
        .iter()
        .filter(|event| event.op == Operation::Acquire && event.phase == OperationPhase::Ok);
    let deaths = elected.filter_map(|event| {
        let (_, t) = killed.iter().find(|(pid, t)| pid.to_string() == event.proc && *t >= event.t)?;
        Some(HistoryEvent {
            t: *t,
            proc: event.proc.clone(),
            attempt: event.attempt.clone(),
            ..HistoryEvent::signal(&event.lock)
        })
    });
    History::new(told.events().iter().cloned().chain(deaths.collect::<Vec<_>>()))
}
