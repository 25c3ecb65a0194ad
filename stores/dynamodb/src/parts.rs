//! Records as items. DynamoDB has room for 400 KB in an item and a record may have a megabyte, so the rest of a large value lies
//! in items of its own, which are written and read in one transaction with the first.

use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use lockkeeper_core::{Error, LockName, Record, Result, Version, Wall};

use crate::layout;
use crate::script::{Item, KEY, Op, REV, number, number_of};

/// How much of a value is in one item.
const PIECE: usize = 300_000;

/// The first item of a record, or what is left of one that was deleted: its version is never used again.
#[derive(Clone, Debug, Default)]
pub struct Head {
    /// Which write it is; `None`: there never was one.
    pub rev: Option<u64>,
    /// When it goes, in µs.
    ends_us: Option<u64>,
    /// How many more items there are.
    parts: usize,
    /// The beginning of the value; `None`: it was deleted.
    value: Option<Vec<u8>>,
}

fn bytes(item: &Item) -> Option<Vec<u8>> {
    Some(item.get("value")?.as_b().ok()?.clone().into_inner())
}

impl Head {
    pub fn read(item: Option<&Item>) -> Head {
        let Some(item) = item else { return Head::default() };
        Head {
            rev: number_of(item, REV),
            ends_us: number_of(item, "ends_us"),
            parts: number_of(item, "parts").and_then(|n| n.try_into().ok()).unwrap_or(0),
            value: bytes(item),
        }
    }

    /// Whether there is a record.
    pub fn lives(&self, wall: Wall) -> bool {
        self.value.is_some() && self.ends_us.is_none_or(|ends| wall.as_micros() < ends)
    }

    pub fn version(&self, wall: Wall) -> Option<Version> {
        self.rev.filter(|_| self.lives(wall)).map(Version)
    }

    /// The keys of all its items, if it has several.
    pub fn keys(&self, key: &LockName) -> Option<Vec<String>> {
        let parts = (1..=self.parts).map(|i| layout::part(key, i));
        (self.parts > 0).then(|| std::iter::once(layout::record(key)).chain(parts).collect())
    }

    /// The record, from its first item and the others. `None`: there is none.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if one of the others is missing. That is damage: a record that were called absent would be written over.
    pub fn record(self, key: &LockName, parts: &[Option<Item>]) -> Result<Option<Record>> {
        let (Some(mut value), Some(rev)) = (self.value, self.rev) else { return Ok(None) };
        for (i, part) in parts.iter().enumerate() {
            value.extend(part.as_ref().and_then(bytes).ok_or_else(|| {
                let missing = layout::part(key, i + 1);
                Error::Unsupported(format!(
                    "the record {key:?} is damaged: its item {missing:?} is missing. Write or delete it without a condition to mend it"
                ))
            })?);
        }
        Ok(Some(Record { key: key.clone(), value, version: Version(rev) }))
    }

    /// What writes this value over it, as write number `rev`.
    pub fn put(&self, key: &LockName, rev: u64, value: &[u8], ends_us: Option<u64>) -> Vec<Op> {
        let mut pieces = value.chunks(PIECE);
        let mut item = blank(layout::record(key));
        item.insert(REV.into(), number(rev));
        item.insert("value".into(), blob(pieces.next().unwrap_or_default()));
        let parts = pieces.len();
        if parts > 0 {
            item.insert("parts".into(), number(parts as u64));
        }
        if let Some(ends) = ends_us {
            item.insert("ends_us".into(), number(ends));
        }
        let mut ops = vec![Op::Put { item, over: self.rev }];
        ops.extend(pieces.enumerate().map(|(i, piece)| {
            let mut item = blank(layout::part(key, i + 1));
            item.insert("value".into(), blob(piece));
            Op::Lay(item)
        }));
        ops.extend((parts + 1..=self.parts).map(|i| Op::Clear(layout::part(key, i))));
        ops
    }

    /// What deletes it. Its last version stays.
    pub fn clear(&self, key: &LockName, rev: u64) -> Vec<Op> {
        let mut item = blank(layout::record(key));
        item.insert(REV.into(), number(rev));
        let mut ops = vec![Op::Put { item, over: self.rev }];
        ops.extend((1..=self.parts).map(|i| Op::Clear(layout::part(key, i))));
        ops
    }
}

fn blank(key: String) -> Item {
    Item::from([(KEY.to_owned(), AttributeValue::S(key))])
}

fn blob(bytes: &[u8]) -> AttributeValue {
    AttributeValue::B(Blob::new(bytes))
}
