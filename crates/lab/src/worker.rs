//! A worker: one real process of a scenario. It reads its plan and its commands from stdin, and writes its events to stdout.

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::time::Duration;

use lockkeeper::{Error, Fence, Guard, Lockkeeper, Result};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;

use crate::event::{LabEvent, LabEventKind, now};
use crate::naive_lock::NaiveLock;
use crate::scenario;

/// The task of a worker. The director writes it to the worker's stdin, where no other user sees a password in it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkerPlan {
    pub scenario: String,
    /// The part of the worker in the scenario.
    pub role: String,
    /// The way of the half, for instance "naive".
    pub way: String,
    pub actor: String,
    /// How many workers the process plays, each under a name of its own. 0: one, under the name of the process.
    pub instances: u32,
    pub store: String,
    pub dir: PathBuf,
    /// Stands before the names of all locks, so that runs do not disturb each other.
    pub prefix: String,
    pub ttl: Duration,
    /// How long the work takes, where that matters.
    pub work: Duration,
}

/// One worker, inside its process.
#[derive(Debug)]
pub struct LabWorker {
    pub(crate) plan: WorkerPlan,
    /// Its name in the timeline.
    pub actor: String,
    /// Its number in its process.
    pub index: u32,
    commands: broadcast::Receiver<String>,
}

/// Runs the process of a worker to its end, and returns its exit code.
pub fn worker_main() -> i32 {
    // A worker never outlives its director, not even a stopped one.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let mut lines = std::io::stdin().lines();
    let Some(Ok(first)) = lines.next() else { return 1 };
    let Ok(plan) = serde_json::from_str::<WorkerPlan>(&first) else { return 1 };
    let Some(play) = scenario::find(&plan.scenario).map(|scenario| scenario.work) else { return 1 };
    let (sender, commands) = broadcast::channel(64);
    let names: Vec<String> = match plan.instances {
        0 => vec![plan.actor.clone()],
        n => (1..=n).map(|i| format!("{}.{i}", plan.actor)).collect(),
    };
    let workers: Vec<LabWorker> = (0..)
        .zip(names)
        .map(|(index, actor)| LabWorker {
            plan: plan.clone(),
            actor,
            index,
            commands: commands.resubscribe(),
        })
        .collect();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(|line| line.ok()) {
            let _ = sender.send(line);
        }
        std::process::exit(0);
    });
    drop(lines);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("the operating system gives an event queue");
    let played = tokio::task::LocalSet::new().block_on(&runtime, async {
        let tasks = workers.into_iter().map(|worker| tokio::task::spawn_local(play(worker)));
        let results = futures_util::future::join_all(tasks.collect::<Vec<_>>()).await;
        results.into_iter().try_for_each(|result| match result {
            Ok(done) => done,
            Err(e) => Err(Error::Unavailable(format!("the worker panicked: {e}"))),
        })
    });
    match played {
        Ok(()) => 0,
        Err(error) => {
            write(&LabEvent::now(&plan.actor, LabEventKind::Failed { error: error.to_string() }));
            1
        }
    }
}

fn write(event: &LabEvent) {
    let mut line = serde_json::to_vec(event).expect("an event can be written as JSON");
    line.push(b'\n');
    // One call: the lines of several tasks do not mix. If the director is gone, so is this process, very soon.
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(&line).and_then(|()| out.flush());
}

impl LabWorker {
    /// Reports an event.
    pub fn emit(&self, kind: LabEventKind) {
        write(&LabEvent::now(&self.actor, kind));
    }

    /// Says what it does.
    pub fn note(&self, text: impl Into<String>) {
        self.emit(LabEventKind::Note { text: text.into() });
    }

    /// Reports a measured value.
    pub fn figure(&self, name: &str, value: f64) {
        self.emit(LabEventKind::Figure { name: name.to_owned(), value });
    }

    /// Waits for a command of the director.
    pub async fn command(&mut self) -> String {
        match self.commands.recv().await {
            Ok(line) => line,
            // The director has gone, and the thread that reads stdin ends this process.
            Err(_) => std::future::pending().await,
        }
    }

    /// The commands from now on, for a task beside this worker.
    pub fn later_commands(&self) -> broadcast::Receiver<String> {
        self.commands.resubscribe()
    }

    /// Waits until the director says this.
    pub async fn until(&mut self, word: &str) {
        while self.command().await != word {}
    }

    /// The store of this half.
    pub async fn keeper(&self) -> Result<Lockkeeper> {
        Lockkeeper::open(&self.plan.store).await
    }

    /// The lock that everyone writes at first.
    pub fn naive_lock(&self) -> Result<NaiveLock> {
        NaiveLock::open(&self.plan.store, &self.plan.dir)
    }

    /// The full name of a lock.
    pub fn name(&self, lock: &str) -> String {
        format!("{}{lock}", self.plan.prefix)
    }

    /// A file of this half.
    pub fn path(&self, name: &str) -> PathBuf {
        self.plan.dir.join(name)
    }

    /// Acquires a lock, and reports the wait and the grant.
    pub async fn acquire(&self, keeper: &Lockkeeper, lock: &str) -> Result<Guard> {
        self.waits(lock);
        let guard = keeper.lock(self.name(lock)).ttl(self.plan.ttl).label(&self.actor).acquire().await?;
        self.holds(lock, Some(guard.fence()));
        Ok(guard)
    }

    /// Takes the naive lock, and reports the wait and the grant.
    pub async fn take(&self, naive: &NaiveLock, lock: &str, ttl: Option<Duration>) -> Result<()> {
        self.waits(lock);
        naive.wait_and_take(&self.name(lock), &self.actor, ttl).await?;
        self.holds(lock, None);
        Ok(())
    }

    /// Reports that it waits for a lock.
    pub fn waits(&self, lock: &str) {
        self.emit(LabEventKind::Waits { lock: lock.to_owned() });
    }

    /// Reports that it believes to hold a lock.
    pub fn holds(&self, lock: &str, fence: Option<Fence>) {
        self.emit(LabEventKind::Holds { lock: lock.to_owned(), fence: fence.map(Fence::get) });
    }

    /// Reports that it no longer believes to hold a lock.
    pub fn ends(&self, lock: &str, how: impl Into<String>) {
        self.emit(LabEventKind::Ends { lock: lock.to_owned(), how: how.into() });
    }

    /// Reports the end of a hold that is lost. It ended at the deadline of the guard, however late this process was scheduled.
    pub fn ends_at_deadline(&self, guard: &Guard, lock: &str, how: impl Into<String>) {
        let kind = LabEventKind::Ends { lock: lock.to_owned(), how: how.into() };
        let at = guard.deadline().as_nanos().min(now().as_nanos());
        write(&LabEvent { t: at, actor: self.actor.clone(), kind });
    }

    /// Releases a guard, and reports the end of the hold.
    pub async fn release(&self, guard: Guard, lock: &str) -> Result<()> {
        let held = guard.is_held();
        let why = guard.loss_reason();
        // Reported first: from the release on the next holder may be there.
        self.ends(lock, if held { "releases".to_owned() } else { format!("has lost ({why})") });
        match guard.release().await {
            Err(Error::Lost(_)) | Ok(_) => Ok(()),
            Err(error) if held => Err(error),
            Err(_) => Ok(()),
        }
    }

    /// Reports the answer of the resource to a write.
    pub fn wrote(&self, text: &str, fence: Option<Fence>, answer: Result<()>) -> Result<()> {
        let fence = fence.map(Fence::get);
        match answer {
            Ok(()) => self.emit(LabEventKind::Wrote { text: text.to_owned(), fence }),
            Err(Error::Stale { .. }) => self.emit(LabEventKind::Refused { text: text.to_owned(), fence }),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// The seconds since an instant of the event clock.
    pub fn seconds_since(&self, start: lockkeeper::BootInstant) -> f64 {
        now().since(start).as_secs_f64()
    }
}

/// The error for a file or a server of the lab that fails.
pub fn unavailable(error: impl std::fmt::Display) -> Error {
    Error::Unavailable(error.to_string())
}
