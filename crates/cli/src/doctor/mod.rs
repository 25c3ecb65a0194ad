//! The examination of a store from outside: the way to its servers, the opening, a trial of each operation, the servers' own reports and
//! clocks, and the pauses of this host. It is bounded in time, and nothing that it makes stays.

mod clocks;
mod host;
mod reach;
mod report;
mod trial;
mod verdict;

use std::time::{Duration, Instant};

use lockkeeper::store::{ClockReading, Examination};
use lockkeeper::{Error, Finding, Lockkeeper, Outcome, Page, Profile, Promise, Result, Severity};

use crate::duration;
use clocks::ClockEstimate;
use host::{HostPauses, PauseSampler};
use reach::WayToServer;
use trial::{Trial, TrialContext};

pub use reach::is_store;
pub use report::print;

/// The pauses of this host are measured for at least this long.
const MEASURE: Duration = Duration::from_millis(1500);
/// How many round trips are measured.
const ROUND_TRIPS: usize = 20;
/// How many readings of a clock are made at the beginning, and again at the end.
const READINGS: usize = 3;

/// The options of an examination.
#[derive(Clone, Copy, Debug)]
pub struct DoctorOptions {
    /// The ttl that the user means to use.
    pub ttl: Duration,
    /// How long each step may take.
    pub timeout: Duration,
}

/// How long the store takes to answer a small read.
#[derive(Clone, Copy, Debug)]
pub struct RoundTrips {
    pub count: usize,
    pub median: Duration,
    pub worst: Duration,
}

/// The locks of the store as they are now.
#[derive(Clone, Copy, Debug, Default)]
pub struct LockCounts {
    pub held: usize,
    pub waiting: usize,
    /// There are more locks than one page of the list.
    pub more: bool,
}

/// Everything that an examination found.
#[derive(Debug, Default)]
pub struct Diagnosis {
    pub ways: Vec<WayToServer>,
    /// `None`: the store could not be opened.
    pub profile: Option<Profile>,
    /// Why it could not be opened.
    pub refused: Option<Error>,
    pub round_trips: Option<RoundTrips>,
    pub trial: Trial,
    pub examination: Examination,
    pub clocks: Vec<ClockEstimate>,
    pub locks: Option<LockCounts>,
    pub host: Option<HostPauses>,
    /// All findings, the gravest first.
    pub findings: Vec<Finding>,
}

impl Diagnosis {
    /// Whether the store could not be asked at all: it is down, silent, or out of reach.
    pub fn is_unreachable(&self) -> bool {
        let down = |error: &Error| matches!(error.outcome(), Outcome::Unavailable | Outcome::Unknown);
        self.refused.as_ref().is_some_and(down)
    }

    /// The gravest severity.
    pub fn severity(&self) -> Severity {
        self.findings.iter().map(|finding| finding.severity).min().unwrap_or(Severity::Hint)
    }
}

/// Examines the store. It takes about two seconds with a healthy one.
pub async fn examine(url: &str, options: DoctorOptions) -> Diagnosis {
    let sampler = PauseSampler::start();
    let begun = Instant::now();
    let mut found = Diagnosis { ways: try_ways(url, options.timeout).await, ..Diagnosis::default() };
    let unreachable = !found.ways.is_empty() && found.ways.iter().all(|way| way.outcome.is_err());
    let opened = match unreachable {
        true => Err(Error::Unavailable("no server of the store can be reached".into())),
        false => within(options.timeout * 2, "the store was opened", Lockkeeper::open(url)).await,
    };
    match opened {
        Ok(keeper) => examine_open(&keeper, options, begun, &mut found).await,
        Err(error) => found.refused = Some(error),
    }
    found.host = sampler.finish();
    found.findings = all_findings(&found, options.ttl);
    found
}

/// Runs `work` for at most `timeout`.
async fn within<T>(timeout: Duration, what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = || Error::Unavailable(format!("no reply within {} while {what}", duration::exact(timeout)));
    tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| Err(late()))
}

async fn try_ways(url: &str, timeout: Duration) -> Vec<WayToServer> {
    let tries: Vec<_> = reach::servers(url)
        .into_iter()
        .map(|server| {
            let shown = server.clone();
            let work = tokio::task::spawn_blocking(move || reach::try_way(server, timeout));
            async move {
                // A resolver may take longer than any time-out of ours.
                let late = || WayToServer {
                    server: shown,
                    outcome: Err("the name does not resolve in time".into()),
                };
                match tokio::time::timeout(timeout * 2, work).await {
                    Ok(Ok(way)) => way,
                    _ => late(),
                }
            }
        })
        .collect();
    futures_util::future::join_all(tries).await
}

async fn examine_open(keeper: &Lockkeeper, options: DoctorOptions, begun: Instant, found: &mut Diagnosis) {
    let (store, timeout) = (keeper.store(), options.timeout);
    let mut readings: Vec<ClockReading> = Vec::new();
    read_clocks(keeper, timeout, &mut readings).await;
    found.round_trips = measure_round_trips(keeper, timeout).await;
    let profile = keeper.profile();
    let context = TrialContext { store, profile: &profile, ttl: options.ttl, timeout };
    found.trial = context.run().await;
    match within(timeout * 2, "the servers were examined", store.examine()).await {
        Ok(examination) => found.examination = examination,
        Err(error) => {
            let text = format!("the servers could not be examined: {error}");
            found.examination.findings.push(Finding::risk(Promise::Availability, text));
        }
    }
    found.locks = count_locks(keeper, timeout).await;
    tokio::time::sleep(MEASURE.saturating_sub(begun.elapsed())).await;
    read_clocks(keeper, timeout, &mut readings).await;
    found.clocks = clocks::estimate(&readings);
    // The settings may have changed meanwhile, or a notification may have shown what works.
    found.profile = Some(keeper.profile());
}

async fn read_clocks(keeper: &Lockkeeper, timeout: Duration, readings: &mut Vec<ClockReading>) {
    for _ in 0..READINGS {
        // A store whose clock cannot be read has failed in the trial, too.
        match within(timeout, "its clock was read", keeper.store().read_clocks()).await {
            Ok(more) if !more.is_empty() => readings.extend(more),
            _ => return,
        }
    }
}

async fn measure_round_trips(keeper: &Lockkeeper, timeout: Duration) -> Option<RoundTrips> {
    let (begun, mut took) = (Instant::now(), Vec::new());
    while took.len() < ROUND_TRIPS && begun.elapsed() < timeout {
        let sent = Instant::now();
        let name = format!("{}lock", trial::PREFIX);
        within(timeout, "a lock was read", keeper.inspect(name)).await.ok()?;
        took.push(sent.elapsed());
    }
    took.sort();
    let (median, worst) = (*took.get(took.len() / 2)?, *took.last()?);
    Some(RoundTrips { count: took.len(), median, worst })
}

async fn count_locks(keeper: &Lockkeeper, timeout: Duration) -> Option<LockCounts> {
    let page = within(timeout, "locks were listed", keeper.list("", &Page::FIRST)).await.ok()?;
    let others = page.locks.iter().filter(|lock| !lock.name.as_str().starts_with(trial::PREFIX));
    let count = |mut counts: LockCounts, lock: &lockkeeper::LockView| {
        counts.held += usize::from(!lock.held.is_empty());
        counts.waiting += lock.waiting;
        counts
    };
    Some(LockCounts { more: page.next.is_some(), ..others.fold(LockCounts::default(), count) })
}

/// Collects the findings of all parts, without repeats, the gravest first.
fn all_findings(found: &Diagnosis, ttl: Duration) -> Vec<Finding> {
    let mut findings: Vec<Finding> = found.refused.iter().map(refusal).collect();
    findings.extend(found.ways.iter().filter_map(WayToServer::finding));
    findings.extend(found.profile.iter().flat_map(|profile| profile.findings.clone()));
    findings.extend(found.trial.steps.iter().filter_map(|step| step.outcome.clone().err()));
    findings.extend(found.examination.findings.clone());
    findings.extend(found.clocks.iter().flat_map(ClockEstimate::findings));
    findings.extend(found.host.iter().filter_map(|host| host.finding(ttl)));
    findings.extend(found.round_trips.and_then(|trips| slow_store(trips, ttl)));
    let mut seen = std::collections::HashSet::new();
    findings.retain(|finding| seen.insert((finding.promise, finding.text.clone())));
    findings.sort_by_key(|finding| (finding.severity, finding.promise));
    findings
}

/// The finding for a store that cannot be opened.
fn refusal(error: &Error) -> Finding {
    let next = match error.outcome() {
        Outcome::Unavailable | Outcome::Unknown => {
            "start the servers, or correct the address; then look at firewalls and TLS"
        }
        Outcome::Denied => "correct the user, the password or the rights in the URL of the store",
        _ => "correct what the error names",
    };
    Finding::harm(Promise::Availability, format!("the store cannot be opened: {error}"))
        .set("the store", "one that can be opened")
        .how(next)
}

/// A renewal is sent after a third of the ttl, and must have its reply long before the rest is over.
fn slow_store(trips: RoundTrips, ttl: Duration) -> Option<Finding> {
    if trips.worst * 10 <= ttl {
        return None;
    }
    let text = format!(
        "a round trip took {}, and the ttl is {}: a holder loses its lock when a few renewals are that slow",
        duration::measured(trips.worst),
        duration::exact(ttl)
    );
    let enough = Duration::from_secs((trips.worst * 10).as_secs() + 1);
    let slow = Finding::risk(Promise::Availability, text);
    Some(slow.change("the ttl", duration::exact(ttl), format!("{} or more", duration::exact(enough))))
}
