//! Renewing grants: those of the same names in one update, the others at the same time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use lockkeeper_core::{BootInstant, Error, Grant, LockName, RenewOutcome, Result};
use lockkeeper_host::{Clock, sleep_until};

use crate::backoff::jitter;
use crate::break_lock::revoke_reason;
use crate::cas::{CasDecision, LockTable, WorkingCopy};
use crate::keys::attempt_hash;
use crate::own_leases::OwnLeases;

/// Renews holds.
pub struct Renewer {
    pub clock: Arc<dyn Clock>,
    pub locks: Arc<LockTable>,
    pub own_leases: Arc<OwnLeases>,
}

impl Renewer {
    /// Renews grants of the same names in one update, because they are in the same item. Grants of different names are updates
    /// of their own, all at once: one that cannot be renewed now does not delay the others.
    pub async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        let clock = &*self.clock;
        let shortest = grants.iter().map(|grant| grant.ttl).min().unwrap_or_default();
        let until = clock.now() + shortest / 4;
        let mut groups: BTreeMap<&[LockName], Vec<usize>> = BTreeMap::new();
        for (i, grant) in grants.iter().enumerate() {
            groups.entry(grant.key.names.as_slice()).or_default().push(i);
        }
        let renew_one = async |group: Vec<usize>| {
            let members: Vec<&Grant> = group.iter().map(|i| &grants[*i]).collect();
            let outcomes = self.renew_until(&members, until).await;
            (group, outcomes)
        };
        let mut in_flight: FuturesUnordered<_> = groups.into_values().map(renew_one).collect();
        let mut outcomes = vec![RenewOutcome::Unknown; grants.len()];
        let (mut answered, mut failed) = (false, None);
        loop {
            tokio::select! {
                next = in_flight.next() => match next {
                    Some((group, Ok(replies))) => {
                        answered = true;
                        group.into_iter().zip(replies).for_each(|(i, outcome)| outcomes[i] = outcome);
                    }
                    Some((_, Err(error))) => failed = failed.or(Some(error)),
                    None => break,
                },
                // The caller must learn in time which grants were renewed: the groups without a reply are cancelled.
                () = sleep_until(clock, until), if answered => break,
            }
        }
        match failed {
            Some(error) if !answered => Err(error),
            _ => Ok(outcomes),
        }
    }

    async fn renew_until(&self, grants: &[&Grant], until: BootInstant) -> Result<Vec<RenewOutcome>> {
        let clock = &*self.clock;
        loop {
            match self.renew_group(grants).await {
                Err(Error::Unavailable(_) | Error::Unknown(_) | Error::Limited(_)) if clock.now() < until => {
                    sleep_until(clock, clock.now() + jitter(Duration::from_millis(100))).await;
                }
                outcome => return outcome,
            }
        }
    }

    /// Renews grants of the same names in one update.
    async fn renew_group(&self, grants: &[&Grant]) -> Result<Vec<RenewOutcome>> {
        let Some(first) = grants.first() else { return Ok(Vec::new()) };
        let hashes: Vec<String> = grants.iter().map(|grant| attempt_hash(&grant.key.attempt)).collect();
        let decide = |copies: &mut [WorkingCopy]| {
            let outcomes: Vec<RenewOutcome> = hashes.iter().map(|hash| self.renew_in(copies, hash)).collect();
            Ok(CasDecision::write_if_changed(copies, outcomes))
        };
        let (outcomes, sent_at) = self.locks.update_with_priority(true, &first.key.names, decide).await?;
        for ((grant, hash), outcome) in grants.iter().zip(&hashes).zip(&outcomes) {
            match outcome {
                RenewOutcome::Renewed => self.own_leases.record(hash, sent_at, grant.ttl),
                // The grant is still held until its current lease ends.
                RenewOutcome::Revoked(_) | RenewOutcome::Unknown => {}
                RenewOutcome::Lost => self.own_leases.remove(hash),
            }
        }
        Ok(outcomes)
    }

    fn renew_in(&self, copies: &mut [WorkingCopy], attempt_hash: &str) -> RenewOutcome {
        let is_active = |copy: &WorkingCopy| {
            let hold = copy.item.state.find(attempt_hash);
            hold.is_some_and(|hold| self.own_leases.is_active(hold, &copy.observed))
        };
        if !copies.iter().all(is_active) {
            // The rest of a lost grant must not keep waiters out.
            copies.iter_mut().for_each(|copy| copy.end_uncleanly(attempt_hash));
            return RenewOutcome::Lost;
        }
        if let Some(reason) = revoke_reason(copies, |hold| hold.attempt_hash == attempt_hash) {
            return RenewOutcome::Revoked(reason.into());
        }
        copies.iter_mut().for_each(|copy| copy.renew(attempt_hash));
        RenewOutcome::Renewed
    }
}
