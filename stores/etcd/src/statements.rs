//! The comparisons and operations that the store's transactions consist of.

use crate::codec::encode_base;
use crate::keys::Keys;
use crate::proto::{
    Against, Compare, DeleteRequest, Kv, OpRequest, PutRequest, RangeRequest, RangeResponse, RequestOp,
    Response, ResponseOp, TxnRequest, TxnResponse,
};

const EQUAL: i32 = 0;
const LESS: i32 = 2;

fn compare(result: i32, key: &[u8], range_end: &[u8], against: Against) -> Compare {
    let target = match against {
        Against::Created(_) => 1,
        Against::Modified(_) => 2,
        Against::Value(_) => 3,
    };
    Compare { result, target, key: key.into(), against: Some(against), range_end: range_end.into() }
}

/// The key was created at this revision. Zero: it does not exist.
pub fn created_at(key: &[u8], revision: i64) -> Compare {
    compare(EQUAL, key, b"", Against::Created(revision))
}

/// The key was last written at this revision. Zero: it does not exist.
pub fn modified_at(key: &[u8], revision: i64) -> Compare {
    compare(EQUAL, key, b"", Against::Modified(revision))
}

/// The key has this value.
pub fn value_is(key: &[u8], value: &[u8]) -> Compare {
    compare(EQUAL, key, b"", Against::Value(value.into()))
}

/// The fence base has this value.
pub fn base_unchanged(keys: &Keys, base: u64) -> Compare {
    value_is(&keys.fence_base(), &encode_base(base))
}

/// No key has this prefix.
pub fn no_keys(prefix: &[u8]) -> Compare {
    compare(EQUAL, prefix, &range_end_of(prefix), Against::Created(0))
}

/// No key with this prefix was written after `revision`. Deletions are not noticed.
pub fn unmodified_since(prefix: &[u8], revision: i64) -> Compare {
    compare(LESS, prefix, &range_end_of(prefix), Against::Modified(revision + 1))
}

pub fn put(key: &[u8], value: Vec<u8>, lease: i64) -> RequestOp {
    op(OpRequest::Put(PutRequest { key: key.into(), value, lease }))
}

pub fn delete(key: &[u8]) -> RequestOp {
    op(OpRequest::Delete(DeleteRequest { key: key.into(), range_end: Vec::new() }))
}

pub fn get(key: &[u8]) -> RequestOp {
    op(OpRequest::Range(RangeRequest { key: key.into(), ..RangeRequest::default() }))
}

/// Reads whether the key exists, without its value.
pub fn get_key_only(key: &[u8]) -> RequestOp {
    op(OpRequest::Range(RangeRequest { key: key.into(), keys_only: true, ..RangeRequest::default() }))
}

/// Reads all keys with this prefix, the oldest first.
pub fn range_oldest_first(prefix: &[u8]) -> RequestOp {
    op(OpRequest::Range(oldest_first(prefix)))
}

/// Reads the oldest `limit` keys.
pub fn first_keys(prefix: &[u8], limit: i64) -> RequestOp {
    let range = RangeRequest { limit, ..oldest_first(prefix) };
    op(OpRequest::Range(range))
}

/// Reads the first `limit` keys by value, which puts the holders first.
pub fn range_by_value(prefix: &[u8], limit: i64) -> RequestOp {
    let range = RangeRequest { limit, sort_target: 4, ..oldest_first(prefix) };
    op(OpRequest::Range(range))
}

/// Reads the two newest keys that were created at `created_at` or before (zero: of all).
pub fn last_two(prefix: &[u8], created_at: i64) -> RequestOp {
    let range =
        RangeRequest { sort_order: 2, limit: 2, max_create_revision: created_at, ..oldest_first(prefix) };
    op(OpRequest::Range(range))
}

fn oldest_first(prefix: &[u8]) -> RangeRequest {
    let (key, range_end) = (prefix.into(), range_end_of(prefix));
    RangeRequest { key, range_end, sort_order: 1, sort_target: 2, ..RangeRequest::default() }
}

pub fn txn(compare: Vec<Compare>, success: Vec<RequestOp>, failure: Vec<RequestOp>) -> TxnRequest {
    TxnRequest { compare, success, failure }
}

pub fn nested(txn: TxnRequest) -> RequestOp {
    op(OpRequest::Txn(txn))
}

fn op(request: OpRequest) -> RequestOp {
    RequestOp { request: Some(request) }
}

/// The first key after all keys with this prefix.
pub fn range_end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // The end of all keys.
    vec![0]
}

impl TxnRequest {
    /// Whether the transaction contains a put.
    pub fn has_puts(&self) -> bool {
        self.success.iter().chain(&self.failure).any(|response| match &response.request {
            Some(OpRequest::Put(_)) => true,
            Some(OpRequest::Txn(txn)) => txn.has_puts(),
            _ => false,
        })
    }
}

impl TxnResponse {
    pub fn revision(&self) -> i64 {
        self.header.as_ref().map_or(0, |header| header.revision)
    }

    /// The results of all reads in order, with those of nested transactions.
    pub fn into_ranges(self) -> Vec<RangeResponse> {
        let mut found = Vec::new();
        collect(self.responses, &mut found);
        found
    }

    /// Whether the transaction changed anything: then it has a revision of its own.
    pub fn has_writes(&self) -> bool {
        self.responses.iter().any(|response| match &response.response {
            Some(Response::Put(_)) => true,
            Some(Response::Delete(gone)) => gone.deleted > 0,
            Some(Response::Txn(txn)) => txn.has_writes(),
            _ => false,
        })
    }

    /// How many of the keys to delete existed.
    pub fn deleted(&self) -> usize {
        let deleted = |response: &&ResponseOp| matches!(&response.response, Some(Response::Delete(gone)) if gone.deleted > 0);
        self.responses.iter().filter(deleted).count()
    }

    /// The first key that was read, if it exists.
    pub fn into_first_kv(self) -> Option<Kv> {
        self.into_ranges().into_iter().next()?.kvs.into_iter().next()
    }
}

fn collect(responses: Vec<ResponseOp>, found: &mut Vec<RangeResponse>) {
    for response in responses {
        match response.response {
            Some(Response::Range(range)) => found.push(range),
            Some(Response::Txn(txn)) => collect(txn.responses, found),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::range_end_of;

    #[test]
    fn the_end_of_a_prefix_is_computed_in_bytes() {
        assert_eq!(range_end_of(b"a/"), b"a0");
        assert_eq!(range_end_of(b"a\xff"), b"b");
        assert_eq!((range_end_of(b"\xff"), range_end_of(b"")), (vec![0], vec![0]));
    }
}
