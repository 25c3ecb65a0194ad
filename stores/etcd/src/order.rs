//! Transactions of many tasks, as the one message that they travel in.
//!
//! Each is written down by the task that hands it in. Two messages of protobuf, one behind the other, are the message with the fields
//! of both, so what travels together is only copied, and stays as it is for the case that it must travel again in another form.

use std::hash::{DefaultHasher, Hash, Hasher};

use lockkeeper_core::Moment;
use prost::Message;
use prost::bytes::Bytes;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint};
use tokio::sync::oneshot;

use crate::base::base_stands;
use crate::fault::Failure;
use crate::layout::Layout;
use crate::proto::{Response, ResponseOp, TxnRequest, TxnResponse};
use crate::script::txn;

/// What a transaction is about, as a number: two names that happen to have the same one only wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Topic(u64);

impl Topic {
    pub fn new(what: impl Hash) -> Self {
        let mut hasher = DefaultHasher::new();
        what.hash(&mut hasher);
        Topic(hasher.finish())
    }
}

/// A transaction, and what it is about: two that have something in common are never under way together, so that those of
/// one name happen in the order in which they were handed in.
pub struct Order {
    written: Vec<u8>,
    operations: usize,
    weight: usize,
    /// It is expected to happen, and says nothing for the case that it does not.
    hopes: bool,
    /// What the base of the fences must be as well: the same for many, so that it is looked at once.
    base: Option<u64>,
    /// It is about nothing: it writes nothing, and what it reads may be written by another one that travels with it.
    looks: bool,
    /// It needs room.
    puts: bool,
    pub about: Vec<Topic>,
    answer: oneshot::Sender<Result<Answer, Failure>>,
}

/// What became of a transaction.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Before it was sent, and hardly longer ago than that.
    pub sent_at: Moment,
    pub revision: i64,
    pub txn: TxnResponse,
}

/// How they stand in a message of many.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Those that are expected to happen as they are: all of them happen or none.
    Hoping,
    /// Each as a transaction of its own.
    Apart,
}

impl Order {
    pub fn new(
        txn: &TxnRequest,
        base: Option<u64>,
        hopes: bool,
        about: Vec<Topic>,
        answer: oneshot::Sender<Result<Answer, Failure>>,
    ) -> Self {
        let operations = txn.success.len();
        let weight = if hopes { operations.max(txn.compare.len()) } else { 1 };
        let (looks, puts) = (about.is_empty(), txn.puts());
        Order { written: txn.encode_to_vec(), operations, weight, hopes, base, looks, puts, about, answer }
    }

    pub fn hopes(&self) -> bool {
        self.hopes
    }

    /// Whether it writes anything, other than to delete.
    pub fn puts(&self) -> bool {
        self.puts
    }

    /// How many bytes it takes.
    pub fn size(&self) -> usize {
        self.written.len()
    }

    /// How many operations it takes in a message of many.
    pub fn weight(&self) -> usize {
        self.weight
    }

    /// Whoever handed it in has lost interest.
    pub fn is_given_up(&self) -> bool {
        self.answer.is_closed()
    }

    pub fn tell(self, answer: Result<Answer, Failure>) {
        _ = self.answer.send(answer);
    }

    /// As a message of its own.
    pub fn alone(&self, layout: &Layout) -> Bytes {
        let base = self.base.map_or(Vec::new(), |base| stands(layout, base));
        [base.as_slice(), &self.written].concat().into()
    }

    fn is_nested(&self, form: Form) -> bool {
        form == Form::Apart || !self.hopes
    }
}

fn stands(layout: &Layout, base: u64) -> Vec<u8> {
    txn(vec![base_stands(layout, base)], Vec::new(), Vec::new()).encode_to_vec()
}

/// The message of all of them.
pub fn put_together(layout: &Layout, batch: &[Order], form: Form) -> Bytes {
    // There is one base, but for the moment in which somebody raises it.
    let mut bases: Vec<(u64, Vec<u8>)> = Vec::new();
    for base in batch.iter().filter_map(|order| order.base) {
        if bases.iter().all(|(known, _)| *known != base) {
            bases.push((base, stands(layout, base)));
        }
    }
    let mut all = Vec::with_capacity(batch.iter().map(|order| order.size() + 16).sum::<usize>() + 256);
    if form == Form::Hoping {
        bases.iter().for_each(|(_, stands)| all.extend_from_slice(stands));
    }
    for order in batch {
        if !order.is_nested(form) {
            all.extend_from_slice(&order.written);
            continue;
        }
        let base = bases.iter().find(|(base, _)| order.base == Some(*base));
        nest(&mut all, base.map_or(&[], |(_, stands)| stands), &order.written);
    }
    all.into()
}

/// One operation more: the transaction that these two make up.
fn nest(all: &mut Vec<u8>, front: &[u8], rest: &[u8]) {
    // The numbers of the fields are those of `success` and of `Request::Txn`.
    const SUCCESS: u32 = 2;
    const TXN: u32 = 4;
    let length = (front.len() + rest.len()) as u64;
    encode_key(SUCCESS, WireType::LengthDelimited, all);
    encode_varint(1 + encoded_len_varint(length) as u64 + length, all);
    encode_key(TXN, WireType::LengthDelimited, all);
    encode_varint(length, all);
    all.extend_from_slice(front);
    all.extend_from_slice(rest);
}

/// Gives each its own part of the answer.
pub fn hand_out(sent_at: Moment, answer: TxnResponse, batch: Vec<Order>, form: Form) {
    let revision = answer.revision();
    // All of them have one revision. A look that travels in front of a write has not seen it: what it tells is of the moment before.
    let looked = if answer.writes() { revision - 1 } else { revision };
    let mut each = answer.responses.into_iter();
    for order in batch {
        let revision = if order.looks { looked } else { revision };
        let txn = match order.is_nested(form) {
            true => one_of(each.next()),
            false => {
                let responses = each.by_ref().take(order.operations).collect();
                Some(TxnResponse { header: None, succeeded: true, responses })
            }
        };
        let senseless = || Failure::Unheard("etcd gave an answer that makes no sense".into());
        order.tell(txn.map(|txn| Answer { sent_at, revision, txn }).ok_or_else(senseless));
    }
}

fn one_of(response: Option<ResponseOp>) -> Option<TxnResponse> {
    match response?.response? {
        Response::Txn(txn) => Some(txn),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{DeleteResponse, RequestOp};
    use crate::script::{delete, get, nested, written};

    fn order(hopes: bool, base: Option<u64>, txn: &TxnRequest) -> Order {
        Order::new(txn, base, hopes, Vec::new(), oneshot::channel().0)
    }

    /// A waiter would else watch from the revision after the release that it has not seen, and hear of it only when it looks for itself;
    /// and one that takes what it saw to be free would not notice who wrote there meanwhile.
    #[test]
    fn a_look_is_as_old_as_what_travels_with_it() {
        let told = |writes: Response| {
            let apart = |response| {
                let responses = vec![ResponseOp { response: Some(response) }];
                let txn = TxnResponse { header: None, succeeded: true, responses };
                ResponseOp { response: Some(Response::Txn(txn)) }
            };
            let header = Some(crate::proto::Header { revision: 7 });
            let responses = vec![apart(Response::Range(Default::default())), apart(writes)];
            let (look, looked) = oneshot::channel();
            let (write, written) = oneshot::channel();
            let empty = txn(Vec::new(), Vec::new(), Vec::new());
            let batch = vec![
                Order::new(&empty, None, false, Vec::new(), look),
                Order::new(&empty, None, false, vec![Topic::new("x")], write),
            ];
            hand_out(Moment::NEVER, TxnResponse { header, succeeded: true, responses }, batch, Form::Apart);
            [looked, written].map(|mut told| told.try_recv().unwrap().unwrap().revision)
        };
        assert_eq!(told(Response::Put(Default::default())), [6, 7]);
        assert_eq!(told(Response::Delete(DeleteResponse { deleted: 1 })), [6, 7]);
        assert_eq!(told(Response::Delete(DeleteResponse { deleted: 0 })), [7, 7]);
        assert_eq!(told(Response::Range(Default::default())), [7, 7]);
    }

    #[test]
    fn what_is_put_together_says_what_each_of_them_says() {
        let layout = Layout::new("lock/");
        let pair = |key: &[u8]| txn(vec![written(key, 1), written(key, 2)], vec![delete(key)], Vec::new());
        let look = txn(Vec::new(), vec![get(b"x")], vec![get(&[b'y'; 300])]);
        let all = [
            (true, Some(7), pair(b"a")),
            (false, None, look),
            (true, Some(7), pair(b"b")),
            (true, None, pair(b"c")),
        ];
        let batch: Vec<Order> = all.iter().map(|(hopes, base, txn)| order(*hopes, *base, txn)).collect();

        let read = TxnRequest::decode(put_together(&layout, &batch, Form::Hoping)).unwrap();
        let mut compare = vec![base_stands(&layout, 7)];
        compare.extend(all.iter().filter(|one| one.0).flat_map(|one| one.2.compare.clone()));
        let operations = |one: &(bool, Option<u64>, TxnRequest)| match one.0 {
            true => one.2.success.clone(),
            false => vec![nested(one.2.clone())],
        };
        assert_eq!(read, txn(compare, all.iter().flat_map(operations).collect(), Vec::new()));

        let own = |one: &(bool, Option<u64>, TxnRequest)| {
            let mut own = one.2.clone();
            own.compare.splice(0..0, one.1.map(|base| base_stands(&layout, base)));
            own
        };
        let read = TxnRequest::decode(put_together(&layout, &batch, Form::Apart)).unwrap();
        let each: Vec<RequestOp> = all.iter().map(|one| nested(own(one))).collect();
        assert_eq!(read, txn(Vec::new(), each, Vec::new()));
        for (one, order) in all.iter().zip(&batch) {
            assert_eq!(TxnRequest::decode(order.alone(&layout)).unwrap(), own(one));
        }
    }
}
