//! Revokes locks: the server notifies the holders at their next renewal, does not renew their leases, and grants the lock to no waiter
//! before the leases end or the holders release it.

use futures_util::future::try_join_all;
use lockkeeper_core::{Error, Fence, LockName, Result};
use redis::Value;

use crate::codec::decode_hold;
use crate::error::unexpected_reply;
use crate::runner::ScriptRunner;
use crate::slot_migration::SlotMigration;
use crate::statements::{REVOKE, ScriptCall};

/// Revokes all holds of a lock and returns the fence of the revoke.
pub(crate) async fn revoke(runner: &ScriptRunner, name: &LockName, reason: &str) -> Result<Fence> {
    let (fence, marked) = revoke_name(runner, name, reason, b"").await?;
    // Names of the same grant in other slots of a cluster: no script reaches them together with this one.
    let others = marked.iter().flat_map(|packed| {
        let names = decode_hold(packed).map(|hold| hold.other_names()).unwrap_or_default();
        names.into_iter().map(move |other| (other, &packed[..32]))
    });
    let others = others.map(|(other, attempt)| async move {
        revoke_name(runner, &other, reason, attempt).await.map_err(|error| (other, error))
    });
    match try_join_all(others).await {
        Ok(_) => Ok(fence),
        Err((other, error)) => Err(Error::Unknown(format!(
            "{name} was revoked, and its holder is notified at the next renewal; {other}, which it holds with it, \
             may not show it yet: {error}"
        ))),
    }
}

/// Revokes all holds of a lock, or that of one attempt. Returns the revoked holds as the server stores them.
async fn revoke_name(
    runner: &ScriptRunner,
    name: &LockName,
    reason: &str,
    attempt: &[u8],
) -> Result<(Fence, Vec<Vec<u8>>)> {
    let group = runner.keys.group(name);
    let call = ScriptCall::new(&REVOKE, &runner.script_keys(group, [runner.keys.lock_key(name)]))
        .arg(runner.keys.group_prefix(group))
        .arg(runner.claim_ms())
        .arg(reason)
        .arg(runner.highest_fence_seen())
        .arg(attempt);
    let held_by_another = || {
        Error::Unsupported(format!(
            "another Redis client holds {name}, and it would not learn that it is to stop: wait for it, or break the \
             lock at once"
        ))
    };
    let reply = match runner.run_or_report(group, &call).await {
        Err(failure) if failure.keys_are_split() => {
            let attempt = std::str::from_utf8(attempt).map_err(|_| unexpected_reply())?;
            let revoked = SlotMigration::new(runner, group)
                .revoke(&runner.keys.lock_key(name), reason, attempt)
                .await?;
            return revoked.ok_or_else(held_by_another);
        }
        Err(failure) => return Err(failure.into()),
        Ok(Value::Array(reply)) => reply,
        Ok(_) => return Err(unexpected_reply()),
    };
    match &reply[..] {
        [Value::Int(0)] => Err(held_by_another()),
        [Value::Int(1), Value::Int(fence), Value::Array(marked)] => {
            let marked = marked.iter().filter_map(|packed| match packed {
                Value::BulkString(packed) if packed.len() > 32 => Some(packed.clone()),
                _ => None,
            });
            Ok((runner.record_fence(*fence)?, marked.collect()))
        }
        _ => Err(unexpected_reply()),
    }
}
