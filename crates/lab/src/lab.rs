//! A lab: what all halves of a run share, and the way in which they run beside each other.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use lockkeeper::Lockkeeper;
use lockkeeper_testkit::servers::TempDir;

use crate::half::LabHalf;
use crate::outcome::ScenarioOutcome;
use crate::scenario::Scenario;
use crate::terminal::{View, ViewMode};

/// Whether the user wants the run to end.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Ends all runs soon: they kill their processes and remove their files.
pub fn interrupt() {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Why a scenario has no outcome.
#[derive(Debug)]
pub enum LabError {
    /// The fault did not fire: the run proves nothing.
    Invalid(String),
    /// Something failed that is no part of the scenario.
    Broken(String),
    /// The user ended the run.
    Interrupted,
}

impl From<std::io::Error> for LabError {
    fn from(error: std::io::Error) -> Self {
        LabError::Broken(error.to_string())
    }
}

impl From<lockkeeper::Error> for LabError {
    fn from(error: lockkeeper::Error) -> Self {
        LabError::Broken(error.to_string())
    }
}

/// How to run scenarios.
#[derive(Clone, Debug)]
pub struct LabOptions {
    /// The program that runs workers: this one.
    pub program: PathBuf,
    /// The store; without one, a SQLite file in a temporary directory.
    pub store: Option<String>,
    /// Short ttls and few workers, for tests and for people in a hurry.
    pub fast: bool,
    /// How the terminal shows the run.
    pub view: ViewMode,
}

/// The settings of one run.
#[derive(Debug)]
pub struct Setup {
    pub(crate) scenario: String,
    pub(crate) program: PathBuf,
    pub(crate) store: Option<String>,
    pub(crate) prefix: String,
    pub(crate) root: TempDir,
    pub(crate) view: Arc<View>,
}

/// One run of one scenario.
#[derive(Debug)]
pub struct Lab {
    setup: Arc<Setup>,
    fast: bool,
    halves: AtomicUsize,
}

impl Lab {
    /// Runs a scenario.
    ///
    /// # Errors
    /// If it has no outcome.
    pub fn run(scenario: &Scenario, options: &LabOptions) -> Result<ScenarioOutcome, LabError> {
        let view = Arc::new(View::new(options.view, scenario));
        let random = lockkeeper_host::random_128();
        let tag: String = random[..4].iter().map(|byte| format!("{byte:02x}")).collect();
        let setup = Setup {
            scenario: scenario.name.to_owned(),
            program: options.program.clone(),
            store: options.store.clone().filter(|_| scenario.any_store),
            prefix: format!("lab-{tag}/"),
            root: TempDir::new("lab"),
            view: view.clone(),
        };
        let lab = Lab { setup: Arc::new(setup), fast: options.fast, halves: AtomicUsize::new(0) };
        let drawing = view.start();
        // The starters of the servers panic if a server does not start.
        let outcome = catch_unwind(AssertUnwindSafe(|| (scenario.run)(&lab)));
        drop(drawing);
        outcome.unwrap_or_else(|panic| Err(LabError::Broken(panic_words(&*panic))))
    }

    /// Whether short ttls and few workers are wanted.
    pub fn is_fast(&self) -> bool {
        self.fast
    }

    /// The store that the user named.
    pub fn store(&self) -> Option<&str> {
        self.setup.store.as_deref()
    }

    /// Whether the store finds cycles of waiting owners.
    ///
    /// # Errors
    /// If the store of the user cannot be opened.
    pub fn finds_deadlocks(&self) -> Result<bool, LabError> {
        let Some(url) = self.store() else { return Ok(true) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(runtime.block_on(Lockkeeper::open(url))?.profile().deadlocks)
    }

    /// One of two durations, in milliseconds.
    pub fn millis(&self, normal: u64, fast: u64) -> Duration {
        Duration::from_millis(if self.fast { fast } else { normal })
    }

    /// A half with this name. `how` says in a sentence what it does.
    ///
    /// # Errors
    /// If there is no place for its files.
    pub fn half(&self, way: &str, how: &str) -> Result<LabHalf, LabError> {
        let index = self.halves.fetch_add(1, Ordering::Relaxed);
        LabHalf::new(self.setup.clone(), index, self.millis(500, 100), way, how)
    }

    /// Directs all halves beside each other, each on a thread of its own.
    ///
    /// # Errors
    /// The first error of a half.
    pub fn side_by_side(
        &self,
        halves: impl IntoIterator<Item = LabHalf>,
        play: impl Fn(&mut LabHalf) -> Result<(), LabError> + Sync,
    ) -> Result<Vec<LabHalf>, LabError> {
        let mut halves: Vec<LabHalf> = halves.into_iter().collect();
        halves.iter_mut().for_each(LabHalf::begin);
        std::thread::scope(|scope| {
            let threads: Vec<_> = halves.iter_mut().map(|half| scope.spawn(|| play(half))).collect();
            let results = threads.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|panic| Err(LabError::Broken(panic_words(&*panic))))
            });
            results.collect::<Vec<_>>().into_iter().collect::<Result<Vec<()>, LabError>>()
        })?;
        Ok(halves)
    }
}

fn panic_words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a part of the lab panicked").to_owned()
}
