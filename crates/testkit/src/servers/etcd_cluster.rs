use std::io;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::process::Signal;

use super::etcd::{arguments, etcd_get, health};
use super::process::Launch;
use super::wait::wait_for;
use super::{EtcdOptions, Island, Islands, Place, Port, Program, Server, Skip, require};

/// An etcd cluster on loopback. Dropping it kills all members.
#[derive(Debug)]
pub struct EtcdCluster {
    nodes: Vec<Server>,
    islands: Vec<Island>,
}

/// Starts a cluster of so many members, and waits until all of them agree on a leader.
///
/// ```no_run
/// use lockkeeper_testkit::servers::{self, EtcdOptions};
/// let Ok(mut cluster) = servers::etcd_cluster(3, EtcdOptions::default()) else { return };
/// let leader = cluster.leader();
/// cluster.node_mut(leader).kill9();
/// // The others choose another one, and go on.
/// cluster.node_mut(leader).restart();
/// ```
///
/// # Errors
/// [`Skip`] if the tests are to run without `etcd`.
///
/// # Panics
/// If the program is missing or does not start, or if it is to speak TLS: only a single one does.
pub fn etcd_cluster(members: usize, options: EtcdOptions) -> Result<EtcdCluster, Skip> {
    start(members, options, Vec::new())
}

/// The same, with every member on an island: [`EtcdCluster::island`] cuts one off.
///
/// # Errors
/// [`Skip`] if the tests are to run without `etcd`, `root` or `iproute2`.
///
/// # Panics
/// As [`etcd_cluster`].
pub fn etcd_islands(members: usize, options: EtcdOptions) -> Result<EtcdCluster, Skip> {
    start(members, options, Islands::raise(members as u8)?)
}

fn start(members: usize, options: EtcdOptions, islands: Vec<Island>) -> Result<EtcdCluster, Skip> {
    assert!(options.tls.is_none(), "a member of a cluster does not speak TLS here");
    assert!((1..=7).contains(&members), "a cluster has 1 to 7 members");
    let program = require("etcd", "etcd", "etcd-server")?;
    // Every member has to know all others before the first of them can answer.
    let peers: Arc<Vec<Port>> = Arc::new((0..members).map(|_| Port::claim()).collect());
    let all = islands.clone();
    let start = |nth: usize| {
        let (program, peers, options, islands) =
            (program.clone(), peers.clone(), options.clone(), all.clone());
        std::thread::spawn(move || Server::start(Member { program, options, peers, islands, nth }))
    };
    let starting: Vec<_> = (0..members).map(start).collect();
    let nodes = starting.into_iter().map(|node| node.join().expect("a member starts")).collect();
    Ok(EtcdCluster { nodes, islands })
}

impl EtcdCluster {
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

    /// Where one of them lives, if they were started by [`etcd_islands`].
    ///
    /// # Panics
    /// If they were not.
    pub fn island(&self, nth: usize) -> &Island {
        &self.islands[nth]
    }

    /// Where clients connect, as in the address of a store: `host:port,host:port`.
    pub fn hosts(&self) -> String {
        self.nodes.iter().map(|node| node.addr().to_string()).collect::<Vec<_>>().join(",")
    }

    /// The number of the member that leads now.
    ///
    /// # Panics
    /// If there is none for a long time.
    pub fn leader(&self) -> usize {
        let leads = |nth: &usize| {
            let told = etcd_get(self.nodes[*nth].addr(), "/metrics").unwrap_or_default();
            told.lines().any(|line| line == "etcd_server_is_leader 1")
        };
        let running = |nth: &usize| self.nodes[*nth].pid().is_some();
        wait_for("a leader of the etcd cluster", || {
            let found = (0..self.nodes.len()).filter(running).find(leads);
            found.ok_or_else(|| io::Error::other("nobody leads"))
        })
    }
}

struct Member {
    program: PathBuf,
    options: EtcdOptions,
    peers: Arc<Vec<Port>>,
    islands: Vec<Island>,
    nth: usize,
}

impl Member {
    fn host_of(&self, nth: usize) -> Ipv4Addr {
        self.islands.get(nth).map_or(Ipv4Addr::LOCALHOST, Island::addr)
    }
}

impl Program for Member {
    fn name(&self) -> &str {
        "etcd-member"
    }

    fn ports(&self) -> usize {
        1
    }

    fn host(&self) -> Ipv4Addr {
        self.host_of(self.nth)
    }

    fn prepare(&self, _place: &Place) -> io::Result<()> {
        Ok(())
    }

    fn launch(&self, place: &Place) -> Launch {
        let peer = |nth: usize| format!("http://{}:{}", self.host_of(nth), self.peers[nth].number());
        let all: Vec<_> = (0..self.peers.len()).map(|nth| format!("m{nth}={}", peer(nth))).collect();
        let args = arguments(place, &format!("m{}", self.nth), &peer(self.nth), &all.join(","));
        let launch = Launch::new(&self.program, args.into_iter().chain(self.options.extra.iter().cloned()));
        match self.islands.get(self.nth) {
            Some(island) => island.launch(launch),
            None => launch,
        }
    }

    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }

    fn ping(&self, place: &Place, _pid: u32) -> io::Result<()> {
        health(place.addr(0))
    }
}
