//! `lockkeeper record get`, `ls` and `watch`: reads records.

use std::time::Duration;

use clap::Args;
use futures_util::StreamExt;
use lockkeeper::register::Entry;
use lockkeeper::{LockName, Page};
use serde_json::{Value, json};

use super::RecordKeyArgs;
use crate::args::{CommonArgs, utf8};
use crate::duration;
use crate::exit::{self, ExitFailure, OK};
use crate::output::{self, bold};
use crate::signals::SignalStream;
use crate::text::{columns, cut, plain};

#[derive(Args, Debug)]
pub struct RecordGetArgs {
    #[command(flatten)]
    pub key: RecordKeyArgs,
}

#[derive(Args, Debug)]
pub struct RecordLsArgs {
    /// Only keys that begin with this
    #[arg(default_value = "", hide_default_value = true, value_parser = utf8("prefix"))]
    pub prefix: String,
    #[command(flatten)]
    pub common: CommonArgs,
}

#[derive(Args, Debug)]
pub struct RecordWatchArgs {
    #[command(flatten)]
    pub key: RecordKeyArgs,
    /// How often to look, give or take a quarter
    #[arg(long, value_name = "DURATION", default_value = "500ms", value_parser = duration::parse_ttl, allow_hyphen_values = true)]
    pub poll: Duration,
}

impl RecordGetArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
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

impl RecordLsArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
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

impl RecordWatchArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let keeper = self.key.common.open().await?;
        let mut signals = SignalStream::ending()?;
        let mut changes = keeper.register_bytes(&self.key.key).poll(self.poll).watch();
        loop {
            tokio::select! {
                biased;
                signal = signals.next_ending() => return Ok(exit::by_signal(signal.as_raw())),
                change = changes.next() => match change {
                    Some(change) => self.print(change?.as_ref())?,
                    None => return Ok(OK),
                },
            }
        }
    }

    fn print(&self, entry: Option<&Entry<Vec<u8>>>) -> Result<(), ExitFailure> {
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
