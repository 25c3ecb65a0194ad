//! The report of a store about its servers: versions, roles, room that is left, clocks. The profile holds the facts that a
//! request depends on; an examination may cost several round trips, and changes nothing that stays.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::{BootInstant, Finding, Result, WallTime};

/// One server of a store, or the file of an embedded one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerReport {
    /// Its address, without a password.
    pub address: String,
    /// Its version, if it reported one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Its role: primary, replica, leader, follower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// Settings and numbers, by the names that the server's own documentation uses.
    pub facts: BTreeMap<String, String>,
}

impl ServerReport {
    /// A report about the server at this address, without facts.
    pub fn new(address: impl Into<String>) -> ServerReport {
        ServerReport { address: address.into(), ..ServerReport::default() }
    }

    /// Adds a fact.
    #[must_use]
    pub fn fact(mut self, name: impl Into<String>, value: impl ToString) -> ServerReport {
        self.facts.insert(name.into(), value.to_string());
        self
    }
}

/// The report of a store about its servers, beyond its profile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Examination {
    /// The servers, those that sent no reply included.
    pub servers: Vec<ServerReport>,
    /// Faults of the servers, and faults that are about to happen.
    pub findings: Vec<Finding>,
}

/// One reading of a server's wall clock. The server read it at some moment between `sent` and `received`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClockReading {
    /// The address of the server.
    pub server: String,
    /// The time that the server returned.
    pub time: WallTime,
    /// The step of that clock: a server that counts whole seconds has a resolution of one second.
    pub resolution: Duration,
    /// When the client sent the request.
    pub sent: BootInstant,
    /// When the client received the reply.
    pub received: BootInstant,
    /// The client's wall clock when it received the reply.
    pub local: WallTime,
}

/// The examination of a store. No method has a default body: the author of a store decides what can be measured from outside.
#[async_trait]
pub trait Examine: Send + Sync {
    /// Reports what the servers say about themselves. It asks each server, so that a dead member of a cluster is found although the store
    /// works without it. It changes nothing.
    async fn examine(&self) -> Result<Examination>;

    /// Reads the wall clock of each server whose clock decides about leases or fences. Empty where no clock but that of this host does.
    async fn read_clocks(&self) -> Result<Vec<ClockReading>>;
}
