//! Starts ZooKeeper ensembles.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::process::Signal;

use super::cluster::{Cluster, host_of};
use super::process::Launch;
use super::zookeeper::{JAR, configuration, launch, ports, ready, srvr};
use super::{NetNamespace, NetNamespaces, Port, Program, ServerSite, Skip, ZooKeeperOptions, require};

/// Starts an ensemble of so many members, and waits until all of them serve.
///
/// ```no_run
/// use lockkeeper_testkit::servers::{self, ZooKeeperOptions};
/// let Ok(mut cluster) = servers::zookeeper_cluster(3, ZooKeeperOptions::default()) else { return };
/// let leader = cluster.leader();
/// cluster.node_mut(leader).kill9();
/// // The others choose another one, and go on.
/// cluster.node_mut(leader).restart();
/// ```
///
/// # Errors
/// [`Skip`] if the tests are to run without `zookeeper`.
///
/// # Panics
/// If Java or ZooKeeper is missing, or a member does not start.
pub fn zookeeper_cluster(members: usize, options: ZooKeeperOptions) -> Result<Cluster, Skip> {
    start(members, options, Vec::new())
}

/// The same, with every member on an island: [`Cluster::island`] cuts one off.
///
/// # Errors
/// [`Skip`] if the tests are to run without `zookeeper`, `root` or `iproute2`.
///
/// # Panics
/// As [`zookeeper_cluster`].
pub fn zookeeper_islands(members: usize, options: ZooKeeperOptions) -> Result<Cluster, Skip> {
    start(members, options, NetNamespaces::raise(members as u8)?)
}

fn start(members: usize, options: ZooKeeperOptions, islands: Vec<NetNamespace>) -> Result<Cluster, Skip> {
    assert!((1..=7).contains(&members), "an ensemble has 1 to 7 members");
    require("zookeeper", JAR, "zookeeper")?;
    let java = require("zookeeper", "java", "default-jre-headless")?;
    // Every member has to know all others before the first of them can answer.
    let peers: Arc<Vec<[Port; 2]>> = Arc::new((0..members).map(|_| [Port::claim(), Port::claim()]).collect());
    let member = |nth| ZooKeeperMember {
        java: java.clone(),
        options: options.clone(),
        peers: peers.clone(),
        islands: islands.clone(),
        nth,
    };
    Ok(Cluster::start((0..members).map(member), islands.clone(), leads))
}

fn leads(addr: SocketAddr) -> bool {
    srvr(addr).is_ok_and(|told| told.contains("Mode: leader"))
}

struct ZooKeeperMember {
    java: PathBuf,
    options: ZooKeeperOptions,
    peers: Arc<Vec<[Port; 2]>>,
    islands: Vec<NetNamespace>,
    nth: usize,
}

impl Program for ZooKeeperMember {
    fn name(&self) -> &str {
        "zookeeper-member"
    }

    fn ports(&self) -> usize {
        ports(&self.options)
    }

    fn host(&self) -> Ipv4Addr {
        host_of(&self.islands, self.nth)
    }

    fn prepare(&self, place: &ServerSite) -> io::Result<()> {
        let mut lines = configuration(place, &self.options)?;
        lines.extend(["initLimit=50".to_owned(), "syncLimit=10".to_owned()]);
        for (nth, [quorum, election]) in self.peers.iter().enumerate() {
            let host = host_of(&self.islands, nth);
            lines.push(format!("server.{}={host}:{}:{}", nth + 1, quorum.number(), election.number()));
        }
        fs::create_dir_all(place.join("data"))?;
        fs::write(place.join("data").join("myid"), (self.nth + 1).to_string())?;
        fs::write(place.join("zoo.cfg"), lines.join("\n") + "\n")
    }

    fn launch(&self, place: &ServerSite) -> Launch {
        let launch = launch(&self.java, place, &self.options);
        match self.islands.get(self.nth) {
            Some(island) => island.launch(launch),
            None => launch,
        }
    }

    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }

    fn ping(&self, place: &ServerSite, _pid: u32) -> io::Result<()> {
        ready(place, &self.options)
    }
}
