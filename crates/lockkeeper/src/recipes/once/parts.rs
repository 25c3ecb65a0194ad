//! Results that are too large for one record: several, written before the page that tells of them.

use std::time::Duration;

use lockkeeper_core::{Error, Expect, Fence, LockName, Result, Write};

use super::page::Outcome;
use crate::recipes::cell::{Cell, Retry, Tries};

/// What follows the line of a page, at most: the page is read by everybody who asks.
const BESIDE: usize = 64 << 10;
/// What one part has.
const PART: usize = 768 << 10;
/// The largest result.
const MOST: usize = 64 << 20;

/// The fence and the number have a fixed length, so no two keys share a part; and each run has parts of its own, so a
/// runner that is late spoils nothing.
fn name(key: &str, fence: Fence, n: usize) -> Result<LockName> {
    LockName::new(format!("once-part/{:016}/{n:04}/{key}", fence.get()))
}

/// Writes what does not fit beside the page. Returns what the page has to say, and what follows it.
pub async fn scatter<'a>(
    cell: &Cell,
    key: &str,
    fence: Fence,
    ok: bool,
    bytes: &'a [u8],
    keep: Duration,
    retry: Retry<'_>,
) -> Result<(Outcome, &'a [u8])> {
    let size = bytes.len();
    if size <= BESIDE {
        return Ok((Outcome { ok, size, parts: 0, unkept: None }, bytes));
    }
    if size > MOST {
        return Err(Error::Limited(format!("a result may have {MOST} bytes, this one has {size}")));
    }
    let parts: Vec<&[u8]> = bytes.chunks(PART).collect();
    for (n, part) in parts.iter().enumerate() {
        // No other run writes these, so a write with an unknown outcome is written again.
        let mut tries = Tries::new(&cell.keeper, retry);
        loop {
            match cell.keeper.0.store.write(&name(key, fence, n)?, part, Expect::Any, Some(keep)).await {
                Ok(Write::Written(_)) => break,
                Err(error) => tries.after(error).await?,
                Ok(Write::Conflict(_)) => {
                    return Err(Error::Unknown("the store refused a write without a condition".into()));
                }
            }
        }
    }
    Ok((Outcome { ok, size, parts: parts.len(), unkept: None }, &[]))
}

/// Puts a result together. A page without its parts is damage, not an invitation to do it again.
pub async fn gather(cell: &Cell, key: &str, fence: Fence, done: &Outcome, body: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = body.to_vec();
    for n in 0..done.parts {
        let part = cell.keeper.0.store.read(&name(key, fence, n)?).await?;
        bytes.extend(part.map(|part| part.value).unwrap_or_default());
    }
    if bytes.len() != done.size {
        return Err(Error::Unavailable(format!(
            "the stored result of {key:?} has {} bytes and should have {}: look what was done, then delete the record once/{key}",
            bytes.len(),
            done.size
        )));
    }
    Ok(bytes)
}

/// Deletes the parts of a run whose result does not count. What is left goes with its ttl.
pub async fn sweep(cell: &Cell, key: &str, fence: Fence, parts: usize) {
    for name in (0..parts).filter_map(|n| name(key, fence, n).ok()) {
        let _ = cell.keeper.0.store.delete(&name, Expect::Any).await;
    }
}
