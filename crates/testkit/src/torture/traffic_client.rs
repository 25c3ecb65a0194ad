//! The program of a client process: it takes locks by its plan, writes to the resources, and writes a history.

use std::fs::File;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lockkeeper::{Attempt, Error, Guard, Lockkeeper, Outcome, ReleaseOutcome};
use lockkeeper_core::Mode;
use lockkeeper_host::{Clock, SystemClock};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::traffic::{PlannedHold, resource_paths};
use super::{TortureRng, TrafficKind, TrafficPlan};
use crate::history::{HistoryEvent, HistoryRecorder, Operation};
use crate::resource::{CheckedFile, UncheckedFile};

type TrafficFailure = Box<dyn std::error::Error + Send + Sync>;

/// Between two writes of a holder, and between two looks at its deadline.
const STEP: Duration = Duration::from_millis(25);
/// A sleep that takes this much longer was a pause of the process, or of its runtime.
const NOTICED: Duration = Duration::from_millis(100);

/// One line of the file of pauses.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct NoticedPause {
    pub proc: String,
    pub from: u64,
    pub to: u64,
}

/// Runs one client process: reads a [`TrafficPlan`] as one line of JSON from the standard input, writes `ready` when the store is
/// open, and works until the standard input ends. A line `starve MS` blocks its runtime for so long.
///
/// # Errors
/// If the plan cannot be read, or a file of the run cannot be written. A store that is unreachable is no error: the client retries.
pub fn run_traffic_client() -> Result<(), TrafficFailure> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let plan: TrafficPlan = serde_json::from_str(&line)?;
    // One thread: a task that blocks it starves all others, as in row 3 of the table.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run(plan))
}

async fn run(plan: TrafficPlan) -> Result<(), TrafficFailure> {
    let recorder = HistoryRecorder::new(plan.history(), plan.proc.clone())?;
    let pauses = File::options().create(true).append(true).open(plan.pauses())?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut commands = read_commands();
    tokio::spawn(notice_pauses(plan.proc.clone(), pauses));
    let keeper = loop {
        tokio::select! {
            opened = Lockkeeper::open(&plan.store) => match opened {
                Ok(keeper) => break keeper,
                Err(Error::Unknown(_) | Error::Unavailable(_)) => tokio::time::sleep(STEP * 4).await,
                Err(error) => return Err(error.into()),
            },
            command = commands.recv() => if command.is_none() { return Ok(()) },
        }
    };
    say("ready")?;
    let worker =
        Arc::new(TrafficWorker { plan, keeper, recorder, stop: stop.clone(), writes: AtomicU64::new(0) });
    let tasks: Vec<_> =
        (0..worker.plan.tasks.len()).map(|task| tokio::spawn(worker.clone().work(task))).collect();
    while let Some(command) = commands.recv().await {
        let Some(ms) = command.strip_prefix("starve ") else { continue };
        std::thread::sleep(Duration::from_millis(ms.parse()?));
        say("starved")?;
    }
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await?;
    }
    worker.keeper.settle().await;
    say("done")?;
    Ok(())
}

fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// The lines of the standard input, until it ends.
fn read_commands() -> mpsc::UnboundedReceiver<String> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        let lines = std::io::stdin().lock().lines();
        lines.map_while(Result::ok).take_while(|line| sender.send(line.clone()).is_ok()).for_each(drop);
    });
    receiver
}

/// Writes down when this process did not run: a report that is late because of that is not the store's fault.
async fn notice_pauses(proc: String, mut file: File) {
    loop {
        let from = SystemClock.now().as_nanos();
        tokio::time::sleep(STEP).await;
        let to = SystemClock.now().as_nanos();
        if u128::from(to - from) > (STEP + NOTICED).as_nanos() {
            let pause = NoticedPause { proc: proc.clone(), from, to };
            let mut line = serde_json::to_vec(&pause).expect("a pause can be written as JSON");
            line.push(b'\n');
            file.write_all(&line).expect("the pauses can be written");
        }
    }
}

struct TrafficWorker {
    plan: TrafficPlan,
    keeper: Lockkeeper,
    recorder: HistoryRecorder,
    stop: Arc<AtomicBool>,
    writes: AtomicU64,
}

impl TrafficWorker {
    fn stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    async fn work(self: Arc<Self>, task: usize) {
        let kind = self.plan.tasks[task];
        let mut rng = TortureRng::new(self.plan.seed, &format!("{}/{task}", self.plan.proc));
        while !self.stopping() {
            let planned = self.plan.next_hold(kind, &mut rng);
            let attempt = Lockkeeper::new_attempt();
            if let Some(guard) = self.acquire(&planned, attempt, kind).await {
                self.hold(guard, &planned, &attempt).await;
            }
            // A waiter must not enter the queue again at the head of the others that it kept waiting.
            tokio::time::sleep(Duration::from_millis(self.plan.rest_ms)).await;
        }
    }

    async fn acquire(&self, planned: &PlannedHold, attempt: Attempt, kind: TrafficKind) -> Option<Guard> {
        let begin =
            HistoryEvent::invoke(Operation::Acquire, &planned.lock).attempt(&attempt).mode(planned.mode);
        self.recorder.record(begin);
        let builder =
            self.keeper.lock(&planned.lock).ttl(self.plan.ttl()).attempt(attempt).label(&self.plan.proc);
        let builder = match planned.mode {
            Mode::Exclusive => builder,
            Mode::Shared => builder.shared(),
            Mode::Permit(n) => builder.permits(n),
        };
        let answer = match planned.wait {
            None => builder.try_acquire().await,
            Some(wait) => {
                let asked = builder.wait(wait).acquire();
                tokio::select! {
                    answer = asked => answer.map(Some),
                    // A waiter that would wait for ever leaves the queue when the run ends.
                    () = self.ended(), if kind == TrafficKind::Queue => Ok(None),
                }
            }
        };
        let event = match &answer {
            Ok(Some(guard)) => HistoryEvent::ok(Operation::Acquire, &planned.lock)
                .mode(planned.mode)
                .fence(guard.fence())
                .deadline(guard.deadline()),
            Ok(None) => HistoryEvent::refused(Operation::Acquire, &planned.lock, Outcome::Busy),
            Err(error) => HistoryEvent::failed(Operation::Acquire, &planned.lock, error),
        };
        self.recorder.record(event.attempt(&attempt));
        if matches!(answer, Err(Error::Unknown(_) | Error::Unavailable(_))) {
            tokio::time::sleep(STEP).await;
        }
        answer.ok().flatten()
    }

    async fn ended(&self) {
        while !self.stopping() {
            tokio::time::sleep(STEP).await;
        }
    }

    async fn hold(&self, guard: Guard, planned: &PlannedHold, attempt: &Attempt) {
        let lock = &planned.lock;
        let end = SystemClock.now() + planned.span;
        let (mut deadline, mut lost) = (guard.deadline(), false);
        while !self.stopping() {
            if planned.mode == Mode::Exclusive && (guard.is_held() || planned.careless) {
                self.write(lock, &guard);
            }
            let left = end.since(SystemClock.now());
            if left.is_zero() {
                break;
            }
            tokio::select! {
                biased;
                _ = guard.lost(), if !lost => {
                    self.recorder.record(HistoryEvent::signal(lock).attempt(attempt));
                    lost = true;
                    if !planned.careless {
                        break;
                    }
                }
                () = tokio::time::sleep(left.min(STEP)) => {}
            }
            let renewed = guard.deadline();
            if renewed > deadline && guard.is_held() {
                // This thread may have slept for long. A guard that is valid now was valid all the time: it was renewed by its old deadline.
                let at = SystemClock.now().min(deadline);
                deadline = renewed;
                self.recorder.record_at(at, HistoryEvent::invoke(Operation::Renew, lock).attempt(attempt));
                let done = HistoryEvent::ok(Operation::Renew, lock).attempt(attempt).deadline(deadline);
                self.recorder.record_at(at, done);
            }
        }
        if lost {
            return;
        }
        if !guard.is_held() {
            self.recorder.record(HistoryEvent::signal(lock).attempt(attempt));
            return;
        }
        self.recorder.record(HistoryEvent::invoke(Operation::Release, lock).attempt(attempt));
        let event = match guard.release().await {
            Ok(ReleaseOutcome::Released) => HistoryEvent::ok(Operation::Release, lock),
            Ok(ReleaseOutcome::AlreadyGone) => HistoryEvent::refused(Operation::Release, lock, Outcome::Lost),
            Err(error) => HistoryEvent::failed(Operation::Release, lock, &error),
        };
        self.recorder.record(event.attempt(attempt));
    }

    /// Writes to the resource of the lock, and to its twin that checks no fence.
    fn write(&self, lock: &str, guard: &Guard) {
        let value = format!("{} {}", self.plan.proc, self.writes.fetch_add(1, Ordering::Relaxed));
        let [fenced, unfenced] = resource_paths(&self.plan.dir, lock);
        let fence = guard.fence();
        self.recorder.record(HistoryEvent::invoke(Operation::Write, lock).fence(fence).value(&value));
        let event = match CheckedFile::new(fenced).write(fence, &value) {
            Ok(()) => HistoryEvent::ok(Operation::Write, lock),
            Err(error) => HistoryEvent::failed(Operation::Write, lock, &error),
        };
        self.recorder.record(event.fence(fence).value(&value));
        UncheckedFile::new(unfenced).write(fence, &value).expect("the twin can be written");
    }
}
