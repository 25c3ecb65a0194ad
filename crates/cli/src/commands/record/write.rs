//! `lockkeeper record set`, `cas` and `rm`: writes and deletes records.

use std::io::Read;
use std::time::Duration;

use clap::Args;
use lockkeeper::register::{Swap, VALUE_BYTES};
use lockkeeper::{Fence, Outcome};

use super::RecordKeyArgs;
use crate::args::{fence, utf8};
use crate::duration;
use crate::exit::ExitFailure;

/// The value to write.
#[derive(Args, Debug)]
pub struct NewValueArgs {
    /// The new value, as text
    #[arg(value_parser = utf8("value"), required_unless_present = "stdin", conflicts_with = "stdin")]
    pub value: Option<String>,
    /// Read the new value from stdin, byte for byte; at most 1 MiB less 2 KiB
    #[arg(long)]
    pub stdin: bool,
    /// The value is gone this long after it was written [default: it stays]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_long, allow_hyphen_values = true)]
    pub ttl: Option<Duration>,
}

#[derive(Args, Debug)]
pub struct RecordSetArgs {
    #[command(flatten)]
    pub key: RecordKeyArgs,
    #[command(flatten)]
    pub new: NewValueArgs,
}

#[derive(Args, Debug)]
pub struct RecordCasArgs {
    #[command(flatten)]
    pub key: RecordKeyArgs,
    #[command(flatten)]
    pub new: NewValueArgs,
    /// Only over the write with this fence
    #[arg(long, value_name = "N", value_parser = fence, required_unless_present = "absent")]
    pub fence: Option<Fence>,
    /// Only if there is no value
    #[arg(long, conflicts_with = "fence")]
    pub absent: bool,
}

#[derive(Args, Debug)]
pub struct RecordRmArgs {
    #[command(flatten)]
    pub key: RecordKeyArgs,
    /// Only if the newest write has this fence
    #[arg(long, value_name = "N", value_parser = fence)]
    pub fence: Option<Fence>,
}

impl NewValueArgs {
    /// The bytes, read before any store is opened.
    fn bytes(&self) -> Result<Vec<u8>, ExitFailure> {
        let Some(value) = &self.value else {
            let mut bytes = Vec::new();
            let read = std::io::stdin().lock().take(VALUE_BYTES as u64 + 1).read_to_end(&mut bytes);
            read.map_err(|e| ExitFailure::new(Outcome::Invalid, format!("stdin cannot be read: {e}")))?;
            return fits(bytes);
        };
        fits(value.clone().into_bytes())
    }
}

fn fits(bytes: Vec<u8>) -> Result<Vec<u8>, ExitFailure> {
    if bytes.len() > VALUE_BYTES {
        let message = format!("a value may have {VALUE_BYTES} bytes, and this one has more");
        return Err(ExitFailure::new(Outcome::Limited, message)
            .next("keep it elsewhere, and its address in the record"));
    }
    Ok(bytes)
}

impl RecordSetArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let bytes = self.new.bytes()?;
        let keeper = self.key.common.open().await?;
        let mut register = keeper.register_bytes(&self.key.key);
        if let Some(ttl) = self.new.ttl {
            register = register.ttl(ttl);
        }
        let done = register.update(|_| bytes.clone()).await?;
        self.key.print_done("written", done.fence)
    }
}

impl RecordCasArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let bytes = self.new.bytes()?;
        let keeper = self.key.common.open().await?;
        let mut register = keeper.register_bytes(&self.key.key);
        if let Some(ttl) = self.new.ttl {
            register = register.ttl(ttl);
        }
        match register.compare_and_set(self.fence, &bytes).await? {
            Swap::Swapped(fence) => self.key.print_done("written", fence),
            Swap::Conflict(Some(found)) => Err(self.key.changed(&found)),
            Swap::Conflict(None) => Err(self.key.absent()),
        }
    }
}

impl RecordRmArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let keeper = self.key.common.open().await?;
        match keeper.register_bytes(&self.key.key).remove(self.fence).await? {
            Swap::Swapped(fence) => self.key.print_done("deleted", fence),
            Swap::Conflict(Some(found)) => Err(self.key.changed(&found)),
            Swap::Conflict(None) => Err(self.key.absent()),
        }
    }
}
