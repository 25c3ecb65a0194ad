//! Renew: one write for many grants. It proves that the session is alive and that the nodes exist. It has to be a
//! write, because the data of a single server may be out of date.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use futures_util::future::join_all;
use lockkeeper_core::{BootInstant, Grant, Names, RenewOutcome, Result};
use lockkeeper_store_kit::{AttemptHash, hash_attempt};
use zookeeper_client as zk;

use crate::client::ZooKeeperClient;
use crate::codec::StoredRequest;
use crate::error::Failure;
use crate::hold_back::hold_back_for;
use crate::hold_registry::{SessionGrant, ZooKeeperHolds};
use crate::session::Session;
use crate::statements::{ANY, TxnOp, check, create, delete};

/// How many nodes one transaction checks.
const BATCH_NODES: usize = 128;

/// The revoked attempts, with the reasons.
type Revoked = HashMap<AttemptHash, Arc<str>>;

/// A hold that is to be renewed.
struct PendingRenewal {
    hash: AttemptHash,
    names: Names,
    known: SessionGrant,
    /// The content of the hold-back node to create, if the hold needs one and has none.
    node: Option<Vec<u8>>,
    /// The hold-back node exists, and is replaced.
    replace: bool,
}

/// Renews holds.
pub struct Renewer {
    pub client: Arc<ZooKeeperClient>,
    pub registry: Arc<ZooKeeperHolds>,
}

impl Renewer {
    pub async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        let now = self.client.clock.now();
        let hashes: Vec<AttemptHash> = grants.iter().map(|grant| hash_attempt(&grant.key.attempt)).collect();
        let (mut renewed, mut revoked, mut no_reply) = (HashSet::new(), HashMap::new(), HashSet::new());
        if self.has_renewable(&hashes) {
            let session = self.client.connection.session().await?;
            let mut due = self.due(&session, &hashes);
            while !due.is_empty() {
                let batch = due.split_off(due.len() - batch_len(&due));
                let hashes_of_batch: Vec<AttemptHash> = batch.iter().map(|renewal| renewal.hash).collect();
                match self.renew_batch(&session, batch, &mut revoked).await {
                    Ok(confirmed) => self.register_renewed(&session, confirmed, &mut renewed).await,
                    Err(Failure::SessionEnded) => break,
                    Err(failure) if renewed.is_empty() && revoked.is_empty() => return Err(failure.into()),
                    Err(failure) => {
                        // Other batches got replies. The outcome of this one and of the remaining ones is unknown, and
                        // the broken connection is not used again in this call.
                        tracing::debug!(?failure, "some renewals got no reply; their outcome is unknown");
                        no_reply.extend(
                            hashes_of_batch.into_iter().chain(due.drain(..).map(|renewal| renewal.hash)),
                        );
                    }
                }
            }
        }
        let answers = hashes.iter().zip(grants).map(|(hash, grant)| match revoked.get(hash) {
            Some(reason) => RenewOutcome::Revoked(Arc::clone(reason)),
            None if no_reply.contains(hash) => RenewOutcome::Unknown,
            None => self.extend_lease(now, hash, grant, &renewed),
        });
        let answers = answers.collect();
        self.registry.wake();
        Ok(answers)
    }

    /// Whether any of these holds can be renewed. A hold of a session that has ended is lost, without a request.
    fn has_renewable(&self, hashes: &[AttemptHash]) -> bool {
        let table = self.registry.table();
        let known = |hash: &AttemptHash| table.holds.get(hash)?.grant.as_ref();
        hashes.iter().filter_map(known).any(|known| !known.session.is_over())
    }

    /// The holds to renew, with the hold-back nodes to create. A release that begins from now on knows that these may
    /// exist.
    fn due(&self, session: &Session, hashes: &[AttemptHash]) -> Vec<PendingRenewal> {
        let mut table = self.registry.table();
        let mut due = Vec::new();
        for hash in
            hashes.iter().filter(|hash| !table.ending.contains(*hash)).copied().collect::<HashSet<_>>()
        {
            let Some(hold) = table.holds.get_mut(&hash) else { continue };
            let Some(known) = hold.grant.as_mut().filter(|known| known.session.id == session.id) else {
                continue;
            };
            let node = if known.has_hold_back { None } else { hold_back_for(session, &known.stored) };
            known.writing_hold_back |= node.is_some();
            due.push(PendingRenewal {
                hash,
                names: hold.names.clone(),
                known: known.clone(),
                node,
                replace: false,
            });
        }
        due
    }

    async fn renew_batch(
        &self,
        session: &Session,
        mut batch: Vec<PendingRenewal>,
        revoked: &mut Revoked,
    ) -> Result<Vec<PendingRenewal>, Failure> {
        while !batch.is_empty() {
            let ops: Vec<TxnOp> = batch.iter().flat_map(|renewal| self.renewal_ops(renewal)).collect();
            match session.multi(&ops).await {
                Ok(_) => break,
                Err(Failure::Rejected(step, zk::Error::NodeExists)) => {
                    // The hold-back node was created by a renewal without a reply, or by the same attempt in an
                    // earlier session. It is replaced in one transaction, so that there is no moment without one.
                    if let Some(renewal) = renewal_of_step(&mut batch, step) {
                        renewal.replace = true;
                    }
                    continue;
                }
                Err(Failure::Rejected(step, zk::Error::NoNode | zk::Error::BadVersion)) => {
                    // Or a hold-back node that was to be replaced is gone.
                    if let Some(renewal) = renewal_of_step(&mut batch, step).filter(|renewal| renewal.replace)
                    {
                        renewal.replace = false;
                        self.delete_hold_backs(session, renewal).await?;
                    }
                }
                Err(failure) => return Err(failure),
            }
            // At least one node is gone or was rewritten: find out which.
            let found = join_all(batch.iter().map(|renewal| read_status(session, &renewal.known))).await;
            let mut left = Vec::new();
            for (renewal, found) in batch.into_iter().zip(found) {
                match found? {
                    GrantStatus::There => left.push(renewal),
                    GrantStatus::Revoked(reason) => _ = revoked.insert(renewal.hash, reason),
                    GrantStatus::Gone => {}
                }
            }
            batch = left;
        }
        Ok(batch)
    }

    fn renewal_ops(&self, renewal: &PendingRenewal) -> Vec<TxnOp> {
        let mut ops: Vec<TxnOp> =
            renewal.known.paths.iter().map(|path| check(path, renewal.known.version)).collect();
        if let Some(node) = &renewal.node {
            for name in renewal.names.iter() {
                let path = self.client.keys.hold_back(name, &renewal.hash);
                ops.extend(renewal.replace.then(|| delete(&path, ANY)));
                ops.push(create(path, node.clone()));
            }
        }
        ops
    }

    async fn delete_hold_backs(&self, session: &Session, renewal: &PendingRenewal) -> Result<(), Failure> {
        if renewal.node.is_some() {
            for name in renewal.names.iter() {
                session.delete(&self.client.keys.hold_back(name, &renewal.hash)).await?;
            }
        }
        Ok(())
    }

    /// Records the renewals. A release that came meanwhile may not have deleted the new hold-back node, so it is
    /// deleted here.
    async fn register_renewed(
        &self,
        session: &Session,
        confirmed: Vec<PendingRenewal>,
        renewed: &mut HashSet<AttemptHash>,
    ) {
        for renewal in confirmed {
            let held =
                match self.registry.table().holds.get_mut(&renewal.hash).and_then(|hold| hold.grant.as_mut())
                {
                    Some(known) if known.paths == renewal.known.paths => {
                        known.has_hold_back |= renewal.node.is_some();
                        known.writing_hold_back = false;
                        true
                    }
                    _ => false,
                };
            if held {
                renewed.insert(renewal.hash);
            } else {
                _ = self.delete_hold_backs(session, &renewal).await;
            }
        }
    }

    /// Extends the lease in the registry, or reports its loss.
    fn extend_lease(
        &self,
        now: BootInstant,
        hash: &AttemptHash,
        grant: &Grant,
        renewed: &HashSet<AttemptHash>,
    ) -> RenewOutcome {
        let mut table = self.registry.table();
        match table.holds.get_mut(hash) {
            Some(hold) if renewed.contains(hash) => {
                hold.expires = hold.expires.max(now + grant.ttl);
                RenewOutcome::Renewed
            }
            Some(hold) if hold.caller.is_none() => {
                // A later success would not restore the hold. Remove what is left of it.
                (hold.grant, hold.expires) = (None, now + grant.ttl);
                RenewOutcome::Lost
            }
            _ => RenewOutcome::Lost,
        }
    }
}

/// The renewal that an operation belongs to.
fn renewal_of_step(batch: &mut [PendingRenewal], step: usize) -> Option<&mut PendingRenewal> {
    let mut first = 0;
    batch.iter_mut().find(|renewal| {
        let notes = if renewal.node.is_some() {
            renewal.names.count() * if renewal.replace { 2 } else { 1 }
        } else {
            0
        };
        first += renewal.known.paths.len() + notes;
        step < first
    })
}

/// How many renewals at the end of `due` fit into one transaction, at least one.
fn batch_len(due: &[PendingRenewal]) -> usize {
    let mut nodes = 0;
    let fits = |renewal: &&PendingRenewal| {
        nodes += renewal.known.paths.len();
        nodes <= BATCH_NODES
    };
    due.iter().rev().take_while(fits).count().max(1)
}

/// The state of a hold that could not be renewed together with the others.
enum GrantStatus {
    There,
    /// The nodes exist, and the holder must release them.
    Revoked(Arc<str>),
    Gone,
}

async fn read_status(session: &Session, known: &SessionGrant) -> Result<GrantStatus, Failure> {
    let mut answer = GrantStatus::There;
    for found in join_all(known.paths.iter().map(|path| session.get(path))).await {
        match Failure::if_exists(found)? {
            None => return Ok(GrantStatus::Gone),
            Some((_, stat)) if stat.version == known.version => {}
            Some((data, _)) => {
                match serde_json::from_slice::<StoredRequest>(&data).ok().and_then(|stored| stored.revoked) {
                    Some(reason) => answer = GrantStatus::Revoked(reason.into()),
                    None => return Ok(GrantStatus::Gone),
                }
            }
        }
    }
    Ok(answer)
}
