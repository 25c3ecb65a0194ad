use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;

use super::process::Launch;
use super::{Place, Program, Server, Skip, require};

pub(super) const JAR: &str = "/usr/share/java/zookeeper.jar";
/// Without it the servers keep to themselves why they do not start. It comes with the other one.
const LOGGER: &str = "/usr/share/java/slf4j-simple.jar";

/// How to run a ZooKeeper server that stands alone.
#[derive(Clone, Debug)]
pub struct ZooKeeperOptions {
    /// The unit of its time: sessions last for 2 to 20 ticks.
    pub tick: Duration,
    /// More lines for its configuration, such as `maxClientCnxns=10`.
    pub extra: Vec<String>,
    /// Properties of its Java, such as `znode.container.checkIntervalMs=100`: some things cannot be configured otherwise.
    pub properties: Vec<String>,
}

impl Default for ZooKeeperOptions {
    /// Ticks of 200 ms: sessions of 0.4 to 4 s, so that a test need not wait long for the end of one.
    fn default() -> Self {
        ZooKeeperOptions { tick: Duration::from_millis(200), extra: Vec::new(), properties: Vec::new() }
    }
}

/// Starts a ZooKeeper server.
///
/// # Errors
/// [`Skip`] if the tests are to run without `zookeeper`.
///
/// # Panics
/// If Java or ZooKeeper is missing, or it does not start.
pub fn zookeeper(options: ZooKeeperOptions) -> Result<Server, Skip> {
    require("zookeeper", JAR, "zookeeper")?;
    let java = require("zookeeper", "java", "default-jre-headless")?;
    Ok(Server::start(ZooKeeper { java, options }))
}

struct ZooKeeper {
    java: PathBuf,
    options: ZooKeeperOptions,
}

impl Program for ZooKeeper {
    fn name(&self) -> &str {
        "zookeeper"
    }

    fn ports(&self) -> usize {
        1
    }

    fn prepare(&self, place: &Place) -> io::Result<()> {
        fs::write(place.join("zoo.cfg"), configuration(place, &self.options).join("\n") + "\n")
    }

    fn launch(&self, place: &Place) -> Launch {
        launch(&self.java, place, &self.options)
    }

    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }

    fn ping(&self, place: &Place, _pid: u32) -> io::Result<()> {
        srvr(place.addr(0)).map(drop)
    }
}

/// The lines that every server needs.
pub(super) fn configuration(place: &Place, options: &ZooKeeperOptions) -> Vec<String> {
    let lines = [
        format!("tickTime={}", options.tick.as_millis()),
        format!("dataDir={}", place.join("data").display()),
        format!("clientPort={}", place.addr(0).port()),
        format!("clientPortAddress={}", place.addr(0).ip()),
        "admin.enableServer=false".to_owned(),
        "4lw.commands.whitelist=*".to_owned(),
    ];
    lines.into_iter().chain(options.extra.iter().cloned()).collect()
}

pub(super) fn launch(java: &Path, place: &Place, options: &ZooKeeperOptions) -> Launch {
    let main = "org.apache.zookeeper.server.quorum.QuorumPeerMain";
    let config = place.join("zoo.cfg").display().to_string();
    let properties = options.properties.iter().map(|property| format!("-D{property}"));
    let quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn";
    let rest = ["-Xmx256m", quiet, "-cp", &format!("{JAR}:{LOGGER}"), main, &config].map(str::to_owned);
    Launch::new(java, properties.chain(rest))
}

/// What a server says about itself, once it serves.
pub(super) fn srvr(addr: SocketAddr) -> io::Result<String> {
    let limit = Duration::from_secs(1);
    let mut stream = TcpStream::connect_timeout(&addr, limit)?;
    stream.set_read_timeout(Some(limit))?;
    stream.write_all(b"srvr")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    // "imok" comes too early, while it still says "not currently serving requests" to this.
    if answer.contains("Mode:") { Ok(answer) } else { Err(io::Error::other(answer)) }
}
