//! The scenario that fences exist for, with real processes: A is granted the lock and stopped; B is granted it and writes; A continues
//! and writes. The resource refuses the write of A; its twin, which does not check, is left with the late value.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use lockkeeper::Lockkeeper;
use lockkeeper_fenced::Fenced;
use rustix::process::{Pid, Signal, kill_process};

use super::FencedHarness;
use crate::servers::TempDir;
use crate::stop::stop_between_transactions;

const ADDRESS: &str = "LOCKKEEPER_PAUSED_WRITER_ADDRESS";
const STORE: &str = "LOCKKEEPER_PAUSED_WRITER_STORE";
/// Long enough that a slow machine is granted the lock in time, short enough to wait for the end of the lease.
const TTL: Duration = Duration::from_secs(3);

/// Runs the scenario against one resource. `writer` is the path of the test that is [`write()`] for the same harness.
///
/// # Panics
/// If the resource takes the late write, or if the twin shows no harm: then the scenario proves nothing.
pub async fn run<H: FencedHarness>(harness: &H, writer: &str) {
    let dir = TempDir::new("paused-writer");
    let store = format!("sqlite:{}", dir.join("locks.db").display());
    let start = || Writer::start(writer, &store, &harness.address());
    let mut a = start();
    let first = a.held();
    stop_between_transactions(a.child.id(), &dir.join("locks.db"));
    let mut b = start();
    let second = b.held();
    assert!(second > first, "the lock's fence went back");
    b.go_on();
    assert_eq!(
        (b.says("believes"), b.says("fenced"), b.says("twin")),
        ("true".into(), "taken".into(), "taken".into())
    );
    a.signal(Signal::CONT);
    a.go_on();
    // A is no longer the holder and writes all the same, as a program that does not check its guard would.
    assert_eq!(a.says("believes"), "false");
    assert_eq!(a.says("fenced"), "stale", "the late write was not refused");
    assert_eq!(a.says("twin"), "taken");

    let fenced = H::client(&harness.address()).await.read("paused").await.unwrap().expect("it was written");
    assert_eq!((fenced.fence.get(), fenced.value), (second, Some(second.to_string().into_bytes())));
    let twin = H::twin(&harness.address()).await.read("twin").await.unwrap().expect("it was written");
    let late = first.to_string().into_bytes();
    assert_eq!(twin.value, Some(late), "the twin was to show the harm, and did not");
}

/// One of the two processes. Does nothing if the parent process did not start it.
///
/// # Panics
/// If anything but a refusal goes wrong.
pub async fn write<H: FencedHarness>() {
    let (Ok(address), Ok(store)) = (std::env::var(ADDRESS), std::env::var(STORE)) else {
        return println!("only [`run`] starts this");
    };
    let (resource, twin) = (H::client(&address).await, H::twin(&address).await);
    let keeper = Lockkeeper::open(&store).await.expect("the store opens");
    let guard = keeper.lock("paused").ttl(TTL).acquire().await.expect("the lock is granted");
    say("held", &guard.fence().to_string());
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).expect("the parent process writes a line");
    say("believes", &guard.is_held().to_string());
    let value = guard.fence().to_string();
    for (what, place, name) in [("fenced", &resource, "paused"), ("twin", &twin, "twin")] {
        say(what, outcome(&**place, name, &guard, value.as_bytes()).await);
    }
    let _ = guard.release().await;
}

async fn outcome(place: &dyn Fenced, name: &str, guard: &lockkeeper::Guard, value: &[u8]) -> &'static str {
    match place.put(name, guard.fence(), value).await {
        Ok(()) => "taken",
        Err(e) => e.outcome().as_str(),
    }
}

/// Prints on a line of its own, because the test harness prints to the same pipe.
fn say(what: &str, word: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\npaused-writer: {what} {word}")
        .and_then(|()| out.flush())
        .expect("the parent process reads");
}

struct Writer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Writer {
    fn start(test: &str, store: &str, address: &str) -> Writer {
        // The path of a test has no crate before it.
        let test = test.split_once("::").map_or(test, |(_, test)| test);
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(std::env::current_exe().expect("we run"))
            .args(["--ignored", "--exact", "--nocapture", test])
            .env(ADDRESS, address)
            .env(STORE, store)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a writer starts");
        let (input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        Writer { child, input, output: BufReader::new(output) }
    }

    /// The value that the process prints for `what`, which must be the next line that it prints.
    fn says(&mut self, what: &str) -> String {
        loop {
            let mut line = String::new();
            let read = self.output.read_line(&mut line).expect("its output can be read");
            assert!(read > 0, "the writer ended before it said {what:?}");
            if let Some(said) = line.trim_end().strip_prefix("paused-writer: ") {
                let (about, word) = said.split_once(' ').expect("two words");
                assert_eq!(about, what, "it said {said:?}");
                return word.to_owned();
            }
        }
    }

    fn held(&mut self) -> u64 {
        self.says("held").parse().expect("a fence")
    }

    fn go_on(&mut self) {
        writeln!(self.input, "go on").expect("the process reads");
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32).expect("a child has a pid")
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("the process lives");
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
