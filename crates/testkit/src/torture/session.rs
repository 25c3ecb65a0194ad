//! Traffic without a fault, against the store of a URL: for the runner of the matrix, and for `lockkeeper verify`.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use lockkeeper::{Lockkeeper, Page};
use lockkeeper_host::{Clock, SystemClock};

use super::{
    ClientProgram, RunConditions, TrafficFindings, TrafficKind, TrafficPlan, TrafficProcess, check_traffic,
};
use crate::servers::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);

/// Traffic against a store.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// The URL of the store.
    pub store: String,
    /// The program that runs [`super::run_traffic_client`].
    pub program: ClientProgram,
    /// The prefix of the names of all its locks. No other client may use it.
    pub prefix: String,
    /// How many client processes there are.
    pub clients: usize,
    /// The tasks of each client.
    pub tasks: Vec<TrafficKind>,
    /// The ttl of every request.
    pub ttl: Duration,
    /// For how long they work.
    pub span: Duration,
    /// The pause of a task between two holds: it bounds the load.
    pub rest: Duration,
    /// The seed of their plans.
    pub seed: u64,
}

/// The outcome of a session.
#[derive(Clone, Debug)]
pub struct SessionFindings {
    /// The violations, and the totals.
    pub found: TrafficFindings,
    /// Why the session proves nothing, if it does not.
    pub invalid: Vec<String>,
}

/// Starts client processes that contend for locks in the store, waits for the end of the span, stops them, waits until they have left
/// nothing in the store, and checks their history. It blocks: call it outside of a runtime, or in `spawn_blocking`.
///
/// `going_on` is called several times a second with the time that has passed; if it returns `false`, the session ends early, and cleans up.
///
/// # Errors
/// If a client cannot be started or fails, or the store is unreachable at the end.
pub fn run_traffic(
    options: &SessionOptions,
    mut going_on: impl FnMut(Duration) -> bool,
) -> io::Result<SessionFindings> {
    let dir = TempDir::new("traffic");
    let mut clients = start_clients(options, dir.path())?;
    let (begun, from) = (Instant::now(), SystemClock.now().as_nanos());
    while begun.elapsed() < options.span && going_on(begun.elapsed()) {
        std::thread::sleep(Duration::from_millis(50));
    }
    let until = SystemClock.now().as_nanos();
    clients.iter_mut().for_each(TrafficProcess::stop);
    clients.into_iter().try_for_each(|client| client.finish(PATIENCE))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (left, wake) = runtime.block_on(async {
        let keeper = Lockkeeper::open(&options.store).await.map_err(io::Error::other)?;
        let left = left_in_store(&keeper, &options.prefix, options.ttl * 3).await;
        Ok::<_, io::Error>((left?, keeper.profile().wake))
    })?;
    let conditions =
        RunConditions { healed: from, until, bound: wake, left, no_losses: true, ..RunConditions::default() };
    let found = check_traffic(dir.path(), &conditions)?;
    let mut invalid = Vec::new();
    if found.totals.contended == 0 {
        invalid.push("no request found a lock taken".to_owned());
    }
    if found.totals.grants < options.clients as u64 {
        invalid.push(format!("there were only {} grants", found.totals.grants));
    }
    Ok(SessionFindings { found, invalid })
}

fn start_clients(options: &SessionOptions, dir: &Path) -> io::Result<Vec<TrafficProcess>> {
    let plan = |client: usize| TrafficPlan {
        store: options.store.clone(),
        dir: dir.to_owned(),
        proc: format!("c{client}"),
        prefix: options.prefix.clone(),
        seed: options.seed,
        ttl_ms: options.ttl.as_millis() as u64,
        tasks: options.tasks.clone(),
        rest_ms: options.rest.as_millis() as u64,
        careless_percent: 0,
    };
    let clients = (0..options.clients).map(|client| TrafficProcess::start(&options.program, &plan(client)));
    let clients = clients.collect::<io::Result<Vec<_>>>()?;
    clients.iter().try_for_each(|client| client.wait_for("ready", PATIENCE))?;
    Ok(clients)
}

/// Waits until no lock below the prefix is left in the store. After `patience`, the locks that are left: their names and states.
pub(super) async fn left_in_store(
    keeper: &Lockkeeper,
    prefix: &str,
    patience: Duration,
) -> io::Result<Vec<(String, String)>> {
    let end = Instant::now() + patience;
    loop {
        match keeper.list(prefix, &Page::FIRST).await {
            Ok(page) if page.locks.is_empty() => return Ok(Vec::new()),
            Ok(page) if Instant::now() > end => {
                return Ok(page
                    .locks
                    .iter()
                    .map(|lock| (lock.name.to_string(), format!("{lock:?}")))
                    .collect());
            }
            Err(error) if Instant::now() > end => return Err(io::Error::other(error)),
            _ => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}
