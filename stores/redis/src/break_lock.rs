//! Takes a lock away from its holders at once.

use lockkeeper_core::{Fence, LockName, Result};
use redis::Value;

use crate::error::unexpected_reply;
use crate::runner::ScriptRunner;
use crate::slot_migration::SlotMigration;
use crate::statements::{BREAK, ScriptCall};

/// Breaks a lock and returns the fence of the break.
pub(crate) async fn break_lock(runner: &ScriptRunner, name: &LockName, reason: &str) -> Result<Fence> {
    let (group, key) = (runner.keys.group(name), runner.keys.lock_key(name));
    let call = ScriptCall::new(&BREAK, &runner.script_keys(group, [&key]))
        .arg(runner.keys.group_prefix(group))
        .arg(runner.claim_ms())
        .arg(reason)
        .arg(runner.highest_fence_seen());
    match runner.run_or_report(group, &call).await {
        Err(failure) if failure.keys_are_split() => {
            SlotMigration::new(runner, group).break_lock(&key, reason).await
        }
        Err(failure) => Err(failure.into()),
        Ok(Value::Int(fence)) => runner.record_fence(fence),
        Ok(_) => Err(unexpected_reply()),
    }
}
