//! Starts Redis clusters, and moves slots between their nodes.

use std::io;
use std::net::SocketAddr;

use super::redis::redis_node;
use super::wait::{expect, field, wait_for};
use super::{RedisOptions, Server, Skip, redis_call};

const SLOTS: usize = 16_384;

/// A Redis cluster of primaries, which share the slots evenly, with or without a replica each. Dropping it kills all nodes.
///
/// A node that is restarted finds its identity and its slots again; its keys only with an append-only file.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<Server>,
    ids: Vec<String>,
    /// How many of the nodes began as primaries: the first ones.
    primaries: usize,
}

/// A slot on its way from one node to another. Dropping this leaves it on its way.
#[derive(Debug)]
#[must_use = "the slot is neither here nor there until the migration is finished"]
pub struct Migration {
    slot: u16,
    from: usize,
    to: usize,
}

/// Starts a cluster of so many nodes, in memory, and waits until all of them agree that it is complete.
///
/// ```no_run
/// use lockkeeper_testkit::servers;
/// let Ok(cluster) = servers::redis_cluster(3) else { return };
/// let slot = cluster.slot_of("orders/42");
/// let elsewhere = (cluster.node_of_slot(slot) + 1) % 3;
/// let migration = cluster.begin_migration(slot, elsewhere);
/// // Now the old node answers ASK for what it does not have, and TRYAGAIN for half of what is asked for.
/// cluster.finish_migration(migration);
/// ```
///
/// # Errors
/// [`Skip`] if the tests are to run without `redis`.
///
/// # Panics
/// If the program is missing or does not start.
pub fn redis_cluster(masters: usize) -> Result<RedisCluster, Skip> {
    redis_cluster_with(masters, RedisOptions::default())
}

/// [`redis_cluster`] of nodes that all have these options.
///
/// # Errors
/// [`Skip`] if the tests are to run without `redis`.
///
/// # Panics
/// If the program is missing or does not start, or the options do not suit a cluster: replicas, passwords.
pub fn redis_cluster_with(masters: usize, options: RedisOptions) -> Result<RedisCluster, Skip> {
    start(masters, masters, options)
}

/// [`redis_cluster_with`] where each primary has a replica, which takes over when the primary fails: the node of number
/// `masters + n` is that of node `n`.
///
/// # Errors
/// [`Skip`] if the tests are to run without `redis`.
///
/// # Panics
/// If the program is missing or does not start, or the options do not suit a cluster: replicas, passwords.
pub fn redis_cluster_with_replicas(masters: usize, options: RedisOptions) -> Result<RedisCluster, Skip> {
    let cluster = start(masters, 2 * masters, options)?;
    cluster.follow();
    Ok(cluster)
}

fn start(primaries: usize, nodes: usize, options: RedisOptions) -> Result<RedisCluster, Skip> {
    assert!((1..=SLOTS).contains(&primaries), "a cluster has 1 to {SLOTS} primaries");
    assert!(options.replica_of.is_none(), "a node of a cluster is not told whose replica it is by a setting");
    let nodes: Vec<Server> = (0..nodes).map(|_| redis_node(options.clone())).collect::<Result<_, _>>()?;
    let ids = nodes.iter().map(|node| told(node.addr(), &["CLUSTER", "MYID"])).collect();
    let cluster = RedisCluster { nodes, ids, primaries };
    cluster.join();
    cluster.wait_until_ok();
    Ok(cluster)
}

impl RedisCluster {
    /// All nodes; the numbers of nodes here are places in this.
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// One of them, to kill, pause or restart it.
    pub fn node_mut(&mut self, nth: usize) -> &mut Server {
        &mut self.nodes[nth]
    }

    /// Where clients connect.
    pub fn addrs(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(Server::addr).collect()
    }

    /// The slot of a key, as the first node counts it.
    pub fn slot_of(&self, key: &str) -> u16 {
        told(self.addr(0), &["CLUSTER", "KEYSLOT", key]).parse().expect("a slot is a number")
    }

    /// The number of the node that says that it has this slot.
    ///
    /// # Panics
    /// If none of those that answer does.
    pub fn node_of_slot(&self, slot: u16) -> usize {
        let has = |nth: &usize| {
            let view = redis_call(self.addr(*nth), &["CLUSTER", "NODES"]).unwrap_or_default();
            view.lines().any(|line| line.contains("myself") && owns(line, slot))
        };
        (0..self.nodes.len()).find(has).unwrap_or_else(|| panic!("no node says that it has slot {slot}"))
    }

    /// Moves a slot and its keys to the node of this number, as an operator does.
    ///
    /// # Panics
    /// If a node refuses its part.
    pub fn migrate_slot(&self, slot: u16, to: usize) {
        self.finish_migration(self.begin_migration(slot, to));
    }

    /// The first half of it: both nodes know that the slot moves, and no key has moved yet.
    ///
    /// # Panics
    /// If it is there already, or a node refuses its part.
    pub fn begin_migration(&self, slot: u16, to: usize) -> Migration {
        let from = self.node_of_slot(slot);
        assert_ne!(from, to, "slot {slot} is there already");
        // The target first: a client that the source already sends over must be let in.
        self.set_slot(to, slot, &["IMPORTING", &self.ids[from]]);
        self.set_slot(from, slot, &["MIGRATING", &self.ids[to]]);
        Migration { slot, from, to }
    }

    /// The second half: the keys move, then the slot does, and every node gets the new owner.
    ///
    /// # Panics
    /// If a node refuses its part.
    pub fn finish_migration(&self, migration: Migration) {
        let Migration { slot, from, to } = migration;
        self.move_keys(slot, from, to);
        // The target first again: between the two steps the slot would have no owner otherwise.
        let others = (0..self.primaries).filter(|nth| *nth != to);
        for nth in std::iter::once(to).chain(others) {
            self.set_slot(nth, slot, &["NODE", &self.ids[to]]);
        }
        self.wait_until_agreed(slot, to);
    }

    /// Waits until every node has heard from the new owner itself that it has the slot, and in which epoch. A move that
    /// begins before that races with gossip: the slot can end without an owner, and then its keys are deleted.
    fn wait_until_agreed(&self, slot: u16, to: usize) {
        let claim = |view: &str| {
            let line = view.lines().find(|line| line.starts_with(&self.ids[to]))?;
            owns(line, slot).then(|| line.split_whitespace().nth(6).map(str::to_owned))?
        };
        for addr in self.addrs() {
            wait_for("the nodes agree who has the slot", || {
                let own = claim(&redis_call(self.addr(to), &["CLUSTER", "NODES"])?);
                expect(addr, &["CLUSTER", "NODES"], |view| {
                    let others = view.lines().filter(|line| !line.starts_with(&self.ids[to]));
                    own.is_some() && claim(view) == own && !others.into_iter().any(|line| owns(line, slot))
                })
            });
        }
    }

    /// Waits until every node is linked with all others, and finds all slots served.
    ///
    /// # Panics
    /// If that takes too long: a node is down.
    pub fn wait_until_ok(&self) {
        let (count, slots) = (self.nodes.len(), SLOTS.to_string());
        let linked = |line: &str| line.contains(" connected") && !line.contains("handshake");
        for addr in self.addrs() {
            wait_for("the cluster is complete", || {
                expect(addr, &["CLUSTER", "NODES"], |view| {
                    view.lines().filter(|l| linked(l)).count() == count
                })?;
                expect(addr, &["CLUSTER", "INFO"], |info| {
                    field(info, "cluster_state") == Some("ok")
                        && field(info, "cluster_slots_ok") == Some(&slots)
                })
            });
        }
    }

    fn addr(&self, nth: usize) -> SocketAddr {
        self.nodes[nth].addr()
    }

    /// Gives each node its share of the slots, and introduces all to the first.
    fn join(&self) {
        let count = self.primaries;
        let hub = &self.nodes[0];
        // The bus is the last port of a node's place; without TLS the second, with it the third.
        let bus = |node: &Server| node.place().addr(node.place().ports() - 1).port().to_string();
        for (nth, node) in self.nodes.iter().enumerate() {
            let bounds = [nth * SLOTS / count, (nth + 1) * SLOTS / count - 1].map(|slot| slot.to_string());
            if nth < count {
                told(node.addr(), &["CLUSTER", "ADDSLOTSRANGE", &bounds[0], &bounds[1]]);
            }
            // Epochs that differ from the start: otherwise the nodes have to quarrel about theirs first.
            told(node.addr(), &["CLUSTER", "SET-CONFIG-EPOCH", &(nth + 1).to_string()]);
        }
        for node in &self.nodes[1..] {
            let (port, bus) = (hub.addr().port().to_string(), bus(hub));
            told(node.addr(), &["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
        }
    }

    /// Makes the second half of the nodes replicas of the first, and waits until they have what those have.
    fn follow(&self) {
        for nth in self.primaries..self.nodes.len() {
            let primary = &self.ids[nth - self.primaries];
            told(self.addr(nth), &["CLUSTER", "REPLICATE", primary]);
        }
        for nth in self.primaries..self.nodes.len() {
            wait_for("the replica has what its primary has", || {
                expect(self.addr(nth), &["INFO", "replication"], |info| {
                    field(info, "master_link_status").is_some_and(|link| link.trim() == "up")
                })
            });
            // A replica takes over only if the other primaries know whose replica it is.
            for addr in self.addrs() {
                wait_for("all nodes know the replica", || {
                    expect(addr, &["CLUSTER", "NODES"], |view| {
                        let replica = |line: &str| line.starts_with(&self.ids[nth]) && line.contains("slave");
                        view.lines().any(replica)
                    })
                });
            }
        }
    }

    fn set_slot(&self, nth: usize, slot: u16, what: &[&str]) {
        let slot = slot.to_string();
        told(self.addr(nth), &[&["CLUSTER", "SETSLOT", &slot], what].concat());
    }

    fn move_keys(&self, slot: u16, from: usize, to: usize) {
        let (slot, port) = (slot.to_string(), self.addr(to).port().to_string());
        loop {
            let keys = told(self.addr(from), &["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
            if keys.is_empty() {
                return;
            }
            let migrate = ["MIGRATE", "127.0.0.1", &port, "", "0", "1000", "KEYS"];
            told(self.addr(from), &migrate.into_iter().chain(keys.lines()).collect::<Vec<_>>());
        }
    }
}

/// A command that a healthy node does not refuse.
fn told(addr: SocketAddr, command: &[&str]) -> String {
    redis_call(addr, command).unwrap_or_else(|e: io::Error| panic!("{addr} refuses {command:?}: {e}"))
}

/// Whether the slots at the end of a line of `CLUSTER NODES` hold this one. Slots in brackets are being migrated.
fn owns(line: &str, slot: u16) -> bool {
    line.split_whitespace().skip(8).filter(|range| !range.starts_with('[')).any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse().is_ok_and(|first: u16| first <= slot)
            && last.parse().is_ok_and(|last: u16| slot <= last)
    })
}
