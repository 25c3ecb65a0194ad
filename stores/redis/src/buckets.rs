//! The keys of rate limits, and the script that takes from the buckets of many tasks.

use futures_util::future::join_all;
use lockkeeper_core::LockName;
use redis::Value;

use crate::error::Failure;
use crate::keys::{KeyGroup, Keys};
use crate::runner::ScriptRunner;
use crate::statements::{LIMIT, ScriptCall};

/// The key of a bucket.
pub(crate) fn bucket_key(keys: &Keys, key: &LockName) -> String {
    format!("{}limit:{}", keys.group_prefix(keys.group(key)), keys.lock_key(key))
}

/// Decides takes one by one, because the server refused a script of several: some keys are on another node, or are none of this user's.
pub(crate) async fn take_one_by_one(
    runner: &ScriptRunner,
    group: KeyGroup,
    takes: &[(&[String], &[u8])],
) -> Vec<Result<Value, Failure>> {
    let each = takes.iter().map(|&(keys, numbers)| async move {
        match runner.run(group, &take_call(keys, [numbers])).await? {
            Value::Array(mut replies) if replies.len() == 1 => Ok(replies.remove(0)),
            _ => Err(Failure::unexpected_reply()),
        }
    });
    join_all(each).await
}

/// A script of the takes of many tasks. `numbers` are those of each take, `keys` the buckets of all.
pub(crate) fn take_call<'r>(keys: &[String], numbers: impl IntoIterator<Item = &'r [u8]>) -> ScriptCall {
    numbers.into_iter().fold(ScriptCall::new(&LIMIT, keys).arg("take"), |call, numbers| call.arg(numbers))
}
