//! What is known of the servers: who is the primary, which node has which slot, and which of them failed lately.

use std::collections::HashSet;
use std::sync::Arc;

use redis::Value;

use crate::fault::Failure;
use crate::fleet::text;
use crate::layout::SLOTS;
use crate::link::Door;

/// Who serves what, as far as is known.
#[derive(Default)]
pub struct Topology {
    /// The primary, if there is only one at a time.
    pub chief: Option<Door>,
    /// The epoch in which the sentinels agreed on the last primary that we know of.
    pub chief_epoch: u64,
    /// Where each slot is.
    pub slots: Vec<Option<Arc<Door>>>,
    /// Every node that the last map named, replicas too.
    pub nodes: HashSet<Door>,
    /// Nodes that failed since the map was read: before a slot of theirs is used, the map is read again. What is known of
    /// other nodes stays.
    pub suspects: HashSet<Door>,
    /// How often the map was read.
    pub epoch: u64,
}

impl Topology {
    pub fn door_of(&self, slot: u16) -> Option<Arc<Door>> {
        self.slots.get(usize::from(slot)).cloned().flatten()
    }

    /// The node of a slot unless it failed since the map was read, and how often that was.
    pub fn trusted(&self, slot: u16) -> (Option<Arc<Door>>, u64) {
        (self.door_of(slot).filter(|door| !self.suspects.contains(&**door)), self.epoch)
    }

    /// What a node said about one slot.
    pub fn learn(&mut self, slot: u16, door: Door) {
        if let Some(entry) = self.slots.get_mut(usize::from(slot)) {
            *entry = Some(Arc::new(door));
        }
    }

    pub fn replace(&mut self, ranges: Vec<Range>) {
        self.slots = vec![None; usize::from(SLOTS)];
        self.nodes.clear();
        for Range { first, last, primary, replicas } in ranges {
            self.nodes.insert(primary.clone());
            self.nodes.extend(replicas);
            self.slots[usize::from(first)..=usize::from(last)].fill(Some(Arc::new(primary)));
        }
        self.suspects.clear();
        self.epoch += 1;
    }
}

pub fn no_owner(slot: u16) -> Failure {
    Failure::Away(format!(
        "no node owns slot {slot}: the nodes of the cluster do not agree, or it is being repaired"
    ))
}

/// `HOST:PORT`. Without a host, or with a question mark for one, it is that of the node that said so.
pub fn parse_door(text: &str, said_by: &Door) -> Option<Door> {
    let (host, port) = text.rsplit_once(':')?;
    door_at(Some(host.trim_matches(['[', ']']).to_owned()), port.parse().ok()?, said_by)
}

fn door_at(host: Option<String>, port: u16, said_by: &Door) -> Option<Door> {
    match (host.filter(|host| !host.is_empty() && host != "?"), said_by) {
        (Some(host), _) => Some(Door::Tcp(host, port)),
        (None, Door::Tcp(host, _)) => Some(Door::Tcp(host.clone(), port)),
        (None, Door::Unix(_)) => None,
    }
}

/// One line of CLUSTER SLOTS: from, to, the primary, its replicas.
#[derive(Debug, PartialEq, Eq)]
pub struct Range {
    first: u16,
    last: u16,
    primary: Door,
    replicas: Vec<Door>,
}

impl Range {
    pub fn parse(range: &Value, said_by: &Door) -> Option<Range> {
        let Value::Array(parts) = range else { return None };
        let [Value::Int(first), Value::Int(last), nodes @ ..] = &parts[..] else { return None };
        let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        let node = |node: &Value| {
            let Value::Array(node) = node else { return None };
            let [host, Value::Int(port), ..] = &node[..] else { return None };
            door_at(text(host), u16::try_from(*port).ok()?, said_by)
        };
        let primary = nodes.first().and_then(node).filter(|_| first <= last && last < SLOTS)?;
        let replicas = nodes[1..].iter().filter_map(node).collect();
        Some(Range { first, last, primary, replicas })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_without_a_host_leads_to_the_host_that_said_so() {
        let from = Door::Tcp("10.0.0.7".into(), 7000);
        let door = |text| parse_door(text, &from);
        assert_eq!(door("10.0.0.8:7001"), Some(Door::Tcp("10.0.0.8".into(), 7001)));
        assert_eq!(door("[::1]:7001"), Some(Door::Tcp("::1".into(), 7001)));
        assert_eq!(door("::1:7001"), Some(Door::Tcp("::1".into(), 7001)));
        assert_eq!(door(":7001"), Some(Door::Tcp("10.0.0.7".into(), 7001)));
        assert_eq!(door("?:7001"), Some(Door::Tcp("10.0.0.7".into(), 7001)));
        assert_eq!(door("nonsense"), None);
    }
}
