//! The facts that this process knows of its grants. All locks with the same lease length share one etcd lease, so etcd does not end a single
//! hold that is not renewed: the process ends it (`unknown.rs`).

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::Fence;
use lockkeeper_store_kit::{HoldRegistry, KnownGrant, OwnHold};

use crate::client::EtcdClient;
use crate::codec::EntryValue;
use crate::key_slots::KeySlot;
use crate::keys::KeyId;
use crate::lease::EtcdLease;

/// How late a request without a reply is usually applied, at most.
const MAX_DELAY: Duration = Duration::from_secs(10);
/// How often the process looks for such a request: with a timeout of 3 s, for the last time after 22 minutes.
const MAX_RECHECKS: u32 = 4;

/// The holds and requests of this process.
pub type EtcdHolds = HoldRegistry<GrantRecord>;

/// The facts that this process knows of a grant.
#[derive(Clone, Debug)]
pub struct GrantRecord {
    pub location: KeyLocation,
    /// The revision that wrote its keys.
    pub written: i64,
    pub fence: Fence,
    pub lease: Arc<EtcdLease>,
    pub value: EntryValue,
}

impl KnownGrant for GrantRecord {
    fn fence(&self) -> Fence {
        self.fence
    }
}

/// Where the keys of a grant are.
#[derive(Clone, Debug)]
pub struct KeyLocation {
    /// The last part of its keys.
    pub key_id: KeyId,
    /// `Some`: a key slot of this process.
    pub slot: Option<Arc<KeySlot>>,
}

impl KeyLocation {
    /// Its keys are gone, so the slot can be reused.
    pub fn release(&self) {
        if let Some(slot) = &self.slot {
            slot.release();
        }
    }
}

impl From<KeyId> for KeyLocation {
    fn from(key_id: KeyId) -> Self {
        KeyLocation { key_id, slot: None }
    }
}

impl From<KeySlot> for KeyLocation {
    fn from(slot: KeySlot) -> Self {
        KeyLocation { key_id: slot.key_id(), slot: Some(Arc::new(slot)) }
    }
}

/// Schedules another look for a request without a reply. etcd may apply it after its end: TCP delivers what a closed connection has left to
/// send for minutes. So the process looks for it again, each time later, until that is practically impossible.
pub fn schedule_recheck(
    registry: &EtcdHolds,
    client: &EtcdClient,
    attempt: KeyId,
    hold: OwnHold<GrantRecord>,
) {
    let (rechecks, outcome_unknown) = (hold.rechecks + 1, hold.rechecks + 1 < MAX_RECHECKS);
    let pause = client.connection.timeout() * 2 + MAX_DELAY;
    let expires = client.clock.now() + pause * 4u32.pow(hold.rechecks.min(MAX_RECHECKS));
    registry.table().ending.remove(&attempt);
    registry.schedule_cleanup(attempt, OwnHold { outcome_unknown, expires, rechecks, ..hold });
}
