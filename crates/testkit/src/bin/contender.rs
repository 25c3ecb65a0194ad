//! A process that contends for a lock, for tests that kill, stop and outrun real processes.
//!
//! ```text
//! contender count  store=URL name=NAME times=N counter=FILE history=FILE    increments a plain file under the lock
//! contender late   store=URL name=NAME ttl_ms=N history=FILE fenced=FILE unfenced=FILE
//! ```
//! `late` takes the lock, says `held FENCE`, and reads a line from its standard input before it goes on: stopped
//! meanwhile, it is the late writer. It then says whether it still believes, and tries to write all the same.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::time::Duration;

use lockkeeper::{Attempt, Guard, Lockkeeper};
use lockkeeper_testkit::history::{HistoryEvent, HistoryRecorder, Operation};
use lockkeeper_testkit::resource::{CheckedFile, CounterFile, UncheckedFile};

type ContenderFailure = Box<dyn std::error::Error>;

struct Contender {
    args: HashMap<String, String>,
    keeper: Lockkeeper,
    recorder: HistoryRecorder,
}

impl Contender {
    fn arg(&self, key: &str) -> &str {
        self.args.get(key).unwrap_or_else(|| panic!("contender: {key}= is missing"))
    }

    /// Takes the lock and writes down how that went. The attempt of the history only tells one ask from another.
    async fn take(&self) -> Result<(Guard, Attempt), ContenderFailure> {
        let name = self.arg("name");
        let ttl = self.args.get("ttl_ms").map_or(Ok(30_000), |ms| ms.parse())?;
        let story = Attempt::from_bytes(lockkeeper_host::random_128());
        self.recorder.record(HistoryEvent::invoke(Operation::Acquire, name).attempt(&story));
        let guard = self.keeper.lock(name).ttl(Duration::from_millis(ttl)).acquire().await?;
        let granted = HistoryEvent::ok(Operation::Acquire, name).attempt(&story);
        self.recorder.record(granted.fence(guard.fence()).deadline(guard.deadline()));
        Ok((guard, story))
    }

    async fn give_back(&self, guard: Guard, story: &Attempt) -> Result<(), ContenderFailure> {
        let name = self.arg("name");
        self.recorder.record(HistoryEvent::invoke(Operation::Release, name).attempt(story));
        guard.release().await?;
        self.recorder.record(HistoryEvent::ok(Operation::Release, name).attempt(story));
        Ok(())
    }

    async fn count(&self) -> Result<(), ContenderFailure> {
        let counter = CounterFile::new(self.arg("counter"));
        for _ in 0..self.arg("times").parse()? {
            let (guard, story) = self.take().await?;
            counter.increment_async().await?;
            self.give_back(guard, &story).await?;
        }
        Ok(())
    }

    async fn late(&self) -> Result<(), ContenderFailure> {
        let (guard, story) = self.take().await?;
        say(&format!("held {}", guard.fence()));
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line)?;
        // The first thing after the pause.
        let believes = guard.is_held();
        say(&format!("believes {believes}"));
        if !believes {
            self.recorder.record(HistoryEvent::signal(self.arg("name")).attempt(&story));
        }
        let value = format!("late {}", std::process::id());
        let name = self.arg("name");
        self.recorder.record(HistoryEvent::invoke(Operation::Write, name).fence(guard.fence()).value(&value));
        match CheckedFile::new(self.arg("fenced")).write(guard.fence(), &value) {
            Ok(()) => {
                self.recorder
                    .record(HistoryEvent::ok(Operation::Write, name).fence(guard.fence()).value(&value));
                say("fenced taken");
            }
            Err(error) => {
                self.recorder.record(
                    HistoryEvent::failed(Operation::Write, name, &error).fence(guard.fence()).value(&value),
                );
                say(&format!("fenced {}", error.outcome().as_str()));
            }
        }
        UncheckedFile::new(self.arg("unfenced")).write(guard.fence(), &value)?;
        say("unfenced taken");
        Ok(())
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).expect("the parent process reads");
}

fn main() -> Result<(), ContenderFailure> {
    let mut args = std::env::args().skip(1);
    let what = args.next().unwrap_or_default();
    let args: HashMap<String, String> = args
        .filter_map(|arg| arg.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())))
        .collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let store = args.get("store").ok_or("contender: store= is missing")?;
        let keeper = Lockkeeper::open(store).await?;
        let history = args.get("history").ok_or("contender: history= is missing")?;
        let recorder = HistoryRecorder::new(history, std::process::id().to_string())?;
        let contender = Contender { args, keeper, recorder };
        match what.as_str() {
            "count" => contender.count().await,
            "late" => contender.late().await,
            _ => Err(format!("contender: {what:?} is not count or late").into()),
        }
    })
}
