use std::io::Read;
use std::time::Duration;

use clap::{Args, Subcommand};
use futures_util::StreamExt;
use lockkeeper::{Entry, Fence, LockName, Outcome, Page, Swap, VALUE_BYTES};
use serde_json::{Value, json};

use crate::args::{Common, lock_name, utf8};
use crate::exit::{self, ABSENT, Failure, OK};
use crate::output::{self, bold};
use crate::signals::Signals;
use crate::span;
use crate::text::{columns, cut, plain, quoted};

/// Keep small values that many change: read, write, compare and set, watch.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, arg_required_else_help = true, subcommand_required = true)]
pub struct Record {
    #[command(subcommand)]
    pub what: What,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper record set release/current v17
  lockkeeper record get release/current
  lockkeeper record cas release/current v18 --fence 1794775452413713   only if nobody changed it
  lockkeeper record cas leader me --absent                             only if there is none
  lockkeeper record set config --stdin < config.json

Every write has a fence that is higher than that of every write before. Exit codes: 1 there is no
such record, 65 it was changed by others, 64 bad call, 78 the store has no records.";

#[derive(Debug, Subcommand)]
pub enum What {
    /// Print a value
    Get(Get),
    /// Write a value, whatever is there
    Set(Set),
    /// Write a value only over the one that was seen
    Cas(Cas),
    /// Delete a value
    Rm(Rm),
    /// List values
    Ls(Ls),
    /// Print a value and then every change, until Ctrl-C
    Watch(Watch),
}

/// Which record, and where.
#[derive(Args, Debug)]
pub struct Key {
    /// Which record: any text of 1 to 512 bytes
    #[arg(value_parser = lock_name())]
    pub key: LockName,
    #[command(flatten)]
    pub common: Common,
}

/// What to write.
#[derive(Args, Debug)]
pub struct New {
    /// The new value, as text
    #[arg(value_parser = utf8("value"), required_unless_present = "stdin", conflicts_with = "stdin")]
    pub value: Option<String>,
    /// Read the new value from stdin, byte for byte; at most 1 MiB less 2 KiB
    #[arg(long)]
    pub stdin: bool,
    /// The value is gone this long after it was written [default: it stays]
    #[arg(long, value_name = "SPAN", value_parser = span::long, allow_hyphen_values = true)]
    pub ttl: Option<Duration>,
}

#[derive(Args, Debug)]
pub struct Get {
    #[command(flatten)]
    pub key: Key,
}

#[derive(Args, Debug)]
pub struct Set {
    #[command(flatten)]
    pub key: Key,
    #[command(flatten)]
    pub new: New,
}

#[derive(Args, Debug)]
pub struct Cas {
    #[command(flatten)]
    pub key: Key,
    #[command(flatten)]
    pub new: New,
    /// Only over the write with this fence
    #[arg(long, value_name = "N", value_parser = fence, required_unless_present = "absent")]
    pub fence: Option<Fence>,
    /// Only if there is no value
    #[arg(long, conflicts_with = "fence")]
    pub absent: bool,
}

#[derive(Args, Debug)]
pub struct Rm {
    #[command(flatten)]
    pub key: Key,
    /// Only if the newest write has this fence
    #[arg(long, value_name = "N", value_parser = fence)]
    pub fence: Option<Fence>,
}

#[derive(Args, Debug)]
pub struct Ls {
    /// Only keys that begin with this
    #[arg(default_value = "", hide_default_value = true, value_parser = utf8("prefix"))]
    pub prefix: String,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Args, Debug)]
pub struct Watch {
    #[command(flatten)]
    pub key: Key,
    /// How often to look, give or take a quarter
    #[arg(long, value_name = "SPAN", default_value = "500ms", value_parser = span::ttl, allow_hyphen_values = true)]
    pub poll: Duration,
}

fn fence(text: &str) -> Result<Fence, String> {
    let number = text.parse().map_err(|_| "a fence is a number".to_owned())?;
    Fence::new(number).map_err(|e| e.to_string())
}

impl Record {
    pub fn json(&self) -> bool {
        match &self.what {
            What::Get(get) => get.key.common.json,
            What::Set(set) => set.key.common.json,
            What::Cas(cas) => cas.key.common.json,
            What::Rm(rm) => rm.key.common.json,
            What::Ls(ls) => ls.common.json,
            What::Watch(watch) => watch.key.common.json,
        }
    }

    pub async fn go(self) -> Result<i32, Failure> {
        match self.what {
            What::Get(get) => get.go().await,
            What::Set(set) => set.go().await,
            What::Cas(cas) => cas.go().await,
            What::Rm(rm) => rm.go().await,
            What::Ls(ls) => ls.go().await,
            What::Watch(watch) => watch.go().await,
        }
    }
}

impl Key {
    fn absent(&self) -> Failure {
        Failure::new(Outcome::Done, format!("there is no record {}", quoted(self.key.as_str())))
            .with_code(ABSENT)
    }

    fn changed(&self, found: &Entry<Vec<u8>>) -> Failure {
        let message =
            format!("{} was changed by others: its fence is {} now", quoted(self.key.as_str()), found.fence);
        Failure::new(Outcome::Stale, message)
            .next(format!("look at it, then try with --fence {}", found.fence))
    }

    fn told(&self, word: &str, fence: Fence) -> Result<i32, Failure> {
        output::line(&match self.common.json {
            true => json!({ "key": self.key, "fence": fence }).to_string(),
            false => format!("{word} {}, fence {fence}", quoted(self.key.as_str())),
        })?;
        Ok(OK)
    }
}

impl New {
    /// The bytes, read before any store is opened.
    fn bytes(&self) -> Result<Vec<u8>, Failure> {
        let Some(value) = &self.value else {
            let mut bytes = Vec::new();
            let read = std::io::stdin().lock().take(VALUE_BYTES as u64 + 1).read_to_end(&mut bytes);
            read.map_err(|e| Failure::new(Outcome::Invalid, format!("stdin cannot be read: {e}")))?;
            return fits(bytes);
        };
        fits(value.clone().into_bytes())
    }
}

fn fits(bytes: Vec<u8>) -> Result<Vec<u8>, Failure> {
    if bytes.len() > VALUE_BYTES {
        let message = format!("a value may have {VALUE_BYTES} bytes, and this one has more");
        return Err(
            Failure::new(Outcome::Limited, message).next("keep it elsewhere, and its address in the record")
        );
    }
    Ok(bytes)
}

impl Get {
    async fn go(self) -> Result<i32, Failure> {
        let keeper = self.key.common.open().await?;
        let Some(entry) = keeper.register_bytes(&self.key.key).read().await? else {
            return Err(self.key.absent());
        };
        match self.key.common.json {
            true => output::line(&shown(&self.key.key, Some(&entry)).to_string())?,
            false => output::bytes(&entry.value)?,
        }
        Ok(OK)
    }
}

impl Set {
    async fn go(self) -> Result<i32, Failure> {
        let bytes = self.new.bytes()?;
        let keeper = self.key.common.open().await?;
        let mut register = keeper.register_bytes(&self.key.key);
        if let Some(ttl) = self.new.ttl {
            register = register.ttl(ttl);
        }
        let done = register.update(|_| bytes.clone()).await?;
        self.key.told("written", done.fence)
    }
}

impl Cas {
    async fn go(self) -> Result<i32, Failure> {
        let bytes = self.new.bytes()?;
        let keeper = self.key.common.open().await?;
        let mut register = keeper.register_bytes(&self.key.key);
        if let Some(ttl) = self.new.ttl {
            register = register.ttl(ttl);
        }
        match register.compare_and_set(self.fence, &bytes).await? {
            Swap::Swapped(fence) => self.key.told("written", fence),
            Swap::Conflict(Some(found)) => Err(self.key.changed(&found)),
            Swap::Conflict(None) => Err(self.key.absent()),
        }
    }
}

impl Rm {
    async fn go(self) -> Result<i32, Failure> {
        let keeper = self.key.common.open().await?;
        match keeper.register_bytes(&self.key.key).remove(self.fence).await? {
            Swap::Swapped(fence) => self.key.told("deleted", fence),
            Swap::Conflict(Some(found)) => Err(self.key.changed(&found)),
            Swap::Conflict(None) => Err(self.key.absent()),
        }
    }
}

impl Ls {
    async fn go(self) -> Result<i32, Failure> {
        let keeper = self.common.open().await?;
        let (mut all, mut next) = keeper.registers(&self.prefix, &Page::FIRST).await?;
        while let Some(after) = next {
            let (more, then) = keeper.registers(&self.prefix, &Page::after(after)).await?;
            all.extend(more);
            next = then;
        }
        if self.common.json {
            let records: Vec<Value> = all.iter().map(|(key, entry)| shown(key, Some(entry))).collect();
            output::line(&json!({ "records": records }).to_string())?;
        } else if !all.is_empty() {
            let mut rows = vec![["KEY", "FENCE", "BYTES", "VALUE"].map(String::from).to_vec()];
            rows.extend(all.iter().map(|(key, entry)| row(key, entry)));
            for (i, line) in columns(&rows).iter().enumerate() {
                output::line(&if i == 0 { bold(line) } else { line.clone() })?;
            }
        }
        Ok(OK)
    }
}

fn row(key: &LockName, entry: &Entry<Vec<u8>>) -> Vec<String> {
    let first = entry.value.split(|b| *b == b'\n').next().unwrap_or_default();
    // A glance is enough: a value may be long, or no text at all.
    let glance = plain(&String::from_utf8_lossy(&first[..first.len().min(200)])).into_owned();
    vec![
        plain(key.as_str()).into_owned(),
        entry.fence.to_string(),
        entry.value.len().to_string(),
        cut(&glance, 40),
    ]
}

impl Watch {
    async fn go(self) -> Result<i32, Failure> {
        let mut signals = Signals::ending()?;
        let keeper = self.key.common.open().await?;
        let mut changes = keeper.register_bytes(&self.key.key).poll(self.poll).watch();
        loop {
            tokio::select! {
                biased;
                signal = signals.end() => return Ok(exit::by_signal(signal.as_raw())),
                change = changes.next() => match change {
                    Some(change) => self.print(change?.as_ref())?,
                    None => return Ok(OK),
                },
            }
        }
    }

    fn print(&self, entry: Option<&Entry<Vec<u8>>>) -> Result<(), Failure> {
        if self.key.common.json {
            return output::line(&shown(&self.key.key, entry).to_string());
        }
        output::line(&match entry {
            Some(entry) => {
                format!("fence {}  {}", entry.fence, plain(&String::from_utf8_lossy(&entry.value)))
            }
            None => "there is none".into(),
        })
    }
}

/// A record for machines. Bytes that are no text are given in hex.
fn shown(key: &LockName, entry: Option<&Entry<Vec<u8>>>) -> Value {
    let Some(entry) = entry else { return json!({ "key": key, "fence": null }) };
    match std::str::from_utf8(&entry.value) {
        Ok(text) => json!({ "key": key, "fence": entry.fence, "value": text }),
        Err(_) => {
            let hex: String = entry.value.iter().map(|byte| format!("{byte:02x}")).collect();
            json!({ "key": key, "fence": entry.fence, "value_hex": hex })
        }
    }
}
