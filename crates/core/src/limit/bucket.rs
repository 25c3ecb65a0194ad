//! The machine: decides about a request, given the time and the stored state of its buckets.

use crate::limit::{LimitBucket, LimitOperation, LimitOutcome, LimitRequest};

/// The change that a store makes to a bucket after a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketChange {
    /// Nothing.
    Keep,
    /// Stores the instant, in nanoseconds of its clock, at which the bucket will be full.
    Set(u64),
    /// Removes the bucket, because it is full.
    Remove,
}

/// Decides about a request. `now` is the store's clock in nanoseconds; `stored` has, for each bucket, the instant at which it will be full, or
/// `None` for a bucket that is not stored, which is full.
///
/// The store applies the changes in the step in which it has read `stored`. A clock that goes back makes the stored instants look later, so that a
/// bucket seems emptier than it is: it gives nothing twice.
pub fn decide(request: &LimitRequest, now: u64, stored: &[Option<u64>]) -> (LimitOutcome, Vec<BucketChange>) {
    assert_eq!(request.buckets.len(), stored.len(), "one state for each bucket");
    let each = || request.buckets.iter().zip(stored);
    let full_at: Vec<u64> = stored.iter().map(|at| at.unwrap_or(0).max(now)).collect();
    let changed: Option<Vec<u64>> = match request.operation {
        LimitOperation::Take { wait } => {
            let until = now.saturating_add(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX));
            let all = each().all(|(bucket, at)| usable_at(bucket, now, *at) <= until);
            all.then(|| each().map(|(bucket, at)| after_take(bucket, now, *at)).collect())
        }
        LimitOperation::Peek => None,
        LimitOperation::Reset => Some(vec![now; stored.len()]),
        LimitOperation::Refund => Some(each().map(|(bucket, at)| after_refund(bucket, now, *at)).collect()),
    };
    let allowed = match request.operation {
        LimitOperation::Peek => each().all(|(bucket, at)| usable_at(bucket, now, *at) <= now),
        _ => changed.is_some(),
    };
    let change = |(before, after): (&Option<u64>, u64)| match before {
        None if after <= now => BucketChange::Keep,
        Some(at) if *at == after && after > now => BucketChange::Keep,
        _ if after <= now => BucketChange::Remove,
        _ => BucketChange::Set(after),
    };
    let changes = match &changed {
        Some(after) => stored.iter().zip(after.iter().copied()).map(change).collect(),
        None => vec![BucketChange::Keep; stored.len()],
    };
    (LimitOutcome::observed(request, allowed, now, &changed.unwrap_or(full_at)), changes)
}

/// The instant at which the bucket is full after a take.
fn after_take(bucket: &LimitBucket, now: u64, stored: Option<u64>) -> u64 {
    stored.unwrap_or(0).max(now).saturating_add(bucket.spec.cost_nanos(bucket.tokens))
}

/// The first instant at which the tokens may be used.
fn usable_at(bucket: &LimitBucket, now: u64, stored: Option<u64>) -> u64 {
    after_take(bucket, now, stored).saturating_sub(bucket.spec.fill_nanos()).max(now)
}

/// The instant at which the bucket is full after a refund.
///
/// Only the last take comes back. A take moves the instant on, and a refund of the last take moves it back to where it was before that take or
/// to `now`. So while any later take counts, the stored instant is after that of this take. If the two are equal, all later takes have been given
/// back, and the bucket becomes as full as it would be without this take.
///
/// A take with others behind it brings nothing back, because one instant does not tell which of the tokens have refilled since, and because the
/// callers behind a reserved place have theirs already. An instant that an earlier refund had moved would bring back tokens of others.
fn after_refund(bucket: &LimitBucket, now: u64, stored: Option<u64>) -> u64 {
    let at = stored.unwrap_or(0).max(now);
    let back = if at == bucket.taken { bucket.spec.cost_nanos(bucket.tokens) } else { 0 };
    at.saturating_sub(back).max(now)
}
