//! Starts one ZooKeeper server.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;

use super::process::Launch;
use super::{ClockShim, Program, Server, ServerSite, Skip, TlsFiles, require, tls};

pub(super) const JAR: &str = "/usr/share/java/zookeeper.jar";
/// Without it the servers keep to themselves why they do not start. It comes with the other one.
const LOGGER: &str = "/usr/share/java/slf4j-simple.jar";
/// The jars that TLS needs, that come with ZooKeeper, and that its own jar does not name: libnetty-java.
const NETTY: &str = "/usr/share/java/netty-codec.jar:/usr/share/java/netty-resolver.jar";

/// How to run a ZooKeeper server that stands alone.
#[derive(Clone, Debug)]
pub struct ZooKeeperOptions {
    /// The unit of its time: sessions last for 2 to 20 ticks.
    pub tick: Duration,
    /// More lines for its configuration, such as `maxClientCnxns=10`.
    pub extra: Vec<String>,
    /// Properties of its Java, such as `znode.container.checkIntervalMs=100`: some things cannot be configured otherwise.
    pub properties: Vec<String>,
    /// Whether it also listens for TLS, with these certificates: [`zookeeper_tls_addr`] says where. Clients need none, unless
    /// `extra` says `ssl.clientAuth=need`.
    pub tls: Option<TlsFiles>,
    /// The wall clock it lives on, if not the machine's.
    pub clock: Option<ClockShim>,
}

impl Default for ZooKeeperOptions {
    /// Ticks of 200 ms: sessions of 0.4 to 4 s, so that a test need not wait long for the end of one.
    fn default() -> Self {
        let tick = Duration::from_millis(200);
        ZooKeeperOptions { tick, extra: Vec::new(), properties: Vec::new(), tls: None, clock: None }
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

/// Where a server that was started with [`ZooKeeperOptions::tls`] listens for TLS.
pub fn zookeeper_tls_addr(server: &Server) -> SocketAddr {
    server.place().addr(1)
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
        ports(&self.options)
    }

    fn prepare(&self, place: &ServerSite) -> io::Result<()> {
        fs::write(place.join("zoo.cfg"), configuration(place, &self.options)?.join("\n") + "\n")
    }

    fn launch(&self, place: &ServerSite) -> Launch {
        launch(&self.java, place, &self.options)
    }

    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }

    fn ping(&self, place: &ServerSite, _pid: u32) -> io::Result<()> {
        ready(place, &self.options)
    }
}

/// Whether it serves at all its ports: one opens after the other.
pub(super) fn ready(place: &ServerSite, options: &ZooKeeperOptions) -> io::Result<()> {
    srvr(place.addr(0))?;
    match &options.tls {
        Some(files) => told(tls::connect(files, dial(place.addr(1))?)?).map(drop),
        None => Ok(()),
    }
}

pub(super) fn ports(options: &ZooKeeperOptions) -> usize {
    1 + usize::from(options.tls.is_some())
}

/// The lines that every server needs.
pub(super) fn configuration(place: &ServerSite, options: &ZooKeeperOptions) -> io::Result<Vec<String>> {
    let mut lines = vec![
        format!("tickTime={}", options.tick.as_millis()),
        format!("dataDir={}", place.join("data").display()),
        format!("clientPort={}", place.addr(0).port()),
        format!("clientPortAddress={}", place.addr(0).ip()),
        "admin.enableServer=false".to_owned(),
        "4lw.commands.whitelist=*".to_owned(),
    ];
    if let Some(tls) = &options.tls {
        lines.extend(encrypted(place, tls)?);
    }
    lines.extend(options.extra.iter().cloned());
    Ok(lines)
}

/// The lines for TLS. Certificate and key have to be in one file.
fn encrypted(place: &ServerSite, tls: &TlsFiles) -> io::Result<[String; 8]> {
    let identity = place.join("identity.pem");
    fs::write(&identity, fs::read_to_string(tls.cert_path())? + &fs::read_to_string(tls.key_path())?)?;
    Ok([
        format!("secureClientPort={}", place.addr(1).port()),
        format!("secureClientPortAddress={}", place.addr(1).ip()),
        "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory".to_owned(),
        format!("ssl.keyStore.location={}", identity.display()),
        "ssl.keyStore.type=PEM".to_owned(),
        format!("ssl.trustStore.location={}", tls.ca_path().display()),
        "ssl.trustStore.type=PEM".to_owned(),
        "ssl.clientAuth=none".to_owned(),
    ])
}

pub(super) fn launch(java: &Path, place: &ServerSite, options: &ZooKeeperOptions) -> Launch {
    let main = "org.apache.zookeeper.server.quorum.QuorumPeerMain";
    let config = place.join("zoo.cfg").display().to_string();
    let properties = options.properties.iter().map(|property| format!("-D{property}"));
    let quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn";
    let rest =
        ["-Xmx256m", quiet, "-cp", &format!("{JAR}:{LOGGER}:{NETTY}"), main, &config].map(str::to_owned);
    let env = options.clock.as_ref().map(ClockShim::env).unwrap_or_default();
    Launch { env, ..Launch::new(java, properties.chain(rest)) }
}

/// The reply of a server to `srvr`, once it serves.
pub(super) fn srvr(addr: SocketAddr) -> io::Result<String> {
    told(dial(addr)?)
}

/// The version of a server, as `3.8.0`.
///
/// # Errors
/// If it does not serve.
pub fn zookeeper_version(addr: SocketAddr) -> io::Result<String> {
    let told = srvr(addr)?;
    let line = told.lines().find_map(|line| line.strip_prefix("Zookeeper version: "));
    let version = line.and_then(|line| line.split(['-', ',', ' ']).next());
    version.map(str::to_owned).ok_or_else(|| io::Error::other(told.clone()))
}

fn dial(addr: SocketAddr) -> io::Result<TcpStream> {
    let limit = Duration::from_secs(1);
    let stream = TcpStream::connect_timeout(&addr, limit)?;
    stream.set_read_timeout(Some(limit))?;
    Ok(stream)
}

fn told(mut stream: impl Read + Write) -> io::Result<String> {
    stream.write_all(b"srvr")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    // "imok" comes too early, while it still says "not currently serving requests" to this.
    if answer.contains("Mode:") { Ok(answer) } else { Err(io::Error::other(answer)) }
}
