//! Rate limits: one script with the server's clock. A bucket is a key that ends when the bucket is full. Takes of many tasks share a script.

use std::fmt::Write;

use async_trait::async_trait;
use lockkeeper_core::limit::{LimitOperation, LimitOutcome, LimitRequest};
use lockkeeper_core::{Error, Limits, Result};
use redis::Value;

use crate::batch::KeepFlag;
use crate::buckets::bucket_key;
use crate::error::{Failure, unexpected_reply};
use crate::statements::{LIMIT, ScriptCall};
use crate::store::RedisStore;

/// The numbers of a request that the script needs beside its keys.
fn numbers_of(request: &LimitRequest) -> String {
    let wait = match request.operation {
        LimitOperation::Take { wait } => wait.as_nanos(),
        _ => 0,
    };
    let mut numbers = wait.to_string();
    for bucket in &request.buckets {
        let spec = &bucket.spec;
        // Takes that are the same to the last digit are parsed once.
        let taken = if request.operation == LimitOperation::Refund { bucket.taken } else { 0 };
        let _ = write!(numbers, " {} {} {taken}", spec.cost_nanos(bucket.tokens), spec.fill_nanos());
    }
    numbers
}

/// Reads the reply to one request.
fn outcome(request: &LimitRequest, reply: &Value) -> Result<LimitOutcome> {
    let Value::BulkString(text) = reply else { return Err(unexpected_reply()) };
    let text = std::str::from_utf8(text).map_err(|_| unexpected_reply())?;
    if let Some(error) = text.strip_prefix('-') {
        let (code, detail) = error.split_once(' ').unwrap_or((error, ""));
        return Err(Failure::Rejected { code: code.into(), detail: detail.into() }.into());
    }
    let numbers: Option<Vec<u64>> = text.split(' ').map(|number| number.parse().ok()).collect();
    match numbers.as_deref() {
        Some([allowed @ (0 | 1), now, full_at @ ..]) if full_at.len() == request.buckets.len() => {
            Ok(LimitOutcome::observed(request, *allowed == 1, *now, full_at))
        }
        _ => Err(unexpected_reply()),
    }
}

#[async_trait]
impl Limits for RedisStore {
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        request.check()?;
        let runner = self.runner();
        let group = runner.keys.group(request.buckets[0].spec.key());
        if request.buckets.iter().any(|bucket| runner.keys.group(bucket.spec.key()) != group) {
            return Err(Error::Unsupported(
                "these limits are in different hash slots of the cluster, and no step of Redis reaches two of them: give their keys one \
                 hash tag, as in user/{acme}/alice and tenant/{acme}, or take from one after the other"
                    .into(),
            ));
        }
        let keys: Vec<String> =
            request.buckets.iter().map(|bucket| bucket_key(&runner.keys, bucket.spec.key())).collect();
        let numbers = numbers_of(request);
        let operation = match request.operation {
            LimitOperation::Take { .. } => {
                let args = vec![numbers.into_bytes()];
                let reply = self.takes().send(group, keys, args, KeepFlag::default()).await?;
                return outcome(request, &reply);
            }
            LimitOperation::Peek => "peek",
            LimitOperation::Reset => "reset",
            LimitOperation::Refund => "refund",
        };
        let call = ScriptCall::new(&LIMIT, &keys).arg(operation).arg(numbers);
        match &runner.run(group, &call).await? {
            Value::Array(replies) if replies.len() == 1 => outcome(request, &replies[0]),
            _ => Err(unexpected_reply()),
        }
    }
}
