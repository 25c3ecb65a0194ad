//! Starts etcd clusters.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::process::Signal;

use super::cluster::{Cluster, host_of};
use super::etcd::{arguments, etcd_get, health};
use super::process::Launch;
use super::{EtcdOptions, NetNamespace, NetNamespaces, Port, Program, ServerSite, Skip, require};

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
pub fn etcd_cluster(members: usize, options: EtcdOptions) -> Result<Cluster, Skip> {
    start(members, options, Vec::new())
}

/// The same, with every member on an island: [`Cluster::island`] cuts one off.
///
/// # Errors
/// [`Skip`] if the tests are to run without `etcd`, `root` or `iproute2`.
///
/// # Panics
/// As [`etcd_cluster`].
pub fn etcd_islands(members: usize, options: EtcdOptions) -> Result<Cluster, Skip> {
    start(members, options, NetNamespaces::raise(members as u8)?)
}

fn start(members: usize, options: EtcdOptions, islands: Vec<NetNamespace>) -> Result<Cluster, Skip> {
    assert!(options.tls.is_none(), "a member of a cluster does not speak TLS here");
    assert!((1..=7).contains(&members), "a cluster has 1 to 7 members");
    let program = require("etcd", "etcd", "etcd-server")?;
    // Every member has to know all others before the first of them can answer.
    let peers: Arc<Vec<Port>> = Arc::new((0..members).map(|_| Port::claim()).collect());
    let member = |nth| EtcdMember {
        program: program.clone(),
        options: options.clone(),
        peers: peers.clone(),
        islands: islands.clone(),
        nth,
    };
    Ok(Cluster::start((0..members).map(member), islands.clone(), leads))
}

fn leads(addr: SocketAddr) -> bool {
    let told = etcd_get(addr, "/metrics").unwrap_or_default();
    told.lines().any(|line| line == "etcd_server_is_leader 1")
}

struct EtcdMember {
    program: PathBuf,
    options: EtcdOptions,
    peers: Arc<Vec<Port>>,
    islands: Vec<NetNamespace>,
    nth: usize,
}

impl Program for EtcdMember {
    fn name(&self) -> &str {
        "etcd-member"
    }

    fn ports(&self) -> usize {
        1
    }

    fn host(&self) -> Ipv4Addr {
        host_of(&self.islands, self.nth)
    }

    fn prepare(&self, _place: &ServerSite) -> io::Result<()> {
        Ok(())
    }

    fn launch(&self, place: &ServerSite) -> Launch {
        let peer =
            |nth: usize| format!("http://{}:{}", host_of(&self.islands, nth), self.peers[nth].number());
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

    fn ping(&self, place: &ServerSite, _pid: u32) -> io::Result<()> {
        health(place.addr(0))
    }
}
