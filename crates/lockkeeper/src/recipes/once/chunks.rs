//! Results that are too large for one record: they are split into chunks, which are written before the
//! record that refers to them.

use std::time::Duration;

use lockkeeper_core::{Error, Expect, Fence, LockName, Result, WriteOutcome};

use super::record::RunOutcome;
use crate::recipes::cas_record::{CasRecord, Retry, Tries};

/// The largest result inside the record itself, which every caller reads.
const INLINE_BYTES: usize = 64 << 10;
/// The bytes of one chunk.
const CHUNK_BYTES: usize = 768 << 10;
/// The bytes of the largest result.
const RESULT_BYTES_MAX: usize = 64 << 20;

/// The name of a chunk. The fence and the number have a fixed length, so no two keys share a chunk; and
/// each run has chunks of its own, so a late runner overwrites none.
fn name(key: &str, fence: Fence, n: usize) -> Result<LockName> {
    LockName::new(format!("once-part/{:016}/{n:04}/{key}", fence.get()))
}

/// Writes a result that is too large for the record as chunks. Returns the outcome for the record, and the
/// bytes that follow it.
pub async fn write_chunks<'a>(
    cas_record: &CasRecord,
    key: &str,
    fence: Fence,
    ok: bool,
    bytes: &'a [u8],
    keep: Duration,
    retry: Retry<'_>,
) -> Result<(RunOutcome, &'a [u8])> {
    let size = bytes.len();
    if size <= INLINE_BYTES {
        return Ok((RunOutcome { ok, size, parts: 0, unkept: None }, bytes));
    }
    if size > RESULT_BYTES_MAX {
        return Err(Error::Limited(format!(
            "a result may have {RESULT_BYTES_MAX} bytes, this one has {size}"
        )));
    }
    let parts: Vec<&[u8]> = bytes.chunks(CHUNK_BYTES).collect();
    for (n, part) in parts.iter().enumerate() {
        // No other run writes these chunks, so a write with an unknown outcome is simply repeated.
        let mut tries = Tries::new(&cas_record.keeper, retry);
        loop {
            match cas_record.keeper.0.store.write(&name(key, fence, n)?, part, Expect::Any, Some(keep)).await
            {
                Ok(WriteOutcome::Written(_)) => break,
                Err(error) => tries.after(error).await?,
                Ok(WriteOutcome::Conflict(_)) => {
                    return Err(Error::Unknown("the store refused a write without a condition".into()));
                }
            }
        }
    }
    Ok((RunOutcome { ok, size, parts: parts.len(), unkept: None }, &[]))
}

/// Reads a result. A record without its chunks is an error, and no reason to do the work again.
pub async fn read_chunks(
    cas_record: &CasRecord,
    key: &str,
    fence: Fence,
    done: &RunOutcome,
    body: &[u8],
) -> Result<Vec<u8>> {
    let mut bytes = body.to_vec();
    for n in 0..done.parts {
        let part = cas_record.keeper.0.store.read(&name(key, fence, n)?).await?;
        bytes.extend(part.map(|part| part.value).unwrap_or_default());
    }
    if bytes.len() != done.size {
        return Err(Error::Unavailable(format!(
            "the stored result of {key:?} has {} bytes and should have {}: find out what was done, then delete the record once/{key}",
            bytes.len(),
            done.size
        )));
    }
    Ok(bytes)
}

/// Deletes the chunks of a run whose result does not count. Chunks that cannot be deleted end with their
/// ttl.
pub async fn delete_chunks(cas_record: &CasRecord, key: &str, fence: Fence, parts: usize) {
    for name in (0..parts).filter_map(|n| name(key, fence, n).ok()) {
        let _ = cas_record.keeper.0.store.delete(&name, Expect::Any).await;
    }
}
