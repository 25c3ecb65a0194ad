//! Records as items. An item has room for 400 KB and a record may have a megabyte, so a large value is stored in chunks: the first
//! in the record's item, the others in items of their own, written and read in one transaction with it.

use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use lockkeeper_core::{Error, LockName, Record, Result, Version, WallTime};

use crate::attributes::{AttributeMap, KEY, REV, number, number_of};
use crate::codec::{check_format, new_item};
use crate::keys;
use crate::statements::TableWrite;

/// How much of a value is in one item.
const CHUNK_BYTES: usize = 300_000;

/// The first item of a record, or the tombstone of a deleted record, which keeps its version from being used again.
#[derive(Clone, Debug, Default)]
pub struct RecordItem {
    /// The number of the last write; `None`: the item does not exist.
    pub revision: Option<u64>,
    /// When the record expires, in µs.
    ends_us: Option<u64>,
    /// The number of further chunks.
    chunks: usize,
    /// The first chunk of the value; `None`: the record was deleted.
    value: Option<Vec<u8>>,
}

fn bytes(item: &AttributeMap) -> Option<Vec<u8>> {
    Some(item.get("value")?.as_b().ok()?.clone().into_inner())
}

impl RecordItem {
    /// # Errors
    /// [`Error::Unsupported`] if another program or another version of the format wrote the item.
    pub fn decode(item: Option<&AttributeMap>) -> Result<RecordItem> {
        let Some(item) = item else { return Ok(RecordItem::default()) };
        check_format(item)?;
        Ok(RecordItem {
            revision: number_of(item, REV),
            ends_us: number_of(item, "ends_us"),
            chunks: number_of(item, "chunks").and_then(|n| n.try_into().ok()).unwrap_or(0),
            value: bytes(item),
        })
    }

    /// Whether the record exists: it was neither deleted nor has it expired.
    pub fn exists(&self, wall: WallTime) -> bool {
        self.value.is_some() && self.ends_us.is_none_or(|ends| wall.as_micros() < ends)
    }

    pub fn version(&self, wall: WallTime) -> Option<Version> {
        self.revision.filter(|_| self.exists(wall)).map(Version)
    }

    /// The keys of all items of the record, if it has several.
    pub fn all_keys(&self, key: &LockName) -> Option<Vec<String>> {
        let chunks = (1..=self.chunks).map(|i| keys::chunk(key, i));
        (self.chunks > 0).then(|| std::iter::once(keys::record(key)).chain(chunks).collect())
    }

    /// The record, from its first item and the further chunks. `None`: it was deleted.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a chunk is missing: the record is damaged. If it were reported as absent, a writer would replace it.
    pub fn into_record(self, key: &LockName, chunks: &[Option<AttributeMap>]) -> Result<Option<Record>> {
        let (Some(mut value), Some(revision)) = (self.value, self.revision) else { return Ok(None) };
        for (i, chunk) in chunks.iter().enumerate() {
            value.extend(chunk.as_ref().and_then(bytes).ok_or_else(|| {
                let missing = keys::chunk(key, i + 1);
                Error::Unsupported(format!(
                    "the record {key:?} is damaged: its item {missing:?} is missing. Write or delete the record without a \
                     condition to repair it"
                ))
            })?);
        }
        Ok(Some(Record { key: key.clone(), value, version: Version(revision) }))
    }

    /// The writes that replace the record by this value, as write number `revision`.
    pub fn put(&self, key: &LockName, revision: u64, value: &[u8], ends_us: Option<u64>) -> Vec<TableWrite> {
        let mut values = value.chunks(CHUNK_BYTES);
        let mut item = new_item(keys::record(key), revision);
        item.insert("value".into(), blob(values.next().unwrap_or_default()));
        let chunks = values.len();
        if chunks > 0 {
            item.insert("chunks".into(), number(chunks as u64));
        }
        if let Some(ends) = ends_us {
            item.insert("ends_us".into(), number(ends));
        }
        let mut writes = vec![TableWrite::Put { item, over: self.revision }];
        writes.extend(values.enumerate().map(|(i, value)| {
            TableWrite::PutChunk(AttributeMap::from([
                (KEY.to_owned(), AttributeValue::S(keys::chunk(key, i + 1))),
                ("value".to_owned(), blob(value)),
            ]))
        }));
        writes.extend((chunks + 1..=self.chunks).map(|i| TableWrite::DeleteChunk(keys::chunk(key, i))));
        writes
    }

    /// The writes that delete the record and leave its tombstone.
    pub fn delete(&self, key: &LockName, revision: u64) -> Vec<TableWrite> {
        let tombstone = new_item(keys::record(key), revision);
        let mut writes = vec![TableWrite::Put { item: tombstone, over: self.revision }];
        writes.extend((1..=self.chunks).map(|i| TableWrite::DeleteChunk(keys::chunk(key, i))));
        writes
    }
}

fn blob(bytes: &[u8]) -> AttributeValue {
    AttributeValue::B(Blob::new(bytes))
}
