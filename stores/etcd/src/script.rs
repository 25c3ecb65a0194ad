//! Exactly what we say to etcd: small words that make up its transactions.

use crate::proto::{
    Against, Compare, DeleteRequest, Kv, PutRequest, RangeRequest, RangeResponse, Request, RequestOp,
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

/// The key was created at this revision; zero: it is not there.
pub fn created(key: &[u8], revision: i64) -> Compare {
    compare(EQUAL, key, b"", Against::Created(revision))
}

/// The key was written last at this revision; zero: it is not there.
pub fn written(key: &[u8], revision: i64) -> Compare {
    compare(EQUAL, key, b"", Against::Modified(revision))
}

/// The key has this value.
pub fn says(key: &[u8], value: &[u8]) -> Compare {
    compare(EQUAL, key, b"", Against::Value(value.into()))
}

/// Nothing begins with this.
pub fn empty(prefix: &[u8]) -> Compare {
    compare(EQUAL, prefix, &end_of(prefix), Against::Created(0))
}

/// Nothing that begins with this was written after `revision`. What was deleted since is not noticed.
pub fn unwritten(prefix: &[u8], revision: i64) -> Compare {
    compare(LESS, prefix, &end_of(prefix), Against::Modified(revision + 1))
}

pub fn put(key: &[u8], value: Vec<u8>, lease: i64) -> RequestOp {
    op(Request::Put(PutRequest { key: key.into(), value, lease, prev_kv: false }))
}

pub fn delete(key: &[u8]) -> RequestOp {
    op(Request::Delete(DeleteRequest { key: key.into(), range_end: Vec::new() }))
}

pub fn get(key: &[u8]) -> RequestOp {
    op(Request::Range(RangeRequest { key: key.into(), ..RangeRequest::default() }))
}

/// Whether the key is there, without its value.
pub fn look(key: &[u8]) -> RequestOp {
    op(Request::Range(RangeRequest { key: key.into(), keys_only: true, ..RangeRequest::default() }))
}

/// All that begins with this, the oldest first.
pub fn queue(prefix: &[u8]) -> RequestOp {
    op(Request::Range(oldest_first(prefix)))
}

/// The first so many of them.
pub fn head(prefix: &[u8], limit: i64) -> RequestOp {
    let range = RangeRequest { limit, ..oldest_first(prefix) };
    op(Request::Range(range))
}

/// The first so many of them by value, which are those that hold.
pub fn holders(prefix: &[u8], limit: i64) -> RequestOp {
    let range = RangeRequest { limit, sort_target: 4, ..oldest_first(prefix) };
    op(Request::Range(range))
}

/// The two that came last, of those that came no later than `created` (zero: of all).
pub fn tail(prefix: &[u8], created: i64) -> RequestOp {
    let range =
        RangeRequest { sort_order: 2, limit: 2, max_create_revision: created, ..oldest_first(prefix) };
    op(Request::Range(range))
}

fn oldest_first(prefix: &[u8]) -> RangeRequest {
    let (key, range_end) = (prefix.into(), end_of(prefix));
    RangeRequest { key, range_end, sort_order: 1, sort_target: 2, ..RangeRequest::default() }
}

pub fn txn(compare: Vec<Compare>, success: Vec<RequestOp>, failure: Vec<RequestOp>) -> TxnRequest {
    TxnRequest { compare, success, failure }
}

pub fn nested(txn: TxnRequest) -> RequestOp {
    op(Request::Txn(txn))
}

fn op(request: Request) -> RequestOp {
    RequestOp { request: Some(request) }
}

/// The first key after all that begin with `prefix`.
pub fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // To the end of everything.
    vec![0]
}

impl TxnRequest {
    /// Whether there is anything to write in it.
    pub fn puts(&self) -> bool {
        self.success.iter().chain(&self.failure).any(|one| match &one.request {
            Some(Request::Put(_)) => true,
            Some(Request::Txn(txn)) => txn.puts(),
            _ => false,
        })
    }
}

impl TxnResponse {
    pub fn revision(&self) -> i64 {
        self.header.as_ref().map_or(0, |header| header.revision)
    }

    /// What was read, in order; nested transactions are looked into.
    pub fn ranges(self) -> Vec<RangeResponse> {
        let mut found = Vec::new();
        collect(self.responses, &mut found);
        found
    }

    /// Whether it changed anything: then its revision is its own.
    pub fn writes(&self) -> bool {
        self.responses.iter().any(|one| match &one.response {
            Some(Response::Put(_)) => true,
            Some(Response::Delete(gone)) => gone.deleted > 0,
            Some(Response::Txn(txn)) => txn.writes(),
            _ => false,
        })
    }

    /// How many of the keys that were to be deleted have been there.
    pub fn deleted(&self) -> usize {
        let deleted =
            |one: &&ResponseOp| matches!(&one.response, Some(Response::Delete(gone)) if gone.deleted > 0);
        self.responses.iter().filter(deleted).count()
    }

    /// The one key that was read, if it is there.
    pub fn one(self) -> Option<Kv> {
        self.ranges().into_iter().next()?.kvs.into_iter().next()
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
    use super::end_of;

    #[test]
    fn the_end_of_a_prefix_is_counted_in_bytes() {
        assert_eq!(end_of(b"a/"), b"a0");
        assert_eq!(end_of(b"a\xff"), b"b");
        assert_eq!((end_of(b"\xff"), end_of(b"")), (vec![0], vec![0]));
    }
}
