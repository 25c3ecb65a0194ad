//! The command line: what is common to several subcommands. Each one's own part is in its file.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Parser};
use lockkeeper::{Fence, Holder, LockBuilder, LockName, Lockkeeper, Outcome};
use lockkeeper_core::{Names, Secret};

use crate::commands::Command;
use crate::exit::Failure;
use crate::span;
use crate::store::{self, Address};

/// Exactly one process at a time: run a command under a lock, see who holds what, take a lock away.
#[derive(Debug, Parser)]
#[command(name = "lockkeeper", version, max_term_width = 100, subcommand_required = true)]
#[command(arg_required_else_help = true, after_help = TOP)]
pub struct Cli {
    /// The store, as after every command that has one
    #[arg(long, value_name = "URL", value_parser = secret_url())]
    pub store: Option<SecretUrl>,
    #[command(subcommand)]
    pub command: Command,
}

const TOP: &str = "\
Examples:
  lockkeeper run nightly-settlement -- ./settle.sh         wait for the lock, then run it
  lockkeeper run backup --skip -- ./backup.sh              not if somebody else is at it
  lockkeeper ls                                            who holds what
  lockkeeper break backup --reason 'host 7 is on fire'     take it away

Locks are kept in one file per user (for root: per machine), unless --store, --store-file,
LOCKKEEPER_STORE or LOCKKEEPER_STORE_FILE names another store. Exit codes: the command's own; 75
busy, 76 lost, 64 bad call, 69 store unavailable. `lockkeeper man` has them all.";

/// Which store, and for whom the output is.
#[derive(Args, Debug)]
pub struct Common {
    /// The store, for instance sqlite:/srv/locks.db or redis://HOST [default: a file per user] [env: LOCKKEEPER_STORE]
    #[arg(long, value_name = "URL", value_parser = secret_url())]
    pub store: Option<SecretUrl>,
    /// A file with the URL of the store in it, so that no password is on the command line [env: LOCKKEEPER_STORE_FILE]
    #[arg(long, value_name = "FILE", conflicts_with = "store")]
    pub store_file: Option<PathBuf>,
    /// Write JSON, for machines
    #[arg(long)]
    pub json: bool,
}

impl Common {
    /// The store that was asked for, else the default one.
    pub fn url(&self) -> Result<Secret, Failure> {
        Ok(self.address()?.url)
    }

    /// The same, and where it was said.
    pub fn address(&self) -> Result<Address, Failure> {
        store::address(self.store.as_ref(), self.store_file.as_deref())
    }

    pub async fn open(&self) -> Result<Lockkeeper, Failure> {
        Ok(Lockkeeper::open(self.url()?.expose()).await?)
    }
}

/// The name of a lock, also one that begins with a dash.
#[derive(Args, Debug)]
pub struct Named {
    /// The name: any text of 1 to 512 bytes (448 for once, elect and cron); if it begins with a dash, --name=-x
    #[arg(value_parser = lock_name(), required_unless_present = "named", conflicts_with = "named")]
    name: Option<LockName>,
    #[arg(long = "name", id = "named", value_name = "NAME", value_parser = lock_name(), allow_hyphen_values = true, hide = true)]
    named: Option<LockName>,
}

impl Named {
    pub fn get(&self) -> &LockName {
        self.name.as_ref().or(self.named.as_ref()).expect("one of them is required")
    }
}

/// What a command sees of the store that its lock is in.
#[derive(Args, Debug)]
pub struct Inherited {
    /// Do not tell the command which store it is: no LOCKKEEPER_STORE and no LOCKKEEPER_STORE_FILE
    #[arg(long)]
    pub hide_store: bool,
}

/// What is asked for, and how.
#[derive(Args, Debug)]
pub struct Ask {
    #[command(flatten)]
    pub named: Named,
    /// Lock this too: all of them or none; may be repeated
    #[arg(long, value_name = "NAME", value_parser = lock_name(), allow_hyphen_values = true)]
    pub also: Vec<LockName>,
    /// How long our silence may last before others get the lock
    #[arg(long, value_name = "SPAN", default_value = "30s", value_parser = span::ttl, allow_hyphen_values = true)]
    pub ttl: Duration,
    /// Wait for at most this long, then exit 75 [default: for ever]
    #[arg(long, value_name = "SPAN", value_parser = span::wait, allow_hyphen_values = true)]
    pub wait: Option<Duration>,
    /// Do not wait: exit 75 if somebody else has it
    #[arg(long, conflicts_with = "wait")]
    pub skip: bool,
    /// Share the lock with other --shared holders
    #[arg(long, conflicts_with = "permits")]
    pub shared: bool,
    /// Be one of at most N holders
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000), allow_hyphen_values = true)]
    pub permits: Option<u32>,
    /// Keep the lock taken for at least this long, even if all is done sooner
    #[arg(long, value_name = "SPAN", value_parser = span::up_to_a_day, allow_hyphen_values = true)]
    pub min_hold: Option<Duration>,
    /// Let go after this long, whatever is still running
    #[arg(long, value_name = "SPAN", value_parser = span::long, allow_hyphen_values = true)]
    pub max_hold: Option<Duration>,
    /// Hold the lock back for this long after an unclean end (expiry, kill -9, break)
    #[arg(long, value_name = "SPAN", value_parser = span::up_to_a_day, allow_hyphen_values = true)]
    pub lock_delay: Option<Duration>,
    /// Twice would be harm: refuse a store that can forget a lock or a fence
    #[arg(long)]
    pub correctness: bool,
    /// What others see beside the host and the pid
    #[arg(long, value_name = "TEXT", value_parser = utf8("label"))]
    pub label: Option<String>,
}

impl Ask {
    pub fn name(&self) -> &LockName {
        self.named.get()
    }

    /// All names, the main one first.
    pub fn names(&self) -> impl Iterator<Item = &LockName> {
        std::iter::once(self.name()).chain(&self.also)
    }

    /// What can be wrong without asking a store: told before one is opened, so that nothing is written.
    pub fn check(&self) -> Result<(), Failure> {
        Names::new(self.names().cloned())?;
        Holder::new("", 0, self.label.clone())?;
        match (self.max_hold, self.min_hold) {
            (Some(max), Some(min)) if max < min => {
                let (max, min) = (span::show(max), span::show(min));
                Err(Failure::new(
                    Outcome::Invalid,
                    format!("--max-hold {max} is shorter than --min-hold {min}"),
                ))
            }
            _ => Ok(()),
        }
    }

    /// The lock request in the library's words. `label` is for one who gave none, `wait` is what is left of the wait.
    pub fn builder(&self, keeper: &Lockkeeper, label: Option<String>, wait: Option<Duration>) -> LockBuilder {
        let mut builder = keeper.lock_all(self.names()).ttl(self.ttl);
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
        if self.correctness {
            builder = builder.for_correctness();
        }
        match self.label.clone().or(label) {
            Some(label) => builder.label(label),
            None => builder,
        }
    }
}

/// A lock name; one that is not UTF-8 is told so, too.
pub fn lock_name() -> impl TypedValueParser<Value = LockName> {
    OsStringValueParser::new().try_map(|name: OsString| match name.to_str() {
        Some(name) => LockName::new(name).map_err(|e| e.to_string()),
        None => Err("the name is not UTF-8: names are printable text".into()),
    })
}

/// Any text, as long as it is UTF-8.
pub fn utf8(what: &'static str) -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new()
        .try_map(move |text: OsString| text.into_string().map_err(|_| format!("the {what} is not UTF-8")))
}

/// An address that may contain a password. Whatever is wrong with it, the text is not repeated: `clap` would repeat the
/// value of an argument that its parser refuses, so this parser refuses none, and [`SecretUrl::expose`] does.
#[derive(Clone, Debug)]
pub struct SecretUrl(Option<Secret>);

impl SecretUrl {
    /// The address, for the store that is opened with it.
    pub fn expose(&self) -> Result<&str, Failure> {
        let text = self.0.as_ref().map(Secret::expose);
        text.ok_or_else(|| Failure::new(Outcome::Invalid, "the store URL is not UTF-8"))
    }
}

/// Reads a [`SecretUrl`].
pub fn secret_url() -> impl TypedValueParser<Value = SecretUrl> {
    OsStringValueParser::new().map(|text: OsString| SecretUrl(text.into_string().ok().map(Secret::from)))
}

/// A fence: a whole number that a store could have given.
pub fn fence(text: &str) -> Result<Fence, String> {
    let number = text.parse().map_err(|_| "a fence is a number".to_owned())?;
    Fence::new(number).map_err(|e| e.to_string())
}
