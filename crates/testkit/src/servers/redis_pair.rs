//! Starts a Redis primary with a replica behind a proxy.

use std::net::SocketAddr;

use super::wait::{expect, field, wait_for};
use super::{RedisOptions, Server, Skip, redis, redis_call};
use crate::proxy::{Fault, Framing, Pick, Proxy};

const REPLICATION: &[&str] = &["INFO", "replication"];

/// A primary and its asynchronous replica, and a proxy between them. Dropping it kills both.
///
/// Redis acknowledges a write before its replicas have it: [`RedisPair::cut_replication`] makes sure that one does not,
/// and [`RedisPair::promote`] then brings the world in which an acknowledged grant never happened.
#[derive(Debug)]
pub struct RedisPair {
    primary: Server,
    replica: Server,
    link: Proxy,
}

/// Starts a primary and a replica, both with these options, and waits until the replica follows.
///
/// ```no_run
/// use lockkeeper_testkit::servers::{self, RedisOptions, redis_call};
/// let Ok(mut pair) = servers::redis_pair(RedisOptions::default()) else { return };
/// pair.cut_replication();
/// redis_call(pair.primary().addr(), &["SET", "k", "acknowledged"]).unwrap();
/// pair.promote();
/// assert_eq!(redis_call(pair.replica().addr(), &["GET", "k"]).unwrap(), "(nil)");
/// ```
///
/// # Errors
/// [`Skip`] if the tests are to run without `redis`.
///
/// # Panics
/// If the program is missing or does not start, if the options say whose replica it is, or if they set a password: the
/// pair is watched without one.
pub fn redis_pair(options: RedisOptions) -> Result<RedisPair, Skip> {
    assert!(options.replica_of.is_none(), "the pair's primary is no replica");
    let primary = redis(options.clone())?;
    let link = Proxy::start(primary.addr(), Framing::Bytes);
    let replica = redis(RedisOptions { replica_of: Some(link.addr()), ..options })?;
    let pair = RedisPair { primary, replica, link };
    pair.wait_synced();
    Ok(pair)
}

impl RedisPair {
    /// The server that was the primary at the start.
    pub fn primary(&self) -> &Server {
        &self.primary
    }

    /// The same, to kill or restart it.
    pub fn primary_mut(&mut self) -> &mut Server {
        &mut self.primary
    }

    /// The server that was the replica at the start.
    pub fn replica(&self) -> &Server {
        &self.replica
    }

    /// The same, to kill or restart it.
    pub fn replica_mut(&mut self) -> &mut Server {
        &mut self.replica
    }

    /// Where the replica thinks that its primary is: the proxy's address, behind which the primary answers.
    pub fn primary_link(&self) -> SocketAddr {
        self.link.addr()
    }

    /// From now on no write of the primary reaches the replica, and neither of them notices: their link stays up. Writes
    /// in flight may still arrive. After [`RedisPair::wait_synced`] the replica is certain to have all earlier ones.
    pub fn cut_replication(&self) {
        // Only the connections of replicas: sentinels, and clients that they sent here, talk to the primary this way too.
        let stream = Fault::at_reply(1).on(Pick::sent("PSYNC")).and_every_later_one();
        self.link.inject(stream.hold());
    }

    /// From now on no sentinel hears from the primary; replicas and clients do. The sentinels take it for dead, and it lives.
    pub fn cut_off_sentinels(&self) {
        let sentinels = Pick::sent("sentinel-");
        self.link.inject(Fault::at_reply(1).on(sentinels).and_every_later_one().hold());
    }

    /// The link passes on the writes that it held back.
    pub fn heal_replication(&self) {
        self.link.heal();
    }

    /// Waits until the replica's link is up and it has every write that the primary has taken so far.
    ///
    /// # Panics
    /// If that takes too long: one of them is down, or replication is cut.
    pub fn wait_synced(&self) {
        let online = format!("port={},state=online", self.replica.addr().port());
        let primary = wait_for("the primary serves the replica", || {
            expect(self.primary.addr(), REPLICATION, |info| info.contains(&online))
        });
        let wanted = offset(&primary, "master_repl_offset");
        wait_for("the replica has what the primary has", || {
            expect(self.replica.addr(), REPLICATION, |info| {
                let up = field(info, "master_link_status") == Some("up");
                up && offset(info, "slave_repl_offset") >= wanted
            })
        });
    }

    /// The primary is killed and the replica takes its place with what it has. Blocks until it is a primary.
    ///
    /// # Panics
    /// If the replica is down.
    pub fn promote(&mut self) {
        self.primary.kill9();
        redis_call(self.replica.addr(), &["REPLICAOF", "NO", "ONE"]).expect("the replica answers");
        wait_for("the replica is a primary", || {
            expect(self.replica.addr(), REPLICATION, |info| field(info, "role") == Some("master"))
        });
    }
}

fn offset(info: &str, key: &str) -> i64 {
    field(info, key).and_then(|value| value.parse().ok()).unwrap_or(-1)
}
