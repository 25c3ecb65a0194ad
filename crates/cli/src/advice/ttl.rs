//! The ttl, with its reason.

use std::time::Duration;

use crate::duration;

/// The kind of lease of a mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseKind {
    /// None: a single statement or request.
    None,
    /// A lock that is renewed while the work runs.
    Renewed,
    /// A reservation that a person has to use in time: nothing renews it.
    Reservation,
}

/// A ttl, and why it is so long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TtlAdvice {
    /// `None`: there is no lease.
    pub ttl: Option<Duration>,
    pub why: String,
}

/// The default: long enough for every pause of a healthy host, short enough for those who wait for a dead holder.
const DEFAULT: Duration = Duration::from_secs(30);
/// Where the work is done in a moment, a dead holder need not block others for longer than this.
const QUICK: Duration = Duration::from_secs(10);

/// The ttl for work that takes `work`.
pub fn choose(lease: LeaseKind, work: Duration) -> TtlAdvice {
    let took = duration::exact(work);
    match lease {
        LeaseKind::None => {
            TtlAdvice { ttl: None, why: "no process holds anything after the statement".into() }
        }
        LeaseKind::Reservation => TtlAdvice {
            ttl: Some(work),
            why: format!(
                "the reservation lasts as long as a person may take ({took}), nothing renews it, and the row frees itself"
            ),
        },
        LeaseKind::Renewed if work < Duration::from_secs(1) => TtlAdvice {
            ttl: Some(QUICK),
            why: format!(
                "the work takes {took}, so the ttl matters only after a crash: others wait for that long. It must stay ten times longer \
                 than the longest pause of the host (`lockkeeper doctor` measures it)"
            ),
        },
        LeaseKind::Renewed => TtlAdvice {
            ttl: Some(DEFAULT),
            why: format!(
                "the lease is renewed every third of it, so the work may take {took} or more; after a crash others wait for one ttl. It \
                 must stay ten times longer than the longest pause of the host (`lockkeeper doctor` measures it)"
            ),
        },
    }
}
