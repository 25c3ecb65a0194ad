//! Revoke: ask the holders of a lock to release it. Their nodes are rewritten with the reason. A renewal checks the
//! data version of its nodes, so it fails from then on, and the holder finds the reason in its node. The node keeps
//! its position, so the lock stays held.

use std::sync::Arc;

use lockkeeper_core::{Error, Fence, LockName, Result};

use crate::break_lock::{BreakRequest, HolderNode};
use crate::events::EventTag;
use crate::statements::{TxnOp, set};
use crate::store::StoreInner;

impl StoreInner {
    /// Revokes all holds of a name. A minimum hold of a released lock ends, and a lock-delay ends too.
    pub async fn revoke(self: &Arc<Self>, name: &LockName, reason: &str) -> Result<Fence> {
        self.apply_break(name, BreakRequest { tag: EventTag::Revoked, reason }).await
    }

    /// The operations that revoke a hold in all its nodes. None if it was revoked for this reason already.
    pub fn revoke_ops(&self, nodes: &[HolderNode], reason: &str) -> Result<Vec<TxnOp>> {
        let mut ops = Vec::new();
        for entry in nodes.iter().map(|node| &node.entry) {
            let Some((stored, read)) = entry.stored().zip(entry.content.as_ref()) else {
                return Err(Error::Unsupported(format!(
                    "{} is held by a client that is not Lockkeeper's, which cannot be asked to release it: end that client, or take \
                     the lock away from it at once (break --now)",
                    nodes[0].name
                )));
            };
            if stored.revoked.as_deref() != Some(reason) {
                let data = stored.revoked(entry.fence(self.base().number), reason);
                ops.push(set(&entry.path, data, read.stat.version));
            }
        }
        Ok(ops)
    }
}
