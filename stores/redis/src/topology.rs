//! The client's view of the servers: the primary, the node of each slot, and the nodes that failed lately.

use std::collections::HashSet;
use std::sync::Arc;

use redis::Value;

use crate::connection::{Endpoint, text_of};
use crate::error::Failure;
use crate::keys::SLOTS;

/// The primary behind Sentinel, or the slot map of a cluster.
#[derive(Default)]
pub struct Topology {
    /// The primary, where there is one at a time.
    pub primary: Option<Endpoint>,
    /// The epoch in which the sentinels agreed on that primary.
    pub primary_epoch: u64,
    /// The node of each slot.
    pub slots: Vec<Option<Arc<Endpoint>>>,
    /// All nodes of the last slot map, replicas included, and the node that sent it.
    pub nodes: HashSet<Endpoint>,
    /// Nodes that failed since the slot map was read. The client reads the map again before it uses a slot of theirs, and
    /// goes on using the slots of the other nodes.
    pub suspects: HashSet<Endpoint>,
    /// How often the slot map was read, or another server became the primary.
    pub epoch: u64,
}

impl Topology {
    /// The node of a slot.
    pub fn node_of(&self, slot: u16) -> Option<Arc<Endpoint>> {
        self.slots.get(usize::from(slot)).cloned().flatten()
    }

    /// The node of a slot, unless it failed since the slot map was read, and the map's epoch.
    pub fn trusted(&self, slot: u16) -> (Option<Arc<Endpoint>>, u64) {
        (self.node_of(slot).filter(|node| !self.suspects.contains(&**node)), self.epoch)
    }

    /// Records a redirect of one slot.
    pub fn set_node(&mut self, slot: u16, node: Endpoint) {
        if let Some(entry) = self.slots.get_mut(usize::from(slot)) {
            *entry = Some(Arc::new(node));
        }
    }

    /// Records another primary.
    pub fn set_primary(&mut self, primary: Endpoint, primary_epoch: u64) {
        (self.primary, self.primary_epoch) = (Some(primary), primary_epoch);
        self.epoch += 1;
    }

    /// Replaces the slot map.
    pub fn replace(&mut self, ranges: Vec<SlotRange>, sent_by: Endpoint) {
        self.slots = vec![None; usize::from(SLOTS)];
        self.nodes.clear();
        for SlotRange { first, last, primary, replicas } in ranges {
            self.nodes.insert(primary.clone());
            self.nodes.extend(replicas);
            self.slots[usize::from(first)..=usize::from(last)].fill(Some(Arc::new(primary)));
        }
        self.nodes.insert(sent_by);
        self.suspects.clear();
        self.epoch += 1;
    }
}

/// The failure of a request for a slot that no node serves.
pub fn no_owner(slot: u16) -> Failure {
    Failure::NotSent(format!(
        "no node owns slot {slot}: the nodes of the cluster do not agree, or it is being repaired"
    ))
}

/// Reads `HOST:PORT`. Without a host, or with a question mark for one, the host is that of the node that sent it.
pub fn parse_endpoint(text: &str, sent_by: &Endpoint) -> Option<Endpoint> {
    let (host, port) = text.rsplit_once(':')?;
    endpoint_at(Some(host.trim_matches(['[', ']']).to_owned()), port.parse().ok()?, sent_by)
}

fn endpoint_at(host: Option<String>, port: u16, sent_by: &Endpoint) -> Option<Endpoint> {
    match (host.filter(|host| !host.is_empty() && host != "?"), sent_by) {
        (Some(host), _) => Some(Endpoint::Tcp(host, port)),
        (None, Endpoint::Tcp(host, _)) => Some(Endpoint::Tcp(host.clone(), port)),
        (None, Endpoint::Unix(_)) => None,
    }
}

/// One entry of `CLUSTER SLOTS`: the first and the last slot, the primary, its replicas.
#[derive(Debug, PartialEq, Eq)]
pub struct SlotRange {
    first: u16,
    last: u16,
    primary: Endpoint,
    replicas: Vec<Endpoint>,
}

impl SlotRange {
    pub fn parse(range: &Value, sent_by: &Endpoint) -> Option<SlotRange> {
        let Value::Array(parts) = range else { return None };
        let [Value::Int(first), Value::Int(last), nodes @ ..] = &parts[..] else { return None };
        let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        let node = |node: &Value| {
            let Value::Array(node) = node else { return None };
            let [host, Value::Int(port), ..] = &node[..] else { return None };
            endpoint_at(text_of(host), u16::try_from(*port).ok()?, sent_by)
        };
        let primary = nodes.first().and_then(node).filter(|_| first <= last && last < SLOTS)?;
        let replicas = nodes[1..].iter().filter_map(node).collect();
        Some(SlotRange { first, last, primary, replicas })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_without_a_host_leads_to_the_host_that_sent_it() {
        let from = Endpoint::Tcp("10.0.0.7".into(), 7000);
        let endpoint = |text| parse_endpoint(text, &from);
        assert_eq!(endpoint("10.0.0.8:7001"), Some(Endpoint::Tcp("10.0.0.8".into(), 7001)));
        assert_eq!(endpoint("[::1]:7001"), Some(Endpoint::Tcp("::1".into(), 7001)));
        assert_eq!(endpoint("::1:7001"), Some(Endpoint::Tcp("::1".into(), 7001)));
        assert_eq!(endpoint(":7001"), Some(Endpoint::Tcp("10.0.0.7".into(), 7001)));
        assert_eq!(endpoint("?:7001"), Some(Endpoint::Tcp("10.0.0.7".into(), 7001)));
        assert_eq!(endpoint("no-port"), None);
    }
}
