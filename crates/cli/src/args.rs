//! The options that several subcommands share. The options of one subcommand are in its own file in [`commands`](crate::commands).

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Parser};
use lockkeeper::{Fence, Holder, LockBuilder, LockName, Lockkeeper, Outcome};
use lockkeeper_core::{Names, Secret};

use crate::child::job::{self, CommandJob};
use crate::commands::CliCommand;
use crate::duration;
use crate::exit::ExitFailure;
use crate::job_metrics::JobMetrics;
use crate::report::{EventOutput, Report};
use crate::store::{self, StoreSource};

/// Distributed locks: run a command under a lock, see which process holds it, take a lock away.
#[derive(Debug, Parser)]
#[command(name = "lockkeeper", version, max_term_width = 100, subcommand_required = true)]
#[command(arg_required_else_help = true, after_help = TOP)]
pub struct Cli {
    /// The store; the same option as after a subcommand
    #[arg(long, value_name = "URL", value_parser = secret_url())]
    pub store: Option<SecretUrl>,
    #[command(subcommand)]
    pub command: CliCommand,
}

const TOP: &str = "\
Examples:
  lockkeeper run nightly-settlement -- ./settle.sh         wait for the lock, then run the command
  lockkeeper run backup --skip -- ./backup.sh              exit 75 if another process holds the lock
  lockkeeper ls                                            list the locks and their holders
  lockkeeper break backup --reason 'host 7 is on fire'     take the lock away from its holder

Every grant of a lock has a fence (the fencing token): a number that is higher in every new grant. A
resource that refuses writes with an older fence is safe from a holder that was paused and is late.

Locks are kept in one file per user (for root: per machine), unless --store, --store-file,
LOCKKEEPER_STORE or LOCKKEEPER_STORE_FILE names another store. Exit codes: the command's own; 75 the
lock is busy, 76 the lock was lost, 64 bad call, 69 the store is unreachable. `lockkeeper man` lists
all of them.";

/// The options of every subcommand that opens a store.
#[derive(Args, Debug)]
pub struct CommonArgs {
    /// The store, for instance sqlite:/srv/locks.db or redis://HOST [default: a file per user] [env: LOCKKEEPER_STORE]
    #[arg(long, value_name = "URL", value_parser = secret_url())]
    pub store: Option<SecretUrl>,
    /// A file that contains the URL of the store, to keep its password off the command line [env: LOCKKEEPER_STORE_FILE]
    #[arg(long, value_name = "FILE", conflicts_with = "store")]
    pub store_file: Option<PathBuf>,
    /// Write JSON, for programs
    #[arg(long)]
    pub json: bool,
}

impl CommonArgs {
    /// The URL of the store that the user named, else of the default store.
    pub fn url(&self) -> Result<Secret, ExitFailure> {
        Ok(self.source()?.url)
    }

    /// The URL of the store, and where the user named it.
    pub fn source(&self) -> Result<StoreSource, ExitFailure> {
        store::find_source(self.store.as_ref(), self.store_file.as_deref())
    }

    pub async fn open(&self) -> Result<Lockkeeper, ExitFailure> {
        Ok(Lockkeeper::open(self.url()?.expose()).await?)
    }
}

/// The name of a lock, also one that begins with a dash.
#[derive(Args, Debug)]
pub struct NameArgs {
    /// The name: any text of 1 to 512 bytes (less for recipes, 448 for most); if it begins with a dash, --name=-x
    #[arg(value_parser = lock_name(), required_unless_present = "named", conflicts_with = "named")]
    name: Option<LockName>,
    #[arg(long = "name", id = "named", value_name = "NAME", value_parser = lock_name(), allow_hyphen_values = true, hide = true)]
    named: Option<LockName>,
}

impl NameArgs {
    pub fn get(&self) -> &LockName {
        self.name.as_ref().or(self.named.as_ref()).expect("clap requires one of them")
    }

    /// Checks that it can be the key of a recipe, before a store is opened and written to.
    pub fn check_key(&self) -> Result<(), ExitFailure> {
        let (bytes, most) = (self.get().as_str().len(), lockkeeper::KEY_BYTES);
        if bytes <= most {
            return Ok(());
        }
        let message =
            format!("the key has {bytes} bytes, {most} are allowed: shorten it, or hash the long part");
        Err(ExitFailure::new(Outcome::Invalid, message))
    }
}

/// The lease of a lock, and what the lock is for.
#[derive(Args, Debug)]
pub struct LeaseArgs {
    /// How long other processes wait for a holder that has stopped renewing its lease
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse_ttl, allow_hyphen_values = true)]
    pub ttl: Duration,
    /// Refuse a store that may forget a lock or a fence: for work that does harm if it is done twice
    #[arg(long)]
    pub correctness: bool,
}

/// The options of the subcommands that run a command under a lock: run, once, cached, elect and cron.
#[derive(Args, Debug)]
pub struct JobArgs {
    /// Time between TERM and KILL if the lock is about to be lost; at most a quarter of the ttl
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration::parse_up_to_a_day, allow_hyphen_values = true)]
    pub grace: Duration,
    /// Print errors only
    #[arg(long, short)]
    pub quiet: bool,
    /// Do not pass the store on to the command: neither LOCKKEEPER_STORE nor LOCKKEEPER_STORE_FILE
    #[arg(long)]
    pub hide_store: bool,
    #[command(flatten)]
    pub common: CommonArgs,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

impl JobArgs {
    /// The messages of the subcommand about the locks `names`. The command's stdout stays the command's own.
    pub fn report<'a>(&self, names: impl Iterator<Item = &'a LockName>) -> Report {
        Report::new(names, self.common.json, self.quiet, EventOutput::Stderr)
    }

    /// Fails if the command cannot be started, before anything is locked.
    pub fn check(&self) -> Result<(), ExitFailure> {
        job::check(&self.command)
    }

    /// The label that other processes see: the name of the command.
    pub fn label(&self) -> Option<String> {
        job::label(&self.command)
    }

    /// The command as a job under the lock `name`, with more variables `env` in its environment.
    pub fn job<'a>(
        &'a self,
        name: &'a LockName,
        source: &StoreSource,
        env: impl IntoIterator<Item = (&'static str, String)>,
    ) -> CommandJob<'a> {
        CommandJob {
            command: &self.command,
            name,
            grace: self.grace,
            max_hold: None,
            store: source.environment(self.hide_store),
            env: env.into_iter().collect(),
            finish: None,
            watchdog: None,
            pipes: None,
        }
    }
}

/// The numbers of a job, for node-exporter: the options of run, once, elect and cron.
#[derive(Args, Debug)]
pub struct JobMetricsArgs {
    /// Write the numbers of this job to FILE, for node-exporter's textfile collector; one file per job
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// The label `lock` of these numbers [default: the name]
    #[arg(long, value_name = "TEXT", requires = "metrics", value_parser = utf8("label"))]
    pub metrics_name: Option<String>,
}

impl JobMetricsArgs {
    /// The messages of the job, which also keep its numbers if a file is given.
    pub fn keep(&self, report: Report, kind: &'static str, name: &LockName) -> Report {
        let Some(file) = &self.metrics else { return report };
        let label = self.metrics_name.clone().unwrap_or_else(|| name.to_string());
        report.with_metrics(JobMetrics::new(file.clone(), kind, label))
    }
}

/// A lock request, for run and hold.
#[derive(Args, Debug)]
pub struct LockArgs {
    #[command(flatten)]
    pub named: NameArgs,
    /// Lock this name too: all of them or none; may be repeated
    #[arg(long, value_name = "NAME", value_parser = lock_name(), allow_hyphen_values = true)]
    pub also: Vec<LockName>,
    #[command(flatten)]
    pub lease: LeaseArgs,
    /// Wait for at most this long, then exit 75 [default: for ever]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_wait, allow_hyphen_values = true)]
    pub wait: Option<Duration>,
    /// Do not wait: exit 75 if another process holds the lock
    #[arg(long, conflicts_with = "wait")]
    pub skip: bool,
    /// Share the lock with other --shared holders
    #[arg(long, conflicts_with = "permits")]
    pub shared: bool,
    /// Be one of at most N holders
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000), allow_hyphen_values = true)]
    pub permits: Option<u32>,
    /// Keep the lock for at least this long, even if the work is done sooner
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_up_to_a_day, allow_hyphen_values = true)]
    pub min_hold: Option<Duration>,
    /// Release the lock after this long, even if the work is not done
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_long, allow_hyphen_values = true)]
    pub max_hold: Option<Duration>,
    /// Grant the lock to no one for this long after an unclean end (expiry, kill -9, break)
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_up_to_a_day, allow_hyphen_values = true)]
    pub lock_delay: Option<Duration>,
    /// A label that other processes see beside the host and the pid
    #[arg(long, value_name = "TEXT", value_parser = utf8("label"))]
    pub label: Option<String>,
}

impl LockArgs {
    pub fn name(&self) -> &LockName {
        self.named.get()
    }

    /// All names, the main one first.
    pub fn names(&self) -> impl Iterator<Item = &LockName> {
        std::iter::once(self.name()).chain(&self.also)
    }

    /// Checks everything that needs no store, before a store is opened and written to.
    pub fn check(&self) -> Result<(), ExitFailure> {
        Names::new(self.names().cloned())?;
        Holder::new("", 0, self.label.clone())?;
        match (self.max_hold, self.min_hold) {
            (Some(max), Some(min)) if max < min => {
                let (max, min) = (duration::exact(max), duration::exact(min));
                Err(ExitFailure::new(
                    Outcome::Invalid,
                    format!("--max-hold {max} is shorter than --min-hold {min}"),
                ))
            }
            _ => Ok(()),
        }
    }

    /// The lock request for the library. `label`: used if the user gave none. `wait`: what is left of the wait.
    pub fn builder(&self, keeper: &Lockkeeper, label: Option<String>, wait: Option<Duration>) -> LockBuilder {
        let mut builder = keeper.lock_all(self.names()).ttl(self.lease.ttl);
        if let Some(wait) = wait {
            builder = builder.wait(wait);
        }
        if self.shared {
            builder = builder.shared();
        }
        if let Some(n) = self.permits {
            builder = builder.permits(n);
        }
        if let Some(min) = self.min_hold {
            builder = builder.min_hold(min);
        }
        if let Some(max) = self.max_hold {
            builder = builder.max_hold(max);
        }
        if let Some(delay) = self.lock_delay {
            builder = builder.lock_delay(delay);
        }
        if self.lease.correctness {
            builder = builder.for_correctness();
        }
        match self.label.clone().or(label) {
            Some(label) => builder.label(label),
            None => builder,
        }
    }
}

/// Parses the name of a lock.
pub fn lock_name() -> impl TypedValueParser<Value = LockName> {
    OsStringValueParser::new().try_map(|name: OsString| match name.to_str() {
        Some(name) => LockName::new(name).map_err(|e| e.to_string()),
        None => Err("the name is not UTF-8: names are printable text".into()),
    })
}

/// Parses any text that is UTF-8.
pub fn utf8(what: &'static str) -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new()
        .try_map(move |text: OsString| text.into_string().map_err(|_| format!("the {what} is not UTF-8")))
}

/// The URL of a store, which may contain a password. No error message repeats it. clap would repeat the value of an argument
/// that its parser refuses, so this parser accepts everything, and [`SecretUrl::expose`] refuses text that is not UTF-8.
#[derive(Clone, Debug)]
pub struct SecretUrl(Option<Secret>);

impl SecretUrl {
    /// The URL, for the store that is opened with it.
    pub fn expose(&self) -> Result<&str, ExitFailure> {
        let text = self.0.as_ref().map(Secret::expose);
        text.ok_or_else(|| ExitFailure::new(Outcome::Invalid, "the store URL is not UTF-8"))
    }
}

/// Parses a [`SecretUrl`].
pub fn secret_url() -> impl TypedValueParser<Value = SecretUrl> {
    OsStringValueParser::new().map(|text: OsString| SecretUrl(text.into_string().ok().map(Secret::from)))
}

/// Parses a fence: a whole number that a store can have granted.
pub fn fence(text: &str) -> Result<Fence, String> {
    let number = text.parse().map_err(|_| "a fence is a number".to_owned())?;
    Fence::new(number).map_err(|e| e.to_string())
}
