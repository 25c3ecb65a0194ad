//! Asking the holders of a lock to release it: their leases are not renewed any more, and no waiter is let in before they end.

use futures_util::future::try_join_all;
use lockkeeper_core::{Error, Fence, LockName, Result};
use redis::Value;

use crate::entry;
use crate::hold::odd;
use crate::script::{Call, REVOKE};
use crate::store::Shared;

impl Shared {
    pub(crate) async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let (fence, marked) = self.revoke_one(name, reason, b"").await?;
        // Names of the same grant in other slots of a cluster: no script reaches them together with this one.
        let others = marked.iter().flat_map(|packed| {
            let names = entry::hold(packed).map(|hold| hold.other_names()).unwrap_or_default();
            names.into_iter().map(move |other| (other, &packed[..32]))
        });
        let others = others.map(|(other, attempt)| async move {
            self.revoke_one(&other, reason, attempt).await.map_err(|error| (other, error))
        });
        match try_join_all(others).await {
            Ok(_) => Ok(fence),
            Err((other, error)) => Err(Error::Unknown(format!(
                "{name} was revoked, and the holder is told so at its next renewal; {other}, which it holds with it, \
                 may not show it yet: {error}"
            ))),
        }
    }

    /// Revokes every hold of a lock, or that of one attempt. Returns the holds that were marked, as the server stores them.
    async fn revoke_one(
        &self,
        name: &LockName,
        reason: &str,
        attempt: &[u8],
    ) -> Result<(Fence, Vec<Vec<u8>>)> {
        let group = self.layout.group(name);
        let call = Call::new(&REVOKE, &self.keys(group, &[self.layout.key(name)]))
            .arg(self.layout.base(group))
            .arg(self.claim_ms())
            .arg(reason)
            .arg(self.floor())
            .arg(attempt);
        let Value::Array(answer) = call.run(&self.fleet, group.slot()).await? else { return Err(odd()) };
        match &answer[..] {
            [Value::Int(0)] => Err(Error::Unsupported(format!(
                "another Redis client holds {name}, and it would not learn that it is to stop: wait for it, or break the \
                 lock at once"
            ))),
            [Value::Int(1), Value::Int(fence), Value::Array(marked)] => {
                let marked = marked.iter().filter_map(|packed| match packed {
                    Value::BulkString(packed) if packed.len() > 32 => Some(packed.clone()),
                    _ => None,
                });
                Ok((self.seen(*fence)?, marked.collect()))
            }
            _ => Err(odd()),
        }
    }
}
