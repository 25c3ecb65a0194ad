//! `lockkeeper elect`: a command that runs on the leader of many candidates.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use futures_util::StreamExt;
use lockkeeper::election::{Election, Leader, Proclamation};
use lockkeeper::{LockName, Lockkeeper, Outcome};
use lockkeeper_host::host_name;
use serde_json::json;

use crate::args::{JobArgs, JobMetricsArgs, LeaseArgs, NameArgs, utf8};
use crate::attempt_file::AttemptFile;
use crate::child::job::ExpiringHold;
use crate::child::supervisor::CommandEnd;
use crate::exit::{self, ExitFailure, OK};
use crate::job_metrics::JobMetrics;
use crate::output;
use crate::report::Report;
use crate::signals::SignalStream;
use crate::store::{self, StoreSource};
use crate::text::plain;

/// Run a command while this process is the leader; campaign again after each term.
///
/// Waits in the queue until elected, then runs the command. If the term is about to be lost, the command and all processes that
/// it started are ended before the deadline, and the candidate campaigns again. If the command ends by itself, the leader resigns.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
#[command(mut_arg("command", |command| command.required(false).required_unless_present("observe")))]
pub struct ElectArgs {
    #[command(flatten)]
    pub named: NameArgs,
    /// The text that observers see of the leader, for instance its address [default: the host name]
    #[arg(long, value_name = "TEXT", value_parser = utf8("value"))]
    pub value: Option<String>,
    /// Print the leaders as they change instead, until Ctrl-C
    #[arg(long, conflicts_with_all = ["value", "resume", "metrics", "command"])]
    pub observe: bool,
    /// Keep the proof of leadership in this file: a leader that is restarted within the ttl continues its term
    #[arg(long, value_name = "FILE")]
    pub resume: Option<PathBuf>,
    #[command(flatten)]
    pub lease: LeaseArgs,
    #[command(flatten)]
    pub metrics: JobMetricsArgs,
    #[command(flatten)]
    pub job: JobArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper elect scheduler -- ./scheduler                     on every host; one of them runs it
  lockkeeper elect db --value 10.0.0.7:5432 -- ./primary.sh     observers can read the address
  lockkeeper elect db --observe                                 print the leader whenever it changes
  lockkeeper elect db --resume /run/db.lead -- ./primary.sh     a quick restart keeps the term

The command gets LOCKKEEPER_TERM, the number of its term, and the other variables of `run`. The term
is also its fence (the fencing token): it is higher for every new leader, and every write of the
command should carry it.

Exit codes: the command's own when it ended by itself, 128+n for a signal that ended the wait or
came before the term was lost; 64 bad call, 69 the store is unreachable at the start, 78 the store
has no records.";

impl ElectArgs {
    fn name(&self) -> &LockName {
        self.named.get()
    }

    pub async fn execute(self) -> Result<i32, ExitFailure> {
        if self.observe {
            return self.print_leaders().await;
        }
        let report = self.job.report(std::iter::once(self.name()));
        let report = self.metrics.keep(report, "elect", self.name());
        report.finish(self.lead_terms(&report).await)
    }

    async fn lead_terms(&self, report: &Report) -> Result<i32, ExitFailure> {
        self.job.check()?;
        let mut resume = self.resume.as_deref().map(AttemptFile::open).transpose()?;
        let source = self.job.common.source()?;
        store::warn_of_one_host(&source, report);
        let keeper = Lockkeeper::open(source.url.expose()).await?;
        let mut signals = SignalStream::forwarded()?;
        loop {
            let leader = self.campaign(&keeper, resume.as_mut(), &mut signals, report).await?;
            report.measure(|job| job.granted(leader.guard()));
            report.event("elected", json!({ "term": leader.term() }));
            report.say(&format!("elected for {}, term {}", report.what(), leader.term()));
            let led = self.lead(&leader, &source, &mut signals, report).await;
            match led {
                Err(failure) => {
                    drop(leader);
                    signals.settle(&keeper).await;
                    return Err(failure);
                }
                Ok(CommandEnd::Itself { code, .. }) => {
                    resign(leader, &mut signals, report).await;
                    signals.settle(&keeper).await;
                    if let Some(resume) = resume {
                        resume.remove();
                    }
                    report.event("ended", json!({ "outcome": "done", "exit_code": code }));
                    return Ok(code);
                }
                Ok(CommandEnd::Lost { why, all_gone, asked, .. }) => {
                    if all_gone {
                        // The old term is released in the background; that must not release the new one.
                        drop(leader);
                    } else {
                        let hold = ExpiringHold::of(leader.guard());
                        leader.let_expire();
                        hold.outlast(&keeper, &mut signals, report).await;
                    }
                    report.measure(JobMetrics::hold_ended);
                    // The signal also ends this process, even if the term was lost meanwhile.
                    if let Some(signal) = asked {
                        report
                            .say(&format!("the term is over ({why}), after a signal: not campaigning again"));
                        if let Some(resume) = resume {
                            resume.remove();
                        }
                        return Ok(signals.flush_releases(&keeper, signal).await);
                    }
                    report.say(&format!("the term is over ({why}); campaigning again"));
                    report.measure(JobMetrics::wait_begins);
                    resume.as_mut().map_or(Ok(()), AttemptFile::renew)?;
                }
            }
        }
    }

    fn election(&self, keeper: &Lockkeeper) -> Election {
        let mut election = keeper.election(self.name().as_str()).ttl(self.lease.ttl);
        if let Some(label) = self.job.label() {
            election = election.label(label);
        }
        if self.lease.correctness { election.for_correctness() } else { election }
    }

    /// Waits in the queue until elected. A candidate retries for as long as the store is unreachable.
    async fn campaign(
        &self,
        keeper: &Lockkeeper,
        mut resume: Option<&mut AttemptFile>,
        signals: &mut SignalStream,
        report: &Report,
    ) -> Result<Leader, ExitFailure> {
        loop {
            let mut election = self.election(keeper);
            if let Some(resume) = &resume {
                election = election.resume(resume.attempt());
            }
            let value = self.value.clone().unwrap_or_else(host_name);
            let elected = tokio::select! {
                biased;
                elected = election.campaign(value) => elected,
                signal = signals.next_ending() => {
                    return Err(ExitFailure::silent(signals.flush_releases(keeper, signal).await));
                }
            };
            match elected {
                Ok(leader) => return Ok(leader),
                Err(error) if is_transient(error.outcome()) => {
                    report.say(&format!("{error}; campaigning again"));
                    report.event("retry", json!({ "why": error.to_string() }));
                    if let Some(resume) = resume.as_mut() {
                        resume.renew()?;
                    }
                    tokio::select! {
                        () = tokio::time::sleep(Duration::from_secs(1)) => {}
                        signal = signals.next_ending() => {
                            return Err(ExitFailure::silent(exit::by_signal(signal.as_raw())));
                        }
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn lead(
        &self,
        leader: &Leader,
        source: &StoreSource,
        signals: &mut SignalStream,
        report: &Report,
    ) -> Result<CommandEnd, ExitFailure> {
        let name = leader.guard().names().first().clone();
        let env = ("LOCKKEEPER_TERM", leader.term().to_string());
        self.job.job(&name, source, Some(env)).supervise(leader.guard(), signals, report).await
    }

    async fn print_leaders(&self) -> Result<i32, ExitFailure> {
        let keeper = self.job.common.open().await?;
        let mut signals = SignalStream::ending()?;
        let mut news = keeper.election(self.name().as_str()).observe();
        loop {
            tokio::select! {
                biased;
                signal = signals.next_ending() => return Ok(exit::by_signal(signal.as_raw())),
                next = news.next() => match next {
                    Some(Ok(next)) => self.print(&next)?,
                    // The observer tries again; until then there is nothing to print.
                    Some(Err(error)) if is_transient(error.outcome()) => {}
                    Some(Err(error)) => return Err(error.into()),
                    None => return Ok(OK),
                },
            }
        }
    }

    fn print(&self, next: &Proclamation) -> Result<(), ExitFailure> {
        if self.job.common.json {
            let line = json!({
                "name": self.name(), "term": next.term, "number": next.number, "value": next.value,
                "missed": next.missed,
            });
            return output::line(&line.to_string());
        }
        let missed = if next.missed { "(some were missed)  " } else { "" };
        let value = next.value.as_deref().map_or("resigned".into(), plain);
        output::line(&format!("{missed}term {}  {value}", next.term))
    }
}

/// Whether a retry may succeed.
fn is_transient(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Unavailable | Outcome::Unknown | Outcome::Lost | Outcome::Stale)
}

async fn resign(leader: Leader, signals: &mut SignalStream, report: &Report) {
    let term = leader.term();
    let interrupted = |_| Err(lockkeeper::Error::Unknown("a signal came first".into()));
    match signals.race(leader.resign()).await.unwrap_or_else(interrupted) {
        Ok(_) => report.event("resigned", json!({ "term": term })),
        Err(error) => {
            report.say(&format!("warning: the leader could not resign ({error}); the term ends with its ttl"))
        }
    }
}
