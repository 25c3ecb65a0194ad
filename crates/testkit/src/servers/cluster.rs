//! Clusters with a leader, of any server: members that can be killed, stopped and restarted.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use super::wait::wait_for;
use super::{NetNamespace, Program, Server};

/// Servers that choose a leader among themselves. Dropping it kills all of them.
pub struct Cluster {
    nodes: Vec<Server>,
    islands: Vec<NetNamespace>,
    leads: fn(SocketAddr) -> bool,
}

impl Cluster {
    /// Starts all members at once: the first cannot answer before it has heard of the others.
    pub(super) fn start<P: Program + 'static>(
        members: impl Iterator<Item = P>,
        islands: Vec<NetNamespace>,
        leads: fn(SocketAddr) -> bool,
    ) -> Cluster {
        let starting: Vec<_> =
            members.map(|member| std::thread::spawn(move || Server::start(member))).collect();
        let nodes = starting.into_iter().map(|node| node.join().expect("a member starts")).collect();
        Cluster { nodes, islands, leads }
    }

    /// All members; the numbers of members here are places in this.
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// One of them, to kill, pause or restart it.
    pub fn node_mut(&mut self, nth: usize) -> &mut Server {
        &mut self.nodes[nth]
    }

    /// All of them, to change several at once: without a majority a member does not answer.
    pub fn nodes_mut(&mut self) -> &mut [Server] {
        &mut self.nodes
    }

    /// Where one of them lives, to cut it off.
    ///
    /// # Panics
    /// If they do not live on islands.
    pub fn island(&self, nth: usize) -> &NetNamespace {
        &self.islands[nth]
    }

    /// Where clients connect, as in the address of a store: `host:port,host:port`.
    pub fn hosts(&self) -> String {
        self.nodes.iter().map(|node| node.addr().to_string()).collect::<Vec<_>>().join(",")
    }

    /// Waits until every member serves, and exactly one of them leads. A member that was unreachable still catches up for a while after it
    /// can be reached again, and one that was cut off while it led takes itself for the leader: until then a fault is not over.
    ///
    /// # Panics
    /// If that takes too long.
    pub fn settle(&self) {
        wait_for("all members of the cluster serve", || {
            self.nodes.iter().try_for_each(Server::ready)?;
            let leaders = self.nodes.iter().filter(|node| (self.leads)(node.addr())).count();
            if leaders == 1 { Ok(()) } else { Err(io::Error::other(format!("{leaders} lead"))) }
        });
    }

    /// The number of the member that leads now.
    ///
    /// # Panics
    /// If there is none for a long time.
    pub fn leader(&self) -> usize {
        let running = |nth: &usize| self.nodes[*nth].pid().is_some();
        let leads = |nth: &usize| (self.leads)(self.nodes[*nth].addr());
        wait_for("a leader of the cluster", || {
            let found = (0..self.nodes.len()).filter(running).find(leads);
            found.ok_or_else(|| io::Error::other("there is no leader"))
        })
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cluster({:?})", self.nodes)
    }
}

/// Where a member listens: on its island, or here if it has none.
pub(super) fn host_of(islands: &[NetNamespace], nth: usize) -> Ipv4Addr {
    islands.get(nth).map_or(Ipv4Addr::LOCALHOST, NetNamespace::addr)
}
