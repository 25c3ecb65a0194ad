use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use clap::Args;
use lockkeeper::{Claim, Done, LockName, Lockkeeper, OnFailure, Outcome, Stored, Turn};
use lockkeeper_host::host_name;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::args::{Common, Inherited, Named, utf8};
use crate::child::capture::{Capture, Kept};
use crate::child::job::{self, Job};
use crate::child::supervise::End;
use crate::exit::{self, Failure};
use crate::report::{Events, Report};
use crate::signals::Signals;
use crate::span;
use crate::store::{self, Address};
use crate::text::quoted;

/// Run a command once under a key; later calls get the same output and exit code.
///
/// The first caller runs it. Whoever asks meanwhile waits for the result, whoever asks later gets it at once: the same
/// bytes on stdout and stderr, the same exit code.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Once {
    #[command(flatten)]
    pub named: Named,
    /// How long the result is kept; after that the key is as good as new
    #[arg(long, value_name = "SPAN", default_value = "24h", value_parser = span::long, allow_hyphen_values = true)]
    pub keep: Duration,
    /// Keep the result of a command that failed, too [default: the next call runs it again]
    #[arg(long)]
    pub keep_failures: bool,
    /// What the key stands for: another text under the same key is refused [default: the command line]
    #[arg(long, value_name = "TEXT", value_parser = utf8("fingerprint"))]
    pub fingerprint: Option<String>,
    /// How long a runner's silence may last before another takes over
    #[arg(long, value_name = "SPAN", default_value = "30s", value_parser = span::ttl, allow_hyphen_values = true)]
    pub ttl: Duration,
    /// Wait for somebody else's run for at most this long, then exit 75 [default: for ever]
    #[arg(long, value_name = "SPAN", value_parser = span::wait, allow_hyphen_values = true)]
    pub wait: Option<Duration>,
    /// Do not wait: exit 75 if somebody else runs it
    #[arg(long, conflicts_with = "wait")]
    pub skip: bool,
    /// Twice would be harm: refuse a store that can forget what is done
    #[arg(long)]
    pub correctness: bool,
    /// Time between TERM and KILL if the lock is lost; at most a quarter of the ttl
    #[arg(long, value_name = "SPAN", default_value = "5s", value_parser = span::up_to_a_day, allow_hyphen_values = true)]
    pub grace: Duration,
    /// Say nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
    #[command(flatten)]
    pub inherited: Inherited,
    #[command(flatten)]
    pub common: Common,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper once invoice-4711 -- ./send-invoice 4711       sent once, however often this is called
  lockkeeper once migrate-v17 --keep 720h -- ./migrate.sh
  lockkeeper once probe --keep-failures -- ./probe          a failure is a result, too

The command sees LOCKKEEPER_KEY, LOCKKEEPER_FENCE and what `run` sets. Of stdout and stderr 1 MiB
each is kept, and it is said when there was more. If the runner dies, the next caller runs the
command again, with a higher fence: what it does should check the fence, or bear to be done twice.

Exit codes: the command's own, from now or from before; 64 the key stands for another command, 75
busy, 76 lost, 65 somebody else took over and its result counts, 78 the store has no records.";

impl Once {
    fn key(&self) -> &LockName {
        self.named.get()
    }

    pub async fn go(self) -> Result<i32, Failure> {
        job::check(&self.command)?;
        let report = Report::new(std::iter::once(self.key()), self.common.json, self.quiet, Events::Stderr);
        let address = self.common.address()?;
        let (keeper, wait) = store::open(address.url.expose(), self.wait, &report).await?;
        let mut signals = Signals::forwarded()?;
        self.check_nested(&keeper, &address).await?;
        match self.claim(&keeper, wait, &mut signals, &report).await? {
            Claim::Done(done) => self.replay(&done, &mut signals, &report).await,
            Claim::Turn(turn) => self.run(*turn, &address, &mut signals, &report).await,
        }
    }

    /// Refuses to wait for the command that we are a part of.
    async fn check_nested(&self, keeper: &Lockkeeper, address: &Address) -> Result<(), Failure> {
        let set = |name: &str| std::env::var(name).unwrap_or_default();
        let store = address.environment(false);
        let same = store.iter().all(|(name, value)| set(name) == value.as_deref().unwrap_or_default());
        if set("LOCKKEEPER_KEY") != self.key().as_str() || !same {
            return Ok(());
        }
        let name = LockName::new(format!("once/{}", self.key()))?;
        let view = keeper.inspect(&name).await?;
        let ours = set("LOCKKEEPER_FENCE");
        if view.is_some_and(|view| view.held.iter().any(|held| held.fence.to_string() == ours)) {
            let message =
                format!("this is a part of what runs under the key {}", quoted(self.key().as_str()));
            return Err(Failure::new(Outcome::Deadlock, message).next("give the inner call a key of its own"));
        }
        Ok(())
    }

    async fn claim(
        &self,
        keeper: &Lockkeeper,
        wait: Option<Duration>,
        signals: &mut Signals,
        report: &Report,
    ) -> Result<Claim, Failure> {
        let on_failure = if self.keep_failures { OnFailure::Keep } else { OnFailure::Retry };
        let mut once = keeper.once(self.key().as_str()).ttl(self.ttl).keep(self.keep).on_failure(on_failure);
        once = match &self.fingerprint {
            Some(text) => once.fingerprint(text),
            None => once.fingerprint(command_line(&self.command)),
        };
        match (self.skip, wait) {
            (true, _) => once = once.wait(Duration::ZERO),
            (_, Some(wait)) => once = once.wait(wait),
            _ => {}
        }
        if self.correctness {
            once = once.for_correctness();
        }
        let wait = async {
            while !self.is_run_by_another(keeper).await {}
            report.say(&format!("waiting for {}: somebody else runs it", report.what()));
            std::future::pending().await
        };
        tokio::select! {
            biased;
            claim = once.claim() => Ok(claim?),
            signal = signals.end() => Err(Failure::silent(signals.leave(keeper, signal).await)),
            never = wait => never,
        }
    }

    /// Whether another process runs it. A store that is slow to answer is none.
    async fn is_run_by_another(&self, keeper: &Lockkeeper) -> bool {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let seen = keeper.inspect(&format!("once/{}", self.key())).await;
        let held = seen.ok().flatten().map(|lock| lock.held).unwrap_or_default();
        held.iter().any(|held| held.holder.pid != std::process::id() || held.holder.host != host_name())
    }

    async fn run(
        &self,
        turn: Turn,
        address: &Address,
        signals: &mut Signals,
        report: &Report,
    ) -> Result<i32, Failure> {
        report.granted(turn.guard());
        let (capture, pipes) = Capture::start().map_err(|e| {
            Failure::new(Outcome::Unavailable, format!("the operating system gives no pipe: {e}"))
        })?;
        let name = turn.guard().names().first().clone();
        let job = Job {
            command: &self.command,
            name: &name,
            grace: self.grace,
            max_hold: None,
            store: address.environment(self.inherited.hide_store),
            env: vec![("LOCKKEEPER_KEY", self.key().to_string())],
            pipes: Some(pipes),
        };
        let (code, asked) = match job.supervise(turn.guard(), signals, report).await? {
            End::Itself { code, asked } => (code, asked),
            End::Lost { why, code, all_gone } => {
                let fence = turn.fence();
                drop(turn);
                report.event("ended", json!({ "outcome": "lost", "fence": fence }));
                return Err(job::lost(&report.what(), &why, code, all_gone));
            }
        };
        let captured = capture.finish(asked, signals).await.map_err(|e| {
            Failure::new(
                Outcome::Unknown,
                format!("the command ended with {code}, but {e}; nothing was kept"),
            )
        })?;
        let output = Printed { code, out: captured.out, err: captured.err };
        output.tell_cut(report);
        let fence = turn.fence();
        let stored = Stored { ok: code == 0, bytes: output.bytes() };
        let interrupted = |_| Err(lockkeeper::Error::Unknown("a signal came first".into()));
        let kept = signals.or_end(turn.finish(stored)).await.unwrap_or_else(interrupted);
        kept.map_err(|error| {
            let said = format!("the command ended with {code}, but its result was not kept: {error}");
            Failure::new(error.outcome(), said)
                .next("ask again with the same key to get the result that counts")
        })?;
        report.event("ended", json!({ "outcome": "done", "fence": fence, "exit_code": code }));
        delivered(captured.undelivered, captured.signal)?;
        Ok(code)
    }

    /// The same again, byte for byte.
    async fn replay(
        &self,
        done: &Done<Stored>,
        signals: &mut Signals,
        report: &Report,
    ) -> Result<i32, Failure> {
        let Some(printed) = Printed::parse(&done.result.bytes) else {
            let message = format!("the result of {} was not stored by this command", report.what());
            return Err(Failure::new(Outcome::Invalid, message).next("use another key"));
        };
        let (out, err) = (printed.out.bytes.clone(), printed.err.bytes.clone());
        // On a thread, because a reader that does not read must not keep a signal from ending us.
        let (tell, told) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || {
            let out = print(std::io::stdout(), &out);
            let _ = tell.send(print(std::io::stderr(), &err).and(out));
        });
        match signals.or_end(told).await {
            Ok(written) => delivered(written.ok().and_then(Result::err), None)?,
            Err(signal) => delivered(None, Some(signal))?,
        }
        printed.tell_cut(report);
        report.event("replayed", json!({ "fence": done.fence, "exit_code": printed.code }));
        Ok(printed.code)
    }
}

/// Writes all of it. A reader that went away does not change what the result was.
fn print(mut to: impl Write, bytes: &[u8]) -> std::io::Result<()> {
    match to.write_all(bytes).and_then(|()| to.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// The result is kept; this caller may not have seen all of it.
fn delivered(error: Option<std::io::Error>, signal: Option<Signal>) -> Result<(), Failure> {
    if let Some(signal) = signal {
        return Err(Failure::silent(exit::by_signal(signal.as_raw())));
    }
    let Some(error) = error else { return Ok(()) };
    Err(Failure::new(
        Outcome::Unknown,
        format!("the result is kept, but not all of it could be printed: {error}"),
    )
    .next("ask again with the same key to get all of it"))
}

/// The words of a command line, each with its length, so that no two command lines look the same.
fn command_line(command: &[OsString]) -> Vec<u8> {
    command
        .iter()
        .flat_map(|word| [format!("{} ", word.len()).as_bytes(), word.as_bytes()].concat())
        .collect()
}

/// What is kept of a command: one line of JSON, then what it printed.
struct Printed {
    code: i32,
    out: Kept,
    err: Kept,
}

impl Printed {
    fn bytes(&self) -> Vec<u8> {
        let head = json!({
            "exit_code": self.code, "stdout": self.out.bytes.len(), "stdout_cut": self.out.cut,
            "stderr": self.err.bytes.len(), "stderr_cut": self.err.cut,
        });
        [head.to_string().as_bytes(), b"\n", &self.out.bytes, &self.err.bytes].concat()
    }

    fn parse(bytes: &[u8]) -> Option<Printed> {
        let end = bytes.iter().position(|b| *b == b'\n')?;
        let head: Value = serde_json::from_slice(&bytes[..end]).ok()?;
        let size = |key: &str| head[key].as_u64().and_then(|n| usize::try_from(n).ok());
        let (out, err) = bytes[end + 1..].split_at_checked(size("stdout")?)?;
        let kept = |bytes: &[u8], cut: &str| Kept { bytes: bytes.to_vec(), cut: head[cut] == true };
        let code = i32::try_from(head["exit_code"].as_i64()?).ok()?;
        (err.len() == size("stderr")?).then(|| Printed {
            code,
            out: kept(out, "stdout_cut"),
            err: kept(err, "stderr_cut"),
        })
    }

    fn tell_cut(&self, report: &Report) {
        for (what, kept) in [("stdout", &self.out), ("stderr", &self.err)] {
            if kept.cut {
                report.event("cut", json!({ "stream": what, "kept_bytes": kept.bytes.len() }));
                report.say(&format!("only the first MiB of {what} is kept for later calls"));
            }
        }
    }
}
