//! Values that are too large for one record: they are split into chunks, which are written before the
//! record that refers to them.

use std::time::Duration;

use lockkeeper_core::{Error, Expect, Fence, LockName, Result, WriteOutcome};

use super::cas_record::{CasRecord, Retry, Tries};

/// The largest value inside the record itself, which every caller reads.
const INLINE_BYTES: usize = 64 << 10;
/// The bytes of one chunk.
const CHUNK_BYTES: usize = 768 << 10;
/// The bytes of the largest value.
pub(crate) const CHUNKED_BYTES_MAX: usize = 64 << 20;

/// The chunks of one value. Each value has chunks of its own, because their names have its fence: a late
/// writer overwrites none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunks<'a> {
    /// The record that refers to the chunks.
    pub cas_record: &'a CasRecord,
    /// The beginning of the names of this recipe's chunks.
    pub prefix: &'static str,
    pub key: &'a str,
    pub fence: Fence,
}

impl Chunks<'_> {
    /// The name of a chunk. The fence and the number have a fixed length, so no two keys share a chunk.
    fn name(&self, n: usize) -> Result<LockName> {
        LockName::new(format!("{}/{:016}/{n:04}/{}", self.prefix, self.fence.get(), self.key))
    }

    /// Writes a value that is too large for the record as chunks. Returns their number, and the bytes that
    /// belong into the record itself.
    pub async fn write<'b>(
        &self,
        bytes: &'b [u8],
        keep: Duration,
        retry: Retry<'_>,
    ) -> Result<(usize, &'b [u8])> {
        let size = bytes.len();
        if size <= INLINE_BYTES {
            return Ok((0, bytes));
        }
        if size > CHUNKED_BYTES_MAX {
            return Err(Error::Limited(format!(
                "a result may have {CHUNKED_BYTES_MAX} bytes, this one has {size}"
            )));
        }
        let chunks: Vec<&[u8]> = bytes.chunks(CHUNK_BYTES).collect();
        for (n, chunk) in chunks.iter().enumerate() {
            // No other writer writes these chunks, so a write with an unknown outcome is simply repeated.
            let mut tries = Tries::new(&self.cas_record.keeper, retry);
            loop {
                let store = &self.cas_record.keeper.0.store;
                match store.write(&self.name(n)?, chunk, Expect::Any, Some(keep)).await {
                    Ok(WriteOutcome::Written(_)) => break,
                    Err(error) => tries.after(error).await?,
                    Ok(WriteOutcome::Conflict(_)) => {
                        return Err(Error::Unknown("the store refused a write without a condition".into()));
                    }
                }
            }
        }
        Ok((chunks.len(), &[]))
    }

    /// The bytes in the record, and after them those of the chunks. A chunk that is missing has no bytes:
    /// compare the length.
    pub async fn read(&self, count: usize, inline: &[u8]) -> Result<Vec<u8>> {
        let mut bytes = inline.to_vec();
        for n in 0..count {
            let chunk = self.cas_record.keeper.0.store.read(&self.name(n)?).await?;
            bytes.extend(chunk.map(|chunk| chunk.value).unwrap_or_default());
        }
        Ok(bytes)
    }

    /// Deletes the chunks of a value that does not count. Chunks that cannot be deleted end with their ttl.
    pub async fn delete(&self, count: usize) {
        for name in (0..count).filter_map(|n| self.name(n).ok()) {
            let _ = self.cas_record.keeper.0.store.delete(&name, Expect::Any).await;
        }
    }
}
