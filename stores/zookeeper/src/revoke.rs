//! Revoke: ask the holders of a lock to release it. Their nodes are rewritten with the reason. A renewal checks the
//! data version of its nodes, so it fails from then on, and the holder finds the reason in its node. The node keeps
//! its position, so the lock stays held.

use lockkeeper_core::{Error, Result};
use lockkeeper_store_kit::admission::AdmissionEntry;

use crate::queue::HolderNode;
use crate::statements::{TxnOp, set};

/// The operations that revoke a hold in all its nodes. None if it was revoked for this reason already.
pub fn revoke_ops(nodes: &[HolderNode], base: u64, reason: &str) -> Result<Vec<TxnOp>> {
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
            let data = stored.revoked(entry.fence(base), reason);
            ops.push(set(&entry.path, data, read.stat.version));
        }
    }
    Ok(ops)
}
