//! Runs one cell: a store, client processes, a fault that strikes again and again, and the checks.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lockkeeper::{Error, Lockkeeper};
use lockkeeper_core::faults::{Deployment, Exclusion, Expectation, FaultCell, FaultKind};
use lockkeeper_host::{Clock, SystemClock};

use super::cell_report::judge;
use super::check::SLACK;
use super::session::left_in_store;
use super::site::{PATIENCE, SiteFailure, TortureSite};
use super::{
    CellReport, CellVerdict, ClientProgram, ProcessEnd, RunConditions, TortureRng, TrafficFindings,
    TrafficKind, TrafficPlan, TrafficProcess, TrafficTotals, check_traffic,
};
use crate::servers::TempDir;

/// The prefix of the names of all locks of a cell.
pub(super) const PREFIX: &str = "torture/";
/// How many client processes a cell has.
const CLIENTS: usize = 4;
/// How often a cell is run until it proves something: one that is declared breakable has to break.
const TRIES: u32 = 4;

/// A cell to run.
#[derive(Clone, Debug)]
pub struct CellPlan {
    /// The column.
    pub deployment: Deployment,
    /// The row.
    pub fault: FaultKind,
    /// The seed: it repeats the plans of the clients and of the strikes.
    pub seed: u64,
    /// For how long faults strike.
    pub span: Duration,
    /// The program that runs [`super::run_traffic_client`].
    pub program: ClientProgram,
}

/// A cell that runs.
pub(super) struct CellRun {
    pub plan: CellPlan,
    pub ttl: Duration,
    pub rng: TortureRng,
    // Before the servers: clients end first.
    pub clients: Vec<TrafficProcess>,
    pub site: TortureSite,
    pub dir: TempDir,
    starts: u32,
    killed: Vec<ProcessEnd>,
}

/// Runs a cell until it proves something.
pub fn run_cell(plan: &CellPlan) -> CellReport {
    let mut report = CellReport {
        deployment: plan.deployment,
        fault: plan.fault,
        seed: plan.seed,
        runs: 0,
        version: String::new(),
        at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |at| at.as_secs()),
        fired: 0,
        totals: TrafficTotals::default(),
        overlaps: 0,
        verdict: CellVerdict::NotRun(String::new()),
    };
    let expected = match plan.deployment.cell(plan.fault) {
        FaultCell::Declared(expected) => expected,
        FaultCell::NotApplicable(why) => {
            report.verdict = CellVerdict::NotRun(why.to_owned());
            return report;
        }
    };
    for attempt in 0..TRIES {
        report.seed = plan.seed + u64::from(attempt);
        report.runs = attempt + 1;
        let run = CellPlan { seed: report.seed, ..plan.clone() };
        match CellRun::start(run).and_then(|run| run.run(&expected, &mut report)) {
            Ok(()) => {}
            Err(SiteFailure::NotHere(why)) => report.verdict = CellVerdict::NotRun(why),
            Err(SiteFailure::Broken(error)) => report.verdict = CellVerdict::Invalid(vec![error.to_string()]),
        }
        // A run that proves nothing is run again, too.
        if !matches!(report.verdict, CellVerdict::NotSeenToBreak | CellVerdict::Invalid(_)) {
            break;
        }
    }
    report
}

impl CellRun {
    fn start(plan: CellPlan) -> Result<CellRun, SiteFailure> {
        let site = TortureSite::start(plan.deployment, plan.fault, CLIENTS)?;
        let rng = TortureRng::new(plan.seed, "strikes");
        let ttl = ttl(&plan, plan.deployment.cell(plan.fault).declared());
        let dir = TempDir::outside("history");
        let mut run =
            CellRun { plan, ttl, rng, clients: Vec::new(), site, dir, starts: 0, killed: Vec::new() };
        run.prepare()?;
        if let Some(disk) = &run.site.disk {
            // The run is about what is written from here on.
            disk.sync()?;
        }
        for client in 0..CLIENTS {
            let started = TrafficProcess::start(&run.plan.program, &run.client_plan(client))?;
            run.clients.push(started);
        }
        run.clients.iter().try_for_each(|client| client.wait_for("ready", PATIENCE))?;
        Ok(run)
    }

    /// Creates what the store needs once, and checks that it is the deployment that the cell is about.
    fn prepare(&self) -> io::Result<()> {
        let url = self.site.url(None);
        let profile = self.block_on(async {
            until_reachable(async || lockkeeper::init(&url).await).await?;
            Ok(until_reachable(async || Lockkeeper::open(&url).await).await?.profile())
        })?;
        let column = self.plan.deployment;
        // A directory on this machine may be on any file system.
        let file = matches!(column, Deployment::Sqlite | Deployment::SqliteVolatile);
        if file || profile.deployments.contains(&column) {
            return Ok(());
        }
        Err(io::Error::other(format!("this is not {column:?}, but {:?}", profile.deployments)))
    }

    fn block_on<T>(&self, work: impl Future<Output = lockkeeper::Result<T>>) -> io::Result<T> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(work).map_err(io::Error::other)
    }

    fn client_plan(&self, client: usize) -> TrafficPlan {
        use TrafficKind::{Hot, Many, Permits, Queue, Shared, Slow, TryOnly};
        let crowd = self.plan.fault == FaultKind::ManyWaiters;
        // Redlock has neither shared locks nor permits, nor a queue.
        let plain = self.plan.deployment == Deployment::Redlock;
        let tasks = match (crowd, plain) {
            (true, _) => vec![Queue; 50],
            (false, true) => vec![Slow, Hot, Many, TryOnly],
            (false, false) => vec![Slow, Hot, Many, TryOnly, Shared, Permits],
        };
        TrafficPlan {
            store: self.site.url(Some(client)),
            dir: self.dir.path().to_owned(),
            proc: format!("c{client}.{}", self.starts),
            prefix: PREFIX.to_owned(),
            seed: self.plan.seed,
            ttl_ms: self.ttl.as_millis() as u64,
            tasks,
            rest_ms: if crowd { 0 } else { 60 },
            // A late writer, for the fence to refuse.
            careless_percent: if self.plan.fault == FaultKind::HolderStopped { 100 } else { 50 },
        }
    }

    /// Kills a client. [`CellRun::start_again`] puts another one in its place.
    pub(super) fn kill(&mut self, client: usize) -> io::Result<()> {
        let end = self.clients[client].kill()?;
        self.killed.push(end);
        Ok(())
    }

    pub(super) fn start_again(&mut self, client: usize) -> io::Result<()> {
        self.starts += 1;
        self.clients[client] = TrafficProcess::start(&self.plan.program, &self.client_plan(client))?;
        Ok(())
    }

    /// The files that clients lock while they write.
    pub(super) fn resource_files(&self) -> io::Result<Vec<PathBuf>> {
        fs::read_dir(self.dir.path())?.map(|entry| Ok(entry?.path())).collect()
    }

    fn run(mut self, expected: &Expectation, report: &mut CellReport) -> Result<(), SiteFailure> {
        report.version.clone_from(&self.site.version);
        let began = SystemClock.now().as_nanos();
        let fired = self.strike_for_the_span()?;
        report.fired += fired;
        let store_fault = !on_clients(self.plan.fault);
        let healed = if store_fault { SystemClock.now().as_nanos() } else { began };
        let wake = self.wake()?;
        let bound = expected.wait.longest(self.plan.deployment, self.ttl, wake);
        // Longer than the bound: a waiter that is forgotten shows itself.
        std::thread::sleep(bound + SLACK * 2);
        let until = SystemClock.now().as_nanos();
        self.clients.iter_mut().for_each(TrafficProcess::stop);
        std::mem::take(&mut self.clients).into_iter().try_for_each(|client| client.finish(PATIENCE))?;
        let left = self.left(bound)?;
        let conditions = RunConditions {
            killed: std::mem::take(&mut self.killed),
            healed,
            until,
            bound,
            left,
            no_losses: matches!(
                self.plan.fault,
                FaultKind::RuntimeStarved | FaultKind::SlowNetwork | FaultKind::ManyWaiters
            ),
        };
        let found = check_traffic(self.dir.path(), &conditions)?;
        report.totals.add(&found.totals);
        report.overlaps += found.exclusion.len() as u64;
        report.verdict = judge(expected, &found, self.missing(fired, &found));
        if matches!(report.verdict, CellVerdict::Violated(_)) {
            self.keep_history(report.seed)?;
        }
        Ok(())
    }

    /// Strikes again and again until the span is over. Returns how often the fault fired.
    fn strike_for_the_span(&mut self) -> Result<u64, SiteFailure> {
        std::thread::sleep(Duration::from_millis(700));
        let begun = Instant::now();
        let mut fired = 0;
        while begun.elapsed() < self.plan.span {
            fired += self.strike()?;
            std::thread::sleep(self.rng.duration(Duration::from_millis(100), Duration::from_millis(400)));
            if once(self.plan.fault) {
                break;
            }
        }
        Ok(fired)
    }

    fn wake(&self) -> io::Result<Duration> {
        let url = self.site.url(None);
        self.block_on(async {
            Ok(until_reachable(async || Lockkeeper::open(&url).await).await?.profile().wake)
        })
    }

    /// Waits until nothing is left in the store, and checks that a new client gets the lock that all clients wanted.
    fn left(&self, bound: Duration) -> io::Result<Vec<(String, String)>> {
        let url = self.site.url(None);
        let patience = bound.max(self.ttl * 3) + Duration::from_secs(3);
        let hot = format!("{PREFIX}hot");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let open = async || Lockkeeper::open(&url).await;
            let keeper = until_reachable(open).await.map_err(io::Error::other)?;
            let left = left_in_store(&keeper, PREFIX, patience).await?;
            let acquire = async || keeper.lock(&hot).ttl(self.ttl).wait(patience).acquire().await;
            drop(until_reachable(acquire).await.map_err(io::Error::other)?);
            keeper.settle().await;
            Ok(left)
        })
    }

    /// The demands on a run that proves something, as far as this run does not meet them.
    fn missing(&self, fired: u64, found: &TrafficFindings) -> Vec<String> {
        let TrafficTotals { grants, contended, losses, refused, twin_took, .. } = found.totals;
        // A late writer is there whenever a holder loses its lock: only then is the fence needed.
        let late = u64::from(matches!(self.plan.fault, FaultKind::HolderStopped));
        let lost = u64::from(matches!(
            self.plan.fault,
            FaultKind::HolderStopped | FaultKind::HolderCutOff | FaultKind::OneWayCut
        ));
        let demands = [
            ("faults that fired", fired, 1),
            ("grants", grants, 20),
            ("requests that found the lock taken", contended, 10),
            ("losses that guards reported", losses, lost),
            ("stale writes that the fenced resource refused", refused, late),
            ("stale writes that the unfenced twin took", twin_took, late),
        ];
        let missing = demands.into_iter().filter(|(_, seen, wanted)| seen < wanted);
        missing.map(|(what, seen, wanted)| format!("{what}: {seen} of at least {wanted}")).collect()
    }

    /// Copies the history of a bad run to where a person can look at it.
    fn keep_history(&self, seed: u64) -> io::Result<()> {
        let name =
            format!("torture-{}-{}-{seed}.jsonl", self.plan.deployment.as_str(), self.plan.fault.number());
        let to = std::env::temp_dir().join(name);
        fs::copy(super::traffic::history_path(self.dir.path()), &to)?;
        eprintln!("the history is kept: {}", to.display());
        Ok(())
    }
}

/// Tries again on a busy machine, on which a server may not reply in time.
async fn until_reachable<T>(mut call: impl AsyncFnMut() -> lockkeeper::Result<T>) -> lockkeeper::Result<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        match call().await {
            Err(Error::Unavailable(_) | Error::Unknown(_)) if Instant::now() < end => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            answer => return answer,
        }
    }
}

/// Whether the fault concerns clients only: the store is well all the time.
fn on_clients(fault: FaultKind) -> bool {
    use FaultKind::{HolderCutOff, HolderKilled, HolderStopped, ManyWaiters, OneWayCut, RuntimeStarved};
    matches!(fault, HolderKilled | HolderStopped | RuntimeStarved | HolderCutOff | OneWayCut | ManyWaiters)
}

/// Whether the fault can strike only once in a run.
fn once(fault: FaultKind) -> bool {
    matches!(fault, FaultKind::FailOver | FaultKind::StoreClockForward | FaultKind::StoreClockBack)
}

/// The ttl of all requests. A holder notices at its next renewal that its lock is gone: a break is seen best with a long ttl. A slow
/// network may not cost a lock whose ttl is ten seconds.
fn ttl(plan: &CellPlan, expected: Option<Expectation>) -> Duration {
    let breakable = expected.is_some_and(|expected| expected.exclusion == Exclusion::CanBreak);
    Duration::from_secs(match plan.fault {
        FaultKind::SlowNetwork => 10,
        // A loss is not allowed: long enough to be renewed in time on a busy machine.
        FaultKind::RuntimeStarved | FaultKind::ManyWaiters => 6,
        FaultKind::FailOver => 6,
        _ if breakable => 6,
        _ if plan.deployment == Deployment::DynamoDb => 5,
        _ => 2,
    })
}
