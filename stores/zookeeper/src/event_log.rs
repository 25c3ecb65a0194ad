//! The event log: the nodes that transactions create while a client watches, and whether one does.

use std::sync::Arc;

use lockkeeper_core::{Fence, Holder, LockName, Names};

use crate::client::ZooKeeperClient;
use crate::codec::{EventTag, StoredEvent};
use crate::error::Failure;
use crate::fence_base::FenceBase;
use crate::session::Session;
use crate::statements::{TxnOp, create_ephemeral};

/// Adds events to transactions.
pub struct EventLog {
    pub client: Arc<ZooKeeperClient>,
    pub base: Arc<FenceBase>,
}

impl EventLog {
    /// Whether a client watches, as far as this process knows.
    pub fn is_watched(&self) -> bool {
        self.base.get().watched > self.client.connection.known_ensemble_time().unwrap_or(0)
    }

    /// The operation that creates an event node, if a client watches.
    pub fn event(
        &self,
        name: &LockName,
        tag: EventTag,
        fence: Option<Fence>,
        holder: Option<&Holder>,
    ) -> Option<TxnOp> {
        self.is_watched().then(|| {
            self.event_op(&StoredEvent {
                name: name.clone(),
                tag,
                fence,
                reason: None,
                holder: holder.cloned(),
            })
        })
    }

    /// The same for a break or a revocation, with its reason.
    pub fn event_with_reason(&self, name: &LockName, tag: EventTag, reason: &str) -> Option<TxnOp> {
        let reason = Some(reason.to_owned());
        let event = StoredEvent { name: name.clone(), tag, fence: None, reason, holder: None };
        self.is_watched().then(|| self.event_op(&event))
    }

    fn event_op(&self, event: &StoredEvent) -> TxnOp {
        create_ephemeral(
            format!("{}/e-", self.client.keys.events()),
            serde_json::to_vec(event).unwrap_or_default(),
        )
    }

    /// Emits an event that changes no lock, without waiting for success.
    pub async fn emit_event(&self, names: &Names, tag: EventTag, holder: &Holder) {
        let ops: Vec<TxnOp> =
            names.iter().filter_map(|name| self.event(name, tag, None, Some(holder))).collect();
        if let (false, Ok(session)) = (ops.is_empty(), self.client.connection.session().await) {
            _ = self.client.write(&session, &ops).await;
        }
    }

    /// Creates the parent of the event nodes if a client watches and an administrator has deleted it: without the
    /// parent every transaction with an event fails. The node is persistent, because it may be empty while a watch is
    /// announced.
    pub async fn ensure_events_node(&self, session: &Session) -> Result<(), Failure> {
        if self.is_watched() {
            session.create_with_parents(&self.client.keys.events(), self.client.connection.acls()).await?;
        }
        Ok(())
    }
}
