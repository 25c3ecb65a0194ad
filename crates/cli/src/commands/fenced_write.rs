//! `lockkeeper fenced-write`: replaces a file, unless a newer fence has written it.

use std::path::PathBuf;

use clap::Args;
use lockkeeper::{Error, Fence, Outcome};
use lockkeeper_fenced::file::FencedFile;
use serde_json::json;

use crate::args::fence;
use crate::exit::{ExitFailure, OK};
use crate::output;
use crate::text::quoted;

/// Replace a file by standard input, unless a holder with a newer fence (fencing token) has written it.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct FencedWriteArgs {
    /// The file to replace; it need not exist
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// The fence to write with; `lockkeeper run` sets LOCKKEEPER_FENCE for its command
    #[arg(long, value_name = "N", env = "LOCKKEEPER_FENCE", value_parser = fence)]
    pub fence: Fence,
    /// Write JSON, for machines
    #[arg(long)]
    pub json: bool,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper run report -- sh -c './make-report > new && lockkeeper fenced-write report.csv < new'

A producer that fails in a pipe looks like one that ends early: let it finish before the file is
handed over, as above. Nothing is printed when all is well. Exit codes: 65 a newer fence was
seen, the file is as it was; 64 bad call; 69, 72, 77 it could not be written, the file is as it
was; 74 it is written, and may be gone after a power cut.";

impl FencedWriteArgs {
    pub fn execute(self) -> Result<i32, ExitFailure> {
        let file = FencedFile::new(&self.file);
        let bytes = file.write_from(self.fence, std::io::stdin().lock()).map_err(|e| self.failed(e))?;
        if self.json {
            let done =
                json!({ "file": self.file.to_string_lossy(), "fence": self.fence.get(), "bytes": bytes });
            output::line(&done.to_string())?;
        }
        Ok(OK)
    }

    fn failed(&self, error: Error) -> ExitFailure {
        let file = quoted(&self.file.to_string_lossy());
        let failure = ExitFailure::new(error.outcome(), error.to_string());
        match error {
            Error::Stale { .. } => {
                ExitFailure::new(error.outcome(), format!("{file} is not written: {error}"))
                    .next("another holder has the lock by now: stop, and do not try again with this fence")
            }
            Error::Unknown(_) => failure.next("write it again with the same fence"),
            _ if error.outcome() == Outcome::Unavailable => failure.next("the file is as it was; try again"),
            _ => failure,
        }
    }
}
