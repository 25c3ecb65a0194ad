//! The facts that this process knows of its grants. All locks of a process use one session, which does not end when one lock is not renewed:
//! the process releases such a lock itself (`unknown.rs`), and the session is for the death of the process.

use std::sync::Arc;

use lockkeeper_core::Fence;
use lockkeeper_store_kit::{HoldRegistry, KnownGrant, OwnHold};

use crate::codec::StoredRequest;
use crate::session::Session;

/// The holds and requests of this process.
pub type ZooKeeperHolds = HoldRegistry<SessionGrant>;

/// A hold of this process.
pub type SessionHold = OwnHold<SessionGrant>;

/// A grant, and the session that it depends on.
#[derive(Clone)]
pub struct SessionGrant {
    pub session: Arc<Session>,
    /// The paths of its nodes, one for each name. All have this data version.
    pub paths: Vec<String>,
    pub version: i32,
    pub fence: Fence,
    pub stored: StoredRequest,
    /// Its hold-back nodes exist.
    pub has_hold_back: bool,
    /// Its hold-back nodes may exist: a renewal that creates them is in flight, or got no reply.
    pub writing_hold_back: bool,
}

impl KnownGrant for SessionGrant {
    fn fence(&self) -> Fence {
        self.fence
    }
}
