//! The stored result of a run: inside the record if it is small, else in chunks.

use std::time::Duration;

use lockkeeper_core::{Error, Fence, Result};

use super::record::RunOutcome;
use crate::recipes::cas_record::{CasRecord, Retry};
use crate::recipes::chunks::Chunks;

fn chunks<'a>(cas_record: &'a CasRecord, key: &'a str, fence: Fence) -> Chunks<'a> {
    Chunks { cas_record, prefix: "once-part", key, fence }
}

/// Writes a result that is too large for the record as chunks. Returns the outcome for the record, and the
/// bytes that follow it.
pub async fn write_result<'a>(
    cas_record: &CasRecord,
    key: &str,
    fence: Fence,
    ok: bool,
    bytes: &'a [u8],
    keep: Duration,
    retry: Retry<'_>,
) -> Result<(RunOutcome, &'a [u8])> {
    let (parts, body) = chunks(cas_record, key, fence).write(bytes, keep, retry).await?;
    Ok((RunOutcome { ok, size: bytes.len(), parts, unkept: None }, body))
}

/// Reads a result. A record without its chunks is an error, and no reason to do the work again.
pub async fn read_result(
    cas_record: &CasRecord,
    key: &str,
    fence: Fence,
    done: &RunOutcome,
    body: &[u8],
) -> Result<Vec<u8>> {
    let bytes = chunks(cas_record, key, fence).read(done.parts, body).await?;
    if bytes.len() != done.size {
        return Err(Error::Unavailable(format!(
            "the stored result of {key:?} has {} bytes and should have {}: find out what was done, then delete the record once/{key}",
            bytes.len(),
            done.size
        )));
    }
    Ok(bytes)
}

/// Deletes the chunks of a run whose result does not count.
pub async fn delete_result(cas_record: &CasRecord, key: &str, fence: Fence, parts: usize) {
    chunks(cas_record, key, fence).delete(parts).await;
}
