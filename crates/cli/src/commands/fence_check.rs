//! `lockkeeper fence check`: asks the store whether a grant still holds.

use clap::Args;
use lockkeeper::{Mode, Sequencer};
use serde_json::json;

use crate::args::{CommonArgs, utf8};
use crate::exit::{ExitFailure, OK};
use crate::output;
use crate::text::quoted;

/// Ask the store whether the grant of a sequencer still holds.
#[derive(Args, Debug)]
#[command(after_help = CODES)]
pub struct FenceCheckArgs {
    /// The value of LOCKKEEPER_SEQUENCER, or `guard.sequencer()`
    #[arg(value_parser = utf8("sequencer"))]
    pub sequencer: String,
    #[command(flatten)]
    pub common: CommonArgs,
}

const CODES: &str = "\
Exit codes: 0 the grant holds, 65 another holder has a newer fence, 76 no process holds the lock, 64
this is no sequencer, 69 the store is unreachable, so the answer is unknown.";

impl FenceCheckArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        // Malformed text is reported before a store is opened.
        let sequencer: Sequencer = self.sequencer.parse()?;
        self.common.open().await?.check(&sequencer).await?;
        let (names, fence) = (sequencer.names(), sequencer.fence());
        output::line(&match self.common.json {
            true => {
                let names = names.as_slice();
                json!({ "names": names, "mode": sequencer.mode(), "fence": fence, "holds": true }).to_string()
            }
            false => {
                format!("{} is held{} with fence {fence}", quoted(&names.to_string()), how(sequencer.mode()))
            }
        })?;
        Ok(OK)
    }
}

fn how(mode: Mode) -> String {
    match mode {
        Mode::Exclusive => String::new(),
        Mode::Shared => " (shared)".into(),
        Mode::Permit(n) => format!(" (one of {n})"),
    }
}
