//! `lockkeeper watch`: prints the events of locks.

use clap::Args;
use futures_util::StreamExt;
use lockkeeper::{Event, EventKind};

use crate::args::{CommonArgs, utf8};
use crate::exit::{self, ExitFailure};
use crate::output;
use crate::signals::SignalStream;
use crate::text::{plain, rfc3339};

/// Print what happens to locks, one line per event, until Ctrl-C.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct WatchArgs {
    /// Only names that begin with this
    #[arg(default_value = "", hide_default_value = true, value_parser = utf8("prefix"))]
    pub prefix: String,
    #[command(flatten)]
    pub common: CommonArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper watch
  lockkeeper watch orders/ --json | jq -r 'select(.event == \"broken\") | .reason'

EventOutput: granted, released, expired, revoked, broken, waiting, left; missed: some were not seen.";

impl WatchArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let keeper = self.common.open().await?;
        let mut signals = SignalStream::ending()?;
        let mut events = keeper.watch(&self.prefix).await?;
        loop {
            tokio::select! {
                biased;
                signal = signals.next_ending() => return Ok(exit::by_signal(signal.as_raw())),
                event = events.next() => match event {
                    Some(event) => self.print(&event?)?,
                    None => return Ok(exit::OK),
                },
            }
        }
    }

    fn print(&self, event: &Event) -> Result<(), ExitFailure> {
        if self.common.json {
            let line = serde_json::to_string(event).expect("an event is plain data");
            return output::line(&line);
        }
        let name = plain(event.name.as_str());
        let mut line = format!("{}  {:<8}  {name}", rfc3339(event.at), event.kind.as_str());
        if let Some(fence) = event.kind.fence() {
            line += &format!("  fence {fence}");
        }
        if let Some(holder) = &event.holder {
            line += &format!("  {}", plain(&holder.to_string()));
        }
        if let EventKind::Broken { reason, .. } | EventKind::Revoked { reason, .. } = &event.kind {
            line += &format!("  because: {}", plain(reason));
        }
        output::line(&line)
    }
}
