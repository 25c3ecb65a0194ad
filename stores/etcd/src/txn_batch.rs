//! The encoding of many transactions as one message.
//!
//! Each task encodes its own transaction. Two protobuf messages in a row are one message with the fields of both, so a
//! batch is made by copying bytes, and each transaction can be sent again in another form.

use std::hash::{DefaultHasher, Hash, Hasher};

use lockkeeper_core::{BootInstant, Names};
use prost::Message;
use prost::bytes::Bytes;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint};
use tokio::sync::oneshot;

use crate::error::Failure;
use crate::keys::Keys;
use crate::proto::{Response, ResponseOp, TxnRequest, TxnResponse};
use crate::statements::{base_unchanged, txn};

/// A name or key on which two transactions must not run concurrently, as a hash. Two names with the same hash only wait for each
/// other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConflictKey(u64);

impl ConflictKey {
    pub fn new(what: impl Hash) -> Self {
        let mut hasher = DefaultHasher::new();
        what.hash(&mut hasher);
        ConflictKey(hasher.finish())
    }

    pub fn of_names(names: &Names) -> Vec<Self> {
        names.iter().map(ConflictKey::new).collect()
    }
}

/// An encoded transaction with its conflict keys. Two transactions that share a conflict key are never in flight
/// together, so those of one name are applied in the order in which they were enqueued.
pub struct QueuedTxn {
    encoded: Vec<u8>,
    operations: usize,
    /// How many operations it adds to a batch.
    pub batch_operations: usize,
    /// Expected to succeed, with no operations for the other case.
    pub optimistic: bool,
    /// The fence base to compare. Many transactions have the same, so a batch compares it once.
    base: Option<u64>,
    /// No conflict keys: it writes nothing, and another transaction of the same batch may write what it reads.
    read_only: bool,
    /// Needs space in the database.
    pub has_puts: bool,
    pub conflicts: Vec<ConflictKey>,
    reply: oneshot::Sender<Result<TxnReply, Failure>>,
}

/// The result of a transaction.
#[derive(Clone, Debug)]
pub struct TxnReply {
    /// A moment shortly before it was sent.
    pub sent_at: BootInstant,
    pub revision: i64,
    pub txn: TxnResponse,
}

/// How a batch contains its transactions.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum BatchForm {
    /// Transactions that are expected to succeed are merged: all are applied, or none.
    Merged,
    /// Each is nested as a transaction of its own.
    Nested,
}

impl QueuedTxn {
    pub fn new(
        txn: &TxnRequest,
        base: Option<u64>,
        optimistic: bool,
        conflicts: Vec<ConflictKey>,
        reply: oneshot::Sender<Result<TxnReply, Failure>>,
    ) -> Self {
        let operations = txn.success.len();
        let batch_operations = if optimistic { operations.max(txn.compare.len()) } else { 1 };
        let (read_only, has_puts) = (conflicts.is_empty(), txn.has_puts());
        QueuedTxn {
            encoded: txn.encode_to_vec(),
            operations,
            batch_operations,
            optimistic,
            base,
            read_only,
            has_puts,
            conflicts,
            reply,
        }
    }

    /// Its size in bytes.
    pub fn size(&self) -> usize {
        self.encoded.len()
    }

    /// The task that enqueued it has dropped the reply.
    pub fn is_abandoned(&self) -> bool {
        self.reply.is_closed()
    }

    pub fn complete(self, reply: Result<TxnReply, Failure>) {
        _ = self.reply.send(reply);
    }

    /// Encodes it as a message of its own.
    pub fn encode_alone(&self, keys: &Keys) -> Bytes {
        let base = self.base.map_or(Vec::new(), |base| encode_base_compare(keys, base));
        [base.as_slice(), &self.encoded].concat().into()
    }

    fn is_nested(&self, form: BatchForm) -> bool {
        form == BatchForm::Nested || !self.optimistic
    }
}

fn encode_base_compare(keys: &Keys, base: u64) -> Vec<u8> {
    txn(vec![base_unchanged(keys, base)], Vec::new(), Vec::new()).encode_to_vec()
}

/// Encodes the whole batch.
pub fn encode_batch(keys: &Keys, batch: &[QueuedTxn], form: BatchForm) -> Bytes {
    // All have the same base, except while another process raises it.
    let mut bases: Vec<(u64, Vec<u8>)> = Vec::new();
    for base in batch.iter().filter_map(|queued| queued.base) {
        if bases.iter().all(|(known, _)| *known != base) {
            bases.push((base, encode_base_compare(keys, base)));
        }
    }
    let mut all = Vec::with_capacity(batch.iter().map(|queued| queued.size() + 16).sum::<usize>() + 256);
    if form == BatchForm::Merged {
        bases.iter().for_each(|(_, base_compare)| all.extend_from_slice(base_compare));
    }
    for queued in batch {
        if !queued.is_nested(form) {
            all.extend_from_slice(&queued.encoded);
            continue;
        }
        let base = bases.iter().find(|(base, _)| queued.base == Some(*base));
        nest(&mut all, base.map_or(&[], |(_, base_compare)| base_compare), &queued.encoded);
    }
    all.into()
}

/// Appends one operation: the transaction made of these two parts.
fn nest(all: &mut Vec<u8>, front: &[u8], back: &[u8]) {
    // The field numbers of `success` and of `Request::Txn`.
    const SUCCESS: u32 = 2;
    const TXN: u32 = 4;
    let length = (front.len() + back.len()) as u64;
    encode_key(SUCCESS, WireType::LengthDelimited, all);
    encode_varint(1 + encoded_len_varint(length) as u64 + length, all);
    encode_key(TXN, WireType::LengthDelimited, all);
    encode_varint(length, all);
    all.extend_from_slice(front);
    all.extend_from_slice(back);
}

/// Gives each transaction its part of the reply.
pub fn distribute_replies(sent_at: BootInstant, reply: TxnResponse, batch: Vec<QueuedTxn>, form: BatchForm) {
    let revision = reply.revision();
    // All have one revision. A read ahead of a write in the same batch has not seen that write: it shows the revision
    // before.
    let revision_read = if reply.has_writes() { revision - 1 } else { revision };
    let mut each = reply.responses.into_iter();
    for queued in batch {
        let revision = if queued.read_only { revision_read } else { revision };
        let txn = match queued.is_nested(form) {
            true => nested_response(each.next()),
            false => {
                let responses = each.by_ref().take(queued.operations).collect();
                Some(TxnResponse { header: None, succeeded: true, responses })
            }
        };
        let malformed = || Failure::NoReply("etcd sent a reply of the wrong shape".into());
        queued.complete(txn.map(|txn| TxnReply { sent_at, revision, txn }).ok_or_else(malformed));
    }
}

fn nested_response(response: Option<ResponseOp>) -> Option<TxnResponse> {
    match response?.response? {
        Response::Txn(txn) => Some(txn),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{DeleteResponse, RequestOp};
    use crate::statements::{delete, get, modified_at, nested};

    fn queued(optimistic: bool, base: Option<u64>, txn: &TxnRequest) -> QueuedTxn {
        QueuedTxn::new(txn, base, optimistic, Vec::new(), oneshot::channel().0)
    }

    /// With the revision of the batch, a waiter would watch from after a release that it has not seen, and notice it
    /// only at its next poll; and a request that takes a lock that it saw free would not notice a write in between.
    #[test]
    fn a_read_has_the_revision_before_the_writes_of_its_batch() {
        let revisions = |writes: Response| {
            let apart = |response| {
                let responses = vec![ResponseOp { response: Some(response) }];
                let txn = TxnResponse { header: None, succeeded: true, responses };
                ResponseOp { response: Some(Response::Txn(txn)) }
            };
            let header = Some(crate::proto::Header { revision: 7, ..Default::default() });
            let responses = vec![apart(Response::Range(Default::default())), apart(writes)];
            let (read, revision_read) = oneshot::channel();
            let (write, encoded) = oneshot::channel();
            let empty = txn(Vec::new(), Vec::new(), Vec::new());
            let batch = vec![
                QueuedTxn::new(&empty, None, false, Vec::new(), read),
                QueuedTxn::new(&empty, None, false, vec![ConflictKey::new("x")], write),
            ];
            distribute_replies(
                BootInstant::NEVER,
                TxnResponse { header, succeeded: true, responses },
                batch,
                BatchForm::Nested,
            );
            [revision_read, encoded].map(|mut revisions| revisions.try_recv().unwrap().unwrap().revision)
        };
        assert_eq!(revisions(Response::Put(Default::default())), [6, 7]);
        assert_eq!(revisions(Response::Delete(DeleteResponse { deleted: 1 })), [6, 7]);
        assert_eq!(revisions(Response::Delete(DeleteResponse { deleted: 0 })), [7, 7]);
        assert_eq!(revisions(Response::Range(Default::default())), [7, 7]);
    }

    #[test]
    fn an_encoded_batch_contains_each_transaction() {
        let keys = Keys::new("lock/");
        let pair =
            |key: &[u8]| txn(vec![modified_at(key, 1), modified_at(key, 2)], vec![delete(key)], Vec::new());
        let read = txn(Vec::new(), vec![get(b"x")], vec![get(&[b'y'; 300])]);
        let all = [
            (true, Some(7), pair(b"a")),
            (false, None, read),
            (true, Some(7), pair(b"b")),
            (true, None, pair(b"c")),
        ];
        let batch: Vec<QueuedTxn> =
            all.iter().map(|(optimistic, base, txn)| queued(*optimistic, *base, txn)).collect();

        let read = TxnRequest::decode(encode_batch(&keys, &batch, BatchForm::Merged)).unwrap();
        let mut compare = vec![base_unchanged(&keys, 7)];
        compare.extend(all.iter().filter(|one| one.0).flat_map(|one| one.2.compare.clone()));
        let operations = |one: &(bool, Option<u64>, TxnRequest)| match one.0 {
            true => one.2.success.clone(),
            false => vec![nested(one.2.clone())],
        };
        assert_eq!(read, txn(compare, all.iter().flat_map(operations).collect(), Vec::new()));

        let own = |one: &(bool, Option<u64>, TxnRequest)| {
            let mut own = one.2.clone();
            own.compare.splice(0..0, one.1.map(|base| base_unchanged(&keys, base)));
            own
        };
        let read = TxnRequest::decode(encode_batch(&keys, &batch, BatchForm::Nested)).unwrap();
        let each: Vec<RequestOp> = all.iter().map(|one| nested(own(one))).collect();
        assert_eq!(read, txn(Vec::new(), each, Vec::new()));
        for (one, queued) in all.iter().zip(&batch) {
            assert_eq!(TxnRequest::decode(queued.encode_alone(&keys)).unwrap(), own(one));
        }
    }
}
