//! Rate limits: one script with the server's clock. A bucket is a key that ends when the bucket is full.

use async_trait::async_trait;
use lockkeeper_core::limit::{LimitOperation, LimitOutcome, LimitRequest};
use lockkeeper_core::{Error, Limits, LockName, Result};
use redis::Value;

use crate::error::unexpected_reply;
use crate::runner::ScriptRunner;
use crate::statements::{LIMIT, ScriptCall};
use crate::store::RedisStore;

impl ScriptRunner {
    fn bucket_key(&self, key: &LockName) -> String {
        format!("{}limit:{}", self.keys.group_prefix(self.keys.group(key)), self.keys.lock_key(key))
    }

    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        let group = self.keys.group(request.buckets[0].spec.key());
        if request.buckets.iter().any(|bucket| self.keys.group(bucket.spec.key()) != group) {
            return Err(Error::Unsupported(
                "these limits are in different hash slots of the cluster, and no step of Redis reaches two of them: give their keys one \
                 hash tag, as in user/{acme}/alice and tenant/{acme}, or take from one after the other"
                    .into(),
            ));
        }
        let keys: Vec<String> =
            request.buckets.iter().map(|bucket| self.bucket_key(bucket.spec.key())).collect();
        let (operation, wait) = match request.operation {
            LimitOperation::Take { wait } => ("take", wait.as_nanos() as u64),
            LimitOperation::Peek => ("peek", 0),
            LimitOperation::Reset => ("reset", 0),
            LimitOperation::Refund => ("refund", 0),
        };
        let call = ScriptCall::new(&LIMIT, &keys).arg(operation).arg(wait);
        let call = request.buckets.iter().fold(call, |call, bucket| {
            let spec = &bucket.spec;
            call.arg(spec.cost_nanos(bucket.tokens)).arg(spec.fill_nanos()).arg(bucket.taken)
        });
        let Value::Array(reply) = self.run(group, &call).await? else { return Err(unexpected_reply()) };
        let [Value::Int(allowed @ (0 | 1)), now, full_at @ ..] = &reply[..] else {
            return Err(unexpected_reply());
        };
        let full_at: Result<Vec<u64>> = full_at.iter().map(nanos).collect();
        match full_at? {
            full_at if full_at.len() == keys.len() => {
                Ok(LimitOutcome::observed(request, *allowed == 1, nanos(now)?, &full_at))
            }
            _ => Err(unexpected_reply()),
        }
    }
}

fn nanos(value: &Value) -> Result<u64> {
    let Value::BulkString(text) = value else { return Err(unexpected_reply()) };
    std::str::from_utf8(text).ok().and_then(|digits| digits.parse().ok()).ok_or_else(unexpected_reply)
}

#[async_trait]
impl Limits for RedisStore {
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        request.check()?;
        self.runner().limit(request).await
    }
}
