//! A worker: claims items, runs a command for each of them, several at a time, and records how each attempt ended.

use std::pin::Pin;
use std::time::Duration;

use clap::Args;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lockkeeper::claim::{AfterFailure, ClaimSource, ClaimedItem};
#[cfg(feature = "postgres")]
use lockkeeper::jobs::{Jobs, TakenJob};
use lockkeeper::{BootInstant, Clock, Error, Fence, LockName, Outcome, Result as LkResult, SystemClock};
use lockkeeper_host::sleep_until;
use rustix::process::Signal;
use serde_json::json;
use tokio::sync::{Semaphore, watch};

use crate::child::item::{ItemCommand, ItemEnd};
use crate::child::registry;
use crate::duration;
use crate::exit::{self, ExitFailure, OK};
use crate::report::Report;
use crate::signals::SignalStream;
use crate::text::quoted;

/// After an error of the store that may pass, so long until the next claim.
const AFTER_ERROR: Duration = Duration::from_secs(1);

/// The rules for attempts, and how many there are at once.
#[derive(Args, Debug)]
pub struct WorkerArgs {
    /// How long other workers wait for one that has stopped renewing its lease
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse_ttl, allow_hyphen_values = true)]
    pub lease: Duration,
    /// How many attempts an item has before it has failed for good
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_attempts: u32,
    /// How long an item waits after its first failed attempt; doubled each time, half of it random
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = duration::parse_up_to_a_day, allow_hyphen_values = true)]
    pub backoff: Duration,
    /// How long an item waits between two attempts at most
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse_up_to_a_day, allow_hyphen_values = true)]
    pub backoff_max: Duration,
    /// How many commands run at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub parallel: u16,
    /// How many items this worker has at most; those beyond --parallel wait here, their leases extended [default: --parallel]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub batch: Option<u16>,
    /// How often to look while no item is free
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = duration::parse_ttl, allow_hyphen_values = true)]
    pub poll: Duration,
}

impl WorkerArgs {
    /// Checks what clap cannot, before a store is opened.
    pub fn check(&self) -> Result<(), ExitFailure> {
        if self.backoff > self.backoff_max {
            let (first, most) = (duration::exact(self.backoff), duration::exact(self.backoff_max));
            let message = format!("--backoff {first} is longer than --backoff-max {most}");
            return Err(ExitFailure::new(Outcome::Invalid, message));
        }
        Ok(())
    }

    fn most(&self) -> usize {
        usize::from(self.batch.unwrap_or(self.parallel).max(self.parallel))
    }
}

/// An item that this worker has, of either kind.
pub enum OwnItem {
    Claimed(Box<ClaimedItem>, Duration),
    #[cfg(feature = "postgres")]
    Job(TakenJob, Duration),
}

/// Calls the same method of either kind.
macro_rules! either {
    ($self:expr, $item:ident => $call:expr) => {
        match $self {
            OwnItem::Claimed($item, _) => $call,
            #[cfg(feature = "postgres")]
            OwnItem::Job($item, _) => $call,
        }
    };
}

impl OwnItem {
    /// Which item it is.
    pub fn id(&self) -> &str {
        match self {
            OwnItem::Claimed(item, _) => item.id(),
            #[cfg(feature = "postgres")]
            OwnItem::Job(job, _) => job.key(),
        }
    }

    /// The variable that tells the command which item it is.
    pub fn variable(&self) -> &'static str {
        match self {
            OwnItem::Claimed(..) => "LOCKKEEPER_ITEM",
            #[cfg(feature = "postgres")]
            OwnItem::Job(..) => "LOCKKEEPER_JOB",
        }
    }

    /// How long its lease lasts from each extension.
    pub fn lease(&self) -> Duration {
        match self {
            OwnItem::Claimed(_, lease) => *lease,
            #[cfg(feature = "postgres")]
            OwnItem::Job(_, lease) => *lease,
        }
    }

    pub fn fence(&self) -> Fence {
        either!(self, item => item.fence())
    }

    pub fn attempt_number(&self) -> u32 {
        either!(self, item => item.attempt_number())
    }

    pub async fn deadline(&self) -> BootInstant {
        match self {
            OwnItem::Claimed(item, _) => item.deadline().await,
            #[cfg(feature = "postgres")]
            OwnItem::Job(job, _) => job.deadline(),
        }
    }

    pub async fn extend(&self) -> LkResult<()> {
        either!(self, item => item.extend().await)
    }

    async fn complete(self) -> LkResult<()> {
        either!(self, item => item.complete().await)
    }

    async fn fail(self, reason: &str) -> LkResult<AfterFailure> {
        either!(self, item => item.fail(reason).await)
    }

    async fn give_back(self) -> LkResult<()> {
        either!(self, item => item.give_back().await)
    }
}

/// Where the items come from.
pub enum WorkSource {
    List(ClaimSource),
    #[cfg(feature = "postgres")]
    Table(Jobs),
}

impl WorkSource {
    async fn take(&mut self, most: usize, lease: Duration) -> LkResult<Vec<OwnItem>> {
        match self {
            WorkSource::List(source) => {
                let items = source.try_take(most).await?.into_iter();
                Ok(items.map(|item| OwnItem::Claimed(Box::new(item), lease)).collect())
            }
            #[cfg(feature = "postgres")]
            WorkSource::Table(jobs) => {
                let jobs = jobs.claim(most).await?.into_iter();
                Ok(jobs.map(|job| OwnItem::Job(job, lease)).collect())
            }
        }
    }

    /// Whether there will be no more, however long this worker waits. A table never ends.
    fn is_settled(&self) -> bool {
        match self {
            WorkSource::List(source) => source.open() == 0,
            #[cfg(feature = "postgres")]
            WorkSource::Table(_) => false,
        }
    }
}

/// One worker.
pub struct ItemWorker<'a> {
    pub args: &'a WorkerArgs,
    pub command: ItemCommand<'a>,
    pub report: &'a Report,
    /// The beginning of the names of the items, for the watchdog.
    pub group: String,
    /// Ends when no item is free, instead of waiting.
    pub skip: bool,
}

/// How an attempt ended, as far as the exit code of the worker is concerned.
type AttemptEnd = Result<Option<i32>, ExitFailure>;

impl ItemWorker<'_> {
    /// Works until everything is settled, or a signal comes. The exit code is that of the last command whose item failed for good.
    pub async fn run(&self, source: WorkSource, signals: &mut SignalStream) -> Result<i32, ExitFailure> {
        // Each command has its own watchdog and its own descendants.
        registry::expect_several();
        let (permits, (pass_on, passed)) = (Semaphore::new(self.args.parallel.into()), watch::channel(None));
        let (mut running, mut claiming) = (FuturesUnordered::new(), None::<Claiming>);
        let (mut source, mut next_claim) = (Some(source), SystemClock.now());
        let (mut code, mut failure, mut stopped) = (OK, None::<ExitFailure>, None::<Signal>);
        loop {
            let ending = stopped.is_some() || failure.is_some();
            let settled = source.as_ref().is_some_and(WorkSource::is_settled);
            if running.is_empty() && claiming.is_none() && (ending || settled) {
                return match failure {
                    Some(failure) => Err(failure),
                    None => Ok(stopped.map_or(code, |signal| exit::by_signal(signal.as_raw()))),
                };
            }
            let free = self.args.most() - running.len();
            let may_claim = !ending && free > 0 && claiming.is_none();
            tokio::select! {
                biased;
                signal = signals.next_ending() => {
                    // The second signal does not ask.
                    let passed_on = if stopped.is_some() { Signal::KILL } else { signal };
                    if stopped.is_none() {
                        self.report.say("ending: no more items are claimed, and the commands get the signal");
                    }
                    stopped = stopped.or(Some(signal));
                    permits.close();
                    let _ = pass_on.send(Some(passed_on));
                }
                Some(ended) = running.next(), if !running.is_empty() => {
                    let ended: AttemptEnd = ended;
                    match ended {
                        Ok(ended) => code = ended.unwrap_or(code),
                        Err(error) => {
                            failure = failure.or(Some(error));
                            permits.close();
                        }
                    }
                    next_claim = SystemClock.now();
                }
                () = sleep_until(&SystemClock, next_claim), if may_claim => {
                    claiming = source.take().map(|source| claim(source, free, self.args.lease));
                }
                (back, claimed) = answer_of(&mut claiming) => {
                    (source, claiming) = (Some(back), None);
                    match claimed {
                        Ok(items) if items.is_empty() => {
                            if self.skip && running.is_empty() && !ending {
                                return Ok(code);
                            }
                            next_claim = SystemClock.now() + self.args.poll;
                        }
                        Ok(items) => {
                            for item in items {
                                running.push(self.attempt(item, &permits, passed.clone()));
                            }
                        }
                        Err(error) if passes(&error) => {
                            self.report.say(&format!("no item could be claimed, trying again: {error}"));
                            self.report.event("retry", json!({ "why": error.to_string() }));
                            next_claim = SystemClock.now() + AFTER_ERROR;
                        }
                        Err(error) => {
                            failure = failure.or(Some(error.into()));
                            permits.close();
                        }
                    }
                }
            }
        }
    }

    /// One attempt: waits for its turn, runs the command, and records how it ended.
    async fn attempt(
        &self,
        item: OwnItem,
        permits: &Semaphore,
        mut signals: watch::Receiver<Option<Signal>>,
    ) -> AttemptEnd {
        let Some(_permit) = wait_for_turn(&item, permits).await else {
            // A signal came first, or the lease was lost meanwhile.
            let _ = item.give_back().await;
            return Ok(None);
        };
        let (id, fence, number) = (item.id().to_owned(), item.fence(), item.attempt_number());
        let more = |mut more: serde_json::Value| {
            more["item"] = json!(id);
            more["fence"] = json!(fence);
            more["attempt"] = json!(number);
            more
        };
        self.report.event("claimed", more(json!({})));
        let name = LockName::new(format!("{}/{id}", self.group));
        let name = name.or_else(|_| LockName::new(format!("{}/{fence}", self.group)))?;
        let end = match self.command.run(&item, &name, &mut signals).await {
            Ok(end) => end,
            Err(error) => {
                let _ = item.give_back().await;
                let message = format!("the command for {} cannot be started: {error}", quoted(&id));
                return Err(ExitFailure::new(Outcome::Unavailable, message).with_code(exit::CANNOT_START));
            }
        };
        let recorded = match end {
            ItemEnd::NotStarted => {
                let _ = item.give_back().await;
                self.report.event("lost", more(json!({})));
                self.report
                    .say(&format!("{}: the lease was lost before its command was started", quoted(&id)));
                return Ok(None);
            }
            ItemEnd::LeaseLost => {
                self.report.event("lost", more(json!({})));
                self.report.say(&format!("{}: the lease was lost, and the command was ended", quoted(&id)));
                return Ok(None);
            }
            ItemEnd::Itself(0) => item.complete().await.map(|()| {
                self.report.event("done", more(json!({})));
                None
            }),
            // A command that a signal to this worker has ended did not fail by itself.
            ItemEnd::Itself(_) if signals.borrow().is_some() => item.give_back().await.map(|()| {
                self.report.event("given_back", more(json!({})));
                None
            }),
            ItemEnd::Itself(code) => item.fail(format!("exit code {code}").as_str()).await.map(|after| {
                self.report_failure(&id, code, after, &more);
                (after == AfterFailure::FailedForGood).then_some(code)
            }),
        };
        recorded.or_else(|error| {
            let why = error.to_string();
            self.report.say(&format!(
                "warning: {}: the end of attempt {number} was not recorded: {why}",
                quoted(&id)
            ));
            self.report
                .event("not_recorded", more(json!({ "outcome": error.outcome().as_str(), "why": why })));
            Ok(None)
        })
    }

    fn report_failure(
        &self,
        id: &str,
        code: i32,
        after: AfterFailure,
        more: &impl Fn(serde_json::Value) -> serde_json::Value,
    ) {
        match after {
            AfterFailure::RetryAfter(pause) => {
                let again = duration::rough(pause);
                self.report.say(&format!("{}: the command ended with {code}; again in {again}", quoted(id)));
                let ms = crate::report::millis(pause);
                self.report.event("failed", more(json!({ "exit_code": code, "again_in_ms": ms })));
            }
            AfterFailure::FailedForGood => {
                self.report
                    .say(&format!("{}: the command ended with {code}, and has failed for good", quoted(id)));
                self.report.event("failed", more(json!({ "exit_code": code, "for_good": true })));
            }
        }
    }
}

/// A claim under way, which has the source. It is never dropped before its answer: what it claims would wait for the end of its lease.
type Claiming = Pin<Box<dyn Future<Output = (WorkSource, LkResult<Vec<OwnItem>>)>>>;

fn claim(mut source: WorkSource, most: usize, lease: Duration) -> Claiming {
    Box::pin(async move {
        let claimed = source.take(most, lease).await;
        (source, claimed)
    })
}

/// The answer of the claim under way; never, if there is none.
async fn answer_of(claiming: &mut Option<Claiming>) -> (WorkSource, LkResult<Vec<OwnItem>>) {
    match claiming {
        Some(claiming) => claiming.await,
        None => std::future::pending().await,
    }
}

/// Waits until one more command may run, and extends the lease of the item meanwhile. `None`: it is not to run.
async fn wait_for_turn<'a>(
    item: &OwnItem,
    permits: &'a Semaphore,
) -> Option<tokio::sync::SemaphorePermit<'a>> {
    let turn = permits.acquire();
    tokio::pin!(turn);
    loop {
        let next = SystemClock.now() + item.lease() / 4;
        tokio::select! {
            biased;
            permit = &mut turn => return permit.ok(),
            () = sleep_until(&SystemClock, next) => {
                if let Err(Error::Lost(_) | Error::Stale { .. }) = item.extend().await {
                    return None;
                }
            }
        }
    }
}

/// Whether the store may answer soon.
fn passes(error: &Error) -> bool {
    matches!(error, Error::Unavailable(_) | Error::Unknown(_) | Error::Limited(_))
}
