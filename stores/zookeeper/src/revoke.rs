//! Locks whose holders are to give them back: their nodes are written anew, with the reason. A renewal checks which write of a node is the
//! last, so it fails from then on, and the holder finds the reason in its node. The node stays where it is, and keeps the others out.

use std::sync::Arc;

use lockkeeper_core::{Error, Fence, LockName, Result};

use crate::breaking::{Measure, Node};
use crate::script::{Op, set};
use crate::store::Shared;
use crate::watch::Word;

impl Shared {
    /// Marks everybody who holds the name. A hold that only lingers ends, and a lock that is only held back is freed.
    pub async fn revoke(self: &Arc<Self>, name: &LockName, reason: &str) -> Result<Fence> {
        self.measure(name, Measure { word: Word::Revoked, reason }).await
    }

    /// The mark of a holder, in all its nodes. Nothing to do if it has it already.
    pub fn marked(&self, nodes: &[Node], reason: &str) -> Result<Vec<Op>> {
        let mut ops = Vec::new();
        for one in nodes.iter().map(|node| &node.one) {
            let Some((entry, read)) = one.entry().zip(one.read.as_ref()) else {
                return Err(Error::Unsupported(format!(
                    "{} is held by a client that is not Lockkeeper's, and cannot be asked to give it back: end that client, or take \
                     the lock away from it at once (break --now)",
                    nodes[0].name
                )));
            };
            if entry.revoked.as_deref() != Some(reason) {
                let data = entry.revoked(one.fence(self.base().number), reason);
                ops.push(set(&one.path, data, read.stat.version));
            }
        }
        Ok(ops)
    }
}
