//! Starts Redis Sentinels in front of a primary and its replica.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use rustix::process::Signal;

use super::process::Launch;
use super::redis::redis_server;
use super::wait::{expect, field, wait_for};
use super::{Program, RedisOptions, RedisPair, Server, ServerSite, Skip, redis_call, redis_pair};

const COUNT: usize = 3;

/// A primary, its replica, and three sentinels that agree by two on who is the primary. Dropping it kills all.
///
/// The sentinels know the first primary by [`RedisPair::primary_link`], because a sentinel soon corrects a replica that
/// follows another address than the one it knows, and [`RedisPair::cut_replication`] would have nothing to cut.
#[derive(Debug)]
pub struct RedisSentinel {
    /// The two that are watched.
    pub pair: RedisPair,
    sentinels: Vec<Server>,
}

/// Starts a pair with these options and three sentinels, and waits until these know the replica and each other.
///
/// A primary is thought dead after 2 s of silence; a failover that does not succeed is tried again after 4 s. A primary
/// that comes back is made a replica about 10 s later, and takes writes until then.
///
/// ```no_run
/// use lockkeeper_testkit::servers::{self, RedisOptions};
/// let Ok(mut fleet) = servers::redis_sentinel(RedisOptions::default()) else { return };
/// let first = fleet.master_addr().unwrap();
/// fleet.pair.primary_mut().kill9();
/// assert_eq!(fleet.wait_for_failover(first), fleet.pair.replica().addr());
/// ```
///
/// # Errors
/// [`Skip`] if the tests are to run without `redis`.
///
/// # Panics
/// If the program is missing or does not start, or the options do not suit a pair.
pub fn redis_sentinel(options: RedisOptions) -> Result<RedisSentinel, Skip> {
    let pair = redis_pair(options)?;
    let program = redis_server()?;
    let primary = pair.primary_link();
    let start = || {
        let name = RedisSentinel::NAME.to_owned();
        Server::start(Sentinel { program: program.clone(), primary, name, quorum: 2, dead_after_ms: 2000 })
    };
    let sentinels: Vec<Server> = (0..COUNT).map(|_| start()).collect();
    let fleet = RedisSentinel { pair, sentinels };
    fleet.sentinels().into_iter().for_each(wait_until_ready);
    Ok(fleet)
}

/// Starts a sentinel that is alone in watching a primary, by this name and at this address, and that never takes it for dead.
///
/// # Errors
/// [`Skip`] if the tests are to run without `redis`.
///
/// # Panics
/// If the program is missing or does not start.
pub fn redis_lone_sentinel(name: &str, primary: SocketAddr) -> Result<Server, Skip> {
    let (program, name) = (redis_server()?, name.to_owned());
    Ok(Server::start(Sentinel { program, primary, name, quorum: 1, dead_after_ms: 3_600_000 }))
}

impl RedisSentinel {
    /// The name of the primary at the sentinels.
    pub const NAME: &str = "mymaster";

    /// Where the sentinels are.
    pub fn sentinels(&self) -> Vec<SocketAddr> {
        self.sentinels.iter().map(Server::addr).collect()
    }

    /// One of them, to kill, pause or restart it.
    pub fn sentinel_mut(&mut self, nth: usize) -> &mut Server {
        &mut self.sentinels[nth]
    }

    /// The primary according to most of the sentinels; `None` while no two agree.
    pub fn master_addr(&self) -> Option<SocketAddr> {
        let said: Vec<SocketAddr> = self.sentinels().into_iter().filter_map(named_by).collect();
        said.iter().copied().find(|one| 2 * said.iter().filter(|other| *other == one).count() > COUNT)
    }

    /// Waits until most of the sentinels name another primary than `old`, and that one says so itself.
    ///
    /// # Panics
    /// If that takes too long.
    pub fn wait_for_failover(&self, old: SocketAddr) -> SocketAddr {
        wait_for("the sentinels agree on a new primary", || {
            let new = self.master_addr().filter(|new| *new != old);
            let new = new.ok_or_else(|| io::Error::other("none"))?;
            expect(new, &["INFO", "replication"], |info| field(info, "role") == Some("master"))?;
            Ok(new)
        })
    }
}

fn named_by(sentinel: SocketAddr) -> Option<SocketAddr> {
    let said = redis_call(sentinel, &["SENTINEL", "GET-MASTER-ADDR-BY-NAME", RedisSentinel::NAME]).ok()?;
    let (ip, port) = said.split_once('\n')?;
    Some((ip.parse::<IpAddr>().ok()?, port.parse().ok()?).into())
}

/// A sentinel can take part in a failover when it reaches the others and has heard from the replica itself.
fn wait_until_ready(sentinel: SocketAddr) {
    let request =
        |what: &str, good: fn(&str) -> bool| expect(sentinel, &["SENTINEL", what, RedisSentinel::NAME], good);
    wait_for("the sentinel knows the others and the replica", || {
        request("CKQUORUM", |said| said.starts_with("OK 3 usable"))?;
        request("REPLICAS", |said| {
            said.contains("\nmaster-link-status\nok\n") && said.contains("\nflags\nslave\n")
        })
    });
}

struct Sentinel {
    program: PathBuf,
    primary: SocketAddr,
    /// The name of the primary.
    name: String,
    /// How many sentinels have to take the primary for dead.
    quorum: usize,
    /// The silence after which a sentinel takes the primary for dead.
    dead_after_ms: u64,
}

impl Program for Sentinel {
    fn name(&self) -> &str {
        "sentinel"
    }

    fn ports(&self) -> usize {
        1
    }

    fn prepare(&self, place: &ServerSite) -> io::Result<()> {
        let Sentinel { name, primary, quorum, dead_after_ms, .. } = self;
        let lines = [
            "bind 127.0.0.1".to_owned(),
            format!("port {}", place.addr(0).port()),
            format!("dir {}", place.dir().display()),
            format!("sentinel monitor {name} {} {} {quorum}", primary.ip(), primary.port()),
            // Well over 1 s: a sentinel sends a new primary its first ping after that or this time, whichever is less,
            // and counts the silence before it. With 500 ms a failover is taken for the next failure, again and again.
            format!("sentinel down-after-milliseconds {name} {dead_after_ms}"),
            format!("sentinel failover-timeout {name} 2000"),
        ];
        // A sentinel keeps what it learns in its configuration, and finds it there when it starts again.
        fs::write(place.join("sentinel.conf"), lines.join("\n") + "\n")
    }

    fn launch(&self, place: &ServerSite) -> Launch {
        Launch::new(&self.program, [place.join("sentinel.conf").into_os_string(), "--sentinel".into()])
    }

    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }

    fn ping(&self, place: &ServerSite, pid: u32) -> io::Result<()> {
        let own = pid.to_string();
        expect(place.addr(0), &["INFO", "server"], |info| field(info, "process_id") == Some(&own)).map(drop)
    }
}
