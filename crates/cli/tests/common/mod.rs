//! A place of its own for every test: a directory with a store in it, and the real program.
#![allow(dead_code, reason = "every test file uses its own part of this")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_lockkeeper");
/// Nothing here takes this long unless it hangs.
pub const LONG: Duration = Duration::from_secs(30);

/// A shell that runs the tests in the background ignores INT, and the processes that the tests start would inherit that.
pub fn with_default_signals(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP,INT,QUIT,TERM,USR1,USR2").arg(program);
    command
}

pub struct Place {
    pub dir: PathBuf,
}

impl Place {
    pub fn new(test: &str) -> Self {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        Place { dir }
    }

    pub fn url(&self) -> String {
        format!("sqlite:{}", self.db().display())
    }

    pub fn db(&self) -> PathBuf {
        self.dir.join("locks.db")
    }

    /// The program with its store, in this directory.
    pub fn lk<S: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = with_default_signals(PROGRAM);
        command.args(args).current_dir(&self.dir).env("LOCKKEEPER_STORE", self.url());
        command.env_remove("NO_COLOR").stdin(Stdio::null());
        command
    }

    /// The program with a command line that is split at spaces, run to its end.
    pub fn run(&self, line: &str) -> Output {
        self.lk(line.split(' ')).output().unwrap()
    }

    /// `lockkeeper run` with these options and a script, running.
    pub fn start(&self, options: &str, script: &str) -> Running {
        let mut command = self.lk(["run"]);
        command.args(options.split(' ')).args(["--", "sh", "-c", script]);
        Running::new(command)
    }

    /// Holds a lock until it is dropped.
    pub fn hold(&self, options: &str) -> Running {
        let mut command = self.lk(["hold"]);
        command.args(options.split(' '));
        let mut held = Running::new(command);
        assert!(held.line().starts_with("held "));
        held
    }

    pub fn show(&self, name: &str) -> Value {
        json(&self.run(&format!("show {name} --json")))
    }

    /// Waits until `name` looks as wanted.
    pub fn until(&self, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let started = Instant::now();
        loop {
            let seen = self.show(name);
            if wanted(&seen) {
                return seen;
            }
            assert!(started.elapsed() < LONG, "still {seen}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The earliest moment at which the store can grant the lock to another process, in seconds since boot.
    pub fn expiry(&self, name: &str) -> f64 {
        let before = uptime();
        let seen = self.show(name);
        before
            + seen["lock"]["held"][0]["expires_in_ms"].as_f64().unwrap_or_else(|| panic!("not held: {seen}"))
                / 1000.0
    }

    /// Waits until `running`, which holds `name`, has renewed its lease, and returns the new expiry.
    pub fn until_renewed(&self, name: &str, running: &mut Child, before: f64) -> f64 {
        let started = Instant::now();
        loop {
            assert!(running.try_wait().unwrap().is_none(), "it ended instead of renewing its lease");
            let expiry = self.expiry(name);
            // What is read twice of one lease differs by the rounding, and by the time that reading takes.
            if expiry > before + 1.0 {
                return expiry;
            }
            assert!(started.elapsed() < LONG, "the lease was not renewed");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn read(&self, file: &str) -> String {
        fs::read_to_string(self.dir.join(file)).unwrap_or_default()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

/// A program that is running, with pipes to it.
pub struct Running {
    pub child: Child,
    out: BufReader<ChildStdout>,
}

impl Running {
    pub fn new(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Running { child, out }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32).unwrap()
    }

    /// The next line of stdout.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Stops it, between two transactions on the store of `place`: no other process could use the store before it continues.
    pub fn stop(&self, place: &Place) {
        lockkeeper_testkit::stop::stop_between_transactions(self.child.id(), &place.db());
    }

    pub fn say(&mut self, text: &str) {
        self.child.stdin.as_mut().unwrap().write_all(text.as_bytes()).unwrap();
    }

    /// Closes its stdin, waits for its end, and returns the exit code, the rest of stdout, and stderr.
    pub fn end(mut self) -> (i32, String, String) {
        drop(self.child.stdin.take());
        let mut err = self.child.stderr.take().unwrap();
        let errors = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = err.read_to_string(&mut text);
            text
        });
        let mut out = String::new();
        let _ = self.out.read_to_string(&mut out);
        (code(self.child.wait().unwrap()), out, errors.join().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        if std::thread::panicking() {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// The exit code; a program that was killed itself never counts as one that ended with 128 + n.
pub fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| -status.signal().unwrap())
}

pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}{}", text(output), errors(output)))
}

/// Seconds since boot, as a shell reads them from /proc/uptime.
pub fn uptime() -> f64 {
    seconds(&fs::read_to_string("/proc/uptime").unwrap())
}

/// The first number of a line.
pub fn seconds(line: &str) -> f64 {
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Whether a process with this pid runs; a zombie does not.
pub fn runs(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    state.is_some_and(|state| !"ZX".contains(state))
}

/// Waits until no such process runs.
pub fn until_gone(pid: &str) {
    let started = Instant::now();
    while runs(pid) {
        assert!(started.elapsed() < LONG, "{pid} still runs");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The watchdog of `lockkeeper` with this pid: a child of it that has the word on its command line.
pub fn watchdog(run: Pid) -> Option<Pid> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()).find_map(|pid| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let parent: i32 = stat.rsplit(") ").next()?.split(' ').nth(1)?.parse().ok()?;
        let is = words.split(|b| *b == 0).any(|word| word == b"__watchdog") && parent == run.as_raw_pid();
        (is && runs(&pid.to_string())).then(|| Pid::from_raw(pid))?
    })
}

/// Waits until this process has a watchdog other than that one.
pub fn until_watched(run: Pid, but_not_by: Option<Pid>) -> Pid {
    let started = Instant::now();
    loop {
        match watchdog(run) {
            Some(pid) if Some(pid) != but_not_by => return pid,
            _ => assert!(started.elapsed() < LONG, "no watchdog, or still {but_not_by:?}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until `child` catches `signal`.
pub fn until_caught(child: &mut Child, signal: Signal) {
    let status = format!("/proc/{}/status", child.id());
    let caught = || {
        let status = std::fs::read_to_string(&status).unwrap_or_default();
        let set = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).map(str::trim);
        set.and_then(|set| u64::from_str_radix(set, 16).ok()).unwrap_or(0) >> (signal.as_raw() - 1) & 1 == 1
    };
    let started = Instant::now();
    while !caught() {
        assert!(
            started.elapsed() < LONG && child.try_wait().unwrap().is_none(),
            "it does not catch {signal:?}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A store that no process can write to.
pub struct StoreOutage(rusqlite::Connection);

impl StoreOutage {
    pub fn begin(place: &Place) -> StoreOutage {
        let store = rusqlite::Connection::open(place.db()).unwrap();
        store.busy_timeout(LONG).unwrap();
        store.execute_batch("BEGIN IMMEDIATE").unwrap();
        StoreOutage(store)
    }

    /// The earliest end of a lease, in seconds since boot. No process can renew it during the outage, so it is the last word.
    pub fn expiry(&self) -> f64 {
        let nanos: i64 = self.0.query_row("SELECT min(expires) FROM hold", [], |row| row.get(0)).unwrap();
        nanos as f64 / 1e9
    }

    /// Ends the outage in the middle of the lease, when the first renewals of it have failed: they are due after a third of the ttl.
    pub fn last_over_first_renewals(self, ttl: f64) {
        let end = self.expiry() - ttl / 2.0;
        while uptime() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.0.execute_batch("ROLLBACK").unwrap();
    }

    /// Lets the calls of other processes wait for longer: as long as the log changes, they wait for 30 s and not for 5.
    pub fn feign_progress(&self, place: &Place) {
        let log = fs::File::options().append(true).open(format!("{}-wal", place.db().display())).unwrap();
        std::thread::spawn(move || {
            let began = Instant::now();
            while began.elapsed() < LONG * 2 {
                let _ = log.set_modified(std::time::SystemTime::now());
                std::thread::sleep(Duration::from_millis(200));
            }
        });
    }
}

/// A Redis server without memory for anything.
pub fn full_redis() -> Option<lockkeeper_testkit::servers::Server> {
    let redis = lockkeeper_testkit::servers::redis(Default::default()).ok()?;
    lockkeeper_testkit::servers::redis_call(redis.addr(), &["CONFIG", "SET", "maxmemory", "1"]).unwrap();
    Some(redis)
}
