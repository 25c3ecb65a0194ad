use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use futures_util::StreamExt;
use lockkeeper::{Election, Leader, LockName, Lockkeeper, Outcome, Proclamation};
use lockkeeper_host::host_name;
use serde_json::json;

use crate::args::{Common, Inherited, Named, utf8};
use crate::child::job::{self, Job};
use crate::child::supervise::End;
use crate::exit::{self, Failure, OK};
use crate::output;
use crate::report::{Events, Report};
use crate::resume::Resume;
use crate::signals::Signals;
use crate::span;
use crate::store::{self, Address};
use crate::text::plain;

/// Run a command while this process is the leader; campaign again when it is not.
///
/// Stands in line until elected, then runs the command. If the term is about to be lost, the command and everything it
/// started are ended before the deadline, and the campaign begins anew. If the command ends by itself, it resigns.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Elect {
    #[command(flatten)]
    pub named: Named,
    /// What others are told about the leader, for instance its address [default: the host name]
    #[arg(long, value_name = "TEXT", value_parser = utf8("value"))]
    pub value: Option<String>,
    /// Print the leaders as they change instead, until Ctrl-C
    #[arg(long, conflicts_with_all = ["value", "resume", "command"])]
    pub observe: bool,
    /// How long a leader's silence may last before another is elected
    #[arg(long, value_name = "SPAN", default_value = "30s", value_parser = span::ttl, allow_hyphen_values = true)]
    pub ttl: Duration,
    /// Keep the proof of leadership in this file: killed and started again within the ttl, the term goes on
    #[arg(long, value_name = "FILE")]
    pub resume: Option<PathBuf>,
    /// Twice would be harm: refuse a store that can forget a leader or a term
    #[arg(long)]
    pub correctness: bool,
    /// Time between TERM and KILL if the term is lost; at most a quarter of the ttl
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
    #[arg(last = true, required_unless_present = "observe", value_name = "CMD")]
    pub command: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper elect scheduler -- ./scheduler                     on every host; one of them runs it
  lockkeeper elect db --value 10.0.0.7:5432 -- ./primary.sh     the others can read the address
  lockkeeper elect db --observe                                 who leads, as it changes
  lockkeeper elect db --resume /run/db.lead -- ./primary.sh     a quick restart keeps the term

The command sees LOCKKEEPER_TERM, which is its fence and grows from leader to leader, and what `run`
sets. Everything that it writes should carry it.

Exit codes: the command's own when it ended by itself, 128+n for a signal that ended the wait; 64
bad call, 69 store unavailable at the start, 78 the store has no records.";

impl Elect {
    fn name(&self) -> &LockName {
        self.named.get()
    }

    pub async fn go(self) -> Result<i32, Failure> {
        if self.observe {
            return self.print_leaders().await;
        }
        job::check(&self.command)?;
        let report = Report::new(std::iter::once(self.name()), self.common.json, self.quiet, Events::Stderr);
        let mut resume = self.resume.as_deref().map(Resume::open).transpose()?;
        let address = self.common.address()?;
        store::warn_of_one_host(address.url.expose(), &report);
        let keeper = Lockkeeper::open(address.url.expose()).await?;
        let mut signals = Signals::forwarded()?;
        loop {
            let leader = self.campaign(&keeper, resume.as_mut(), &mut signals, &report).await?;
            report.event("elected", json!({ "term": leader.term() }));
            report.say(&format!("elected for {}, term {}", report.what(), leader.term()));
            match self.lead(&leader, &address, &mut signals, &report).await? {
                End::Itself { code, .. } => {
                    resign(leader, &mut signals, &report).await;
                    if let Some(resume) = resume {
                        resume.remove();
                    }
                    report.event("ended", json!({ "outcome": "done", "exit_code": code }));
                    return Ok(code);
                }
                End::Lost { why, all_gone, .. } => {
                    if !all_gone {
                        report.say("warning: some of its processes could not be killed");
                    }
                    report.say(&format!("the term is over ({why}); campaigning again"));
                    // What the old term gives back in the background must not be the new one's.
                    drop(leader);
                    resume.as_mut().map_or(Ok(()), Resume::renew)?;
                }
            }
        }
    }

    fn election(&self, keeper: &Lockkeeper) -> Election {
        let mut election = keeper.election(self.name().as_str()).ttl(self.ttl);
        if let Some(label) = self.command.first().and_then(|_| job::label(&self.command)) {
            election = election.label(label);
        }
        if self.correctness { election.for_correctness() } else { election }
    }

    /// Stands in line until elected. A store that is away for a while is waited for: that is what a candidate is for.
    async fn campaign(
        &self,
        keeper: &Lockkeeper,
        mut resume: Option<&mut Resume>,
        signals: &mut Signals,
        report: &Report,
    ) -> Result<Leader, Failure> {
        loop {
            let mut election = self.election(keeper);
            if let Some(resume) = &resume {
                election = election.resume(resume.attempt());
            }
            let value = self.value.clone().unwrap_or_else(host_name);
            let elected = tokio::select! {
                biased;
                elected = election.campaign(value) => elected,
                signal = signals.end() => {
                    return Err(Failure::silent(signals.leave(keeper, signal).await));
                }
            };
            match elected {
                Ok(leader) => return Ok(leader),
                Err(error) if passes(error.outcome()) => {
                    report.say(&format!("{error}; campaigning again"));
                    report.event("retry", json!({ "why": error.to_string() }));
                    if let Some(resume) = resume.as_mut() {
                        resume.renew()?;
                    }
                    tokio::select! {
                        () = tokio::time::sleep(Duration::from_secs(1)) => {}
                        signal = signals.end() => {
                            return Err(Failure::silent(exit::by_signal(signal.as_raw())));
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
        address: &Address,
        signals: &mut Signals,
        report: &Report,
    ) -> Result<End, Failure> {
        let name = leader.guard().names().first().clone();
        let job = Job {
            command: &self.command,
            name: &name,
            grace: self.grace,
            max_hold: None,
            store: address.environment(self.inherited.hide_store),
            env: vec![("LOCKKEEPER_TERM", leader.term().to_string())],
            pipes: None,
        };
        job.supervise(leader.guard(), signals, report).await
    }

    async fn print_leaders(&self) -> Result<i32, Failure> {
        let mut signals = Signals::ending()?;
        let keeper = self.common.open().await?;
        let mut news = keeper.election(self.name().as_str()).observe();
        loop {
            tokio::select! {
                biased;
                signal = signals.end() => return Ok(exit::by_signal(signal.as_raw())),
                next = news.next() => match next {
                    Some(Ok(next)) => self.print(&next)?,
                    // It comes back; until then there is nothing to print.
                    Some(Err(error)) if passes(error.outcome()) => {}
                    Some(Err(error)) => return Err(error.into()),
                    None => return Ok(OK),
                },
            }
        }
    }

    fn print(&self, next: &Proclamation) -> Result<(), Failure> {
        if self.common.json {
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

/// Whether it may come right by itself.
fn passes(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Unavailable | Outcome::Unknown | Outcome::Lost | Outcome::Stale)
}

async fn resign(leader: Leader, signals: &mut Signals, report: &Report) {
    let term = leader.term();
    let interrupted = |_| Err(lockkeeper::Error::Unknown("a signal came first".into()));
    match signals.or_end(leader.resign()).await.unwrap_or_else(interrupted) {
        Ok(_) => report.event("resigned", json!({ "term": term })),
        Err(error) => {
            report.say(&format!("warning: the term could not be given back ({error}); its ttl ends it"))
        }
    }
}
