//! What was sent on a connection that is gone may still arrive, even after we have looked for it and found nothing: then it
//! would stand in line, with nobody behind it. So every ask checks a gate, a node of our session, in the transaction that
//! makes its own node; and whoever has lost an answer closes the gate before it looks. What has not passed by then never will.

use std::sync::{Mutex, PoisonError};

use zookeeper_client as zk;

use crate::fault::Failure;
use crate::link::Session;
use crate::script::{ANY, Op, check, delete, stand};
use crate::store::Shared;

/// The gate of a session: how many there were, and the node of the last.
#[derive(Default)]
pub struct Gate {
    now: Mutex<(u64, String)>,
    /// One closes it at a time; those who come meanwhile find it closed.
    turn: tokio::sync::Mutex<()>,
}

impl Gate {
    fn now(&self) -> (u64, String) {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Shared {
    /// The step that only happens while the gate is open.
    pub async fn through_gate(&self, session: &Session) -> Result<Op, Failure> {
        if session.gate.now().0 == 0 {
            self.close_gate(session).await?;
        }
        Ok(check(session.gate.now().1, ANY))
    }

    /// It was found closed: by us, and there is another one, or by somebody's hand.
    pub async fn mend_gate(&self, session: &Session, found: &Op) -> Result<(), Failure> {
        let still = check(session.gate.now().1, ANY).is_same_check(found);
        if still { self.close_gate(session).await } else { Ok(()) }
    }

    /// Nothing that was sent through the gate before happens after this. It is a write, which a majority has to take: so
    /// whatever did happen can be seen from now on.
    pub async fn close_gate(&self, session: &Session) -> Result<(), Failure> {
        let (seen, _) = session.gate.now();
        let _turn = session.gate.turn.lock().await;
        let (count, mut old) = session.gate.now();
        if count != seen {
            return Ok(());
        }
        loop {
            let mut ops = vec![stand(self.layout.gate(session.id), Vec::new())];
            ops.extend((!old.is_empty()).then(|| delete(&old, ANY)));
            match session.multi(&ops).await {
                Ok(done) => {
                    let fresh = done.created().next().unwrap_or_default().to_owned();
                    *session.gate.now.lock().unwrap_or_else(PoisonError::into_inner) = (count + 1, fresh);
                    return Ok(());
                }
                Err(Failure::Refused(0, zk::Error::NoNode)) => {
                    session.make_all(&self.layout.gates(), self.link.acls()).await?;
                }
                // Somebody deleted it, or we did and were not told: nothing passes there any more.
                Err(Failure::Refused(_, zk::Error::NoNode)) => old.clear(),
                Err(failure) => return Err(failure),
            }
        }
    }
}
