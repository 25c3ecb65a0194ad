//! Clients that are wrong about their own lease, on a store that is fine.

use std::collections::HashMap;
use std::sync::Mutex;

use lockkeeper_core::{Attempt, BootInstant, Error, Grant, IgnorePoison, RenewOutcome, Result};

use super::Bug;

/// When a client has last renewed each of its grants, and which of them it renews no more.
#[derive(Default)]
pub(super) struct RenewalTimes(Mutex<HashMap<Attempt, LeaseTime>>);

#[derive(Clone, Copy)]
struct LeaseTime {
    renewed: BootInstant,
    ended: bool,
}

impl RenewalTimes {
    /// The answer of a client whose renewals have ended with an outage: it noticed a pause of nearly half a ttl between two renewals. `None`:
    /// the renewal goes to the store.
    pub fn renew(&self, bug: Bug, now: BootInstant, grants: &[Grant]) -> Option<Result<Vec<RenewOutcome>>> {
        if !matches!(bug, Bug::RenewalStopsAfterAnOutage | Bug::NeverReconnects) {
            return None;
        }
        let mut times = self.0.lock().ignore_poison();
        let mut ended = false;
        for grant in grants {
            let first = LeaseTime { renewed: grant.sent_at, ended: false };
            let time = times.entry(grant.key.attempt).or_insert(first);
            time.ended |= now.since(time.renewed) > grant.ttl * 49 / 100;
            time.renewed = now;
            ended |= time.ended;
        }
        ended.then(|| match bug {
            Bug::NeverReconnects => Err(Error::Unavailable("the connection was lost".into())),
            _ => Ok(vec![RenewOutcome::Renewed; grants.len()]),
        })
    }
}
