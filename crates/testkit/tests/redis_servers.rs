//! Fleets of real Redis servers do what the tests of stores need from them: fail over, lose what was acknowledged, move
//! slots, speak TLS, and live on a wall clock that jumps.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use lockkeeper_testkit::servers::{
    self, AppendOnly, ClockShim, RedisOptions, RedisPair, TlsFiles, redis_call, redis_tls_addr,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// Asks again until it is so; the deadline is far beyond what a healthy machine needs.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn call(addr: SocketAddr, command: &[&str]) -> String {
    redis_call(addr, command).unwrap_or_else(|e| format!("-{e}"))
}

fn gone(addr: SocketAddr) -> bool {
    TcpStream::connect(addr).is_err()
}

fn info(addr: SocketAddr, line: &str) -> bool {
    call(addr, &["INFO", "replication"]).lines().any(|one| one == line)
}

/// Proves that the replica does not get what the primary acknowledges, with no hope in a pause: another
/// replica has got it meanwhile.
fn write_that_is_not_replicated(pair: &RedisPair) {
    let primary = pair.primary().addr();
    pair.wait_synced();
    pair.cut_replication();
    assert_eq!(call(primary, &["SET", "late", "1"]), "OK");
    let witness = RedisOptions { replica_of: Some(primary), ..RedisOptions::default() };
    let witness = servers::redis(witness).unwrap();
    eventually("another replica has it", || call(witness.addr(), &["GET", "late"]) == "1");
    assert_eq!(call(pair.replica().addr(), &["GET", "late"]), "(nil)");
}

#[test]
fn a_promoted_replica_has_what_was_replicated_and_not_what_came_after_the_cut() {
    let Ok(mut pair) = servers::redis_pair(RedisOptions::default()) else { return };
    let (primary, replica) = (pair.primary().addr(), pair.replica().addr());
    assert_eq!(call(primary, &["SET", "early", "1"]), "OK");
    write_that_is_not_replicated(&pair);
    assert!(info(replica, "master_link_status:up"), "the replica knows that it is cut off");
    assert!(call(primary, &["INFO", "replication"]).contains("state=online"), "the primary knows it");

    pair.promote();
    assert!(gone(primary));
    assert_eq!(call(replica, &["MGET", "early", "late"]), "1\n(nil)");
    assert_eq!(call(replica, &["SET", "k", "v"]), "OK", "it is a primary and takes writes");
    drop(pair);
    assert!(gone(replica));
}

#[test]
fn replication_goes_on_when_it_is_healed_and_when_the_replica_was_restarted() {
    let Ok(mut pair) = servers::redis_pair(RedisOptions::default()) else { return };
    let (primary, replica) = (pair.primary().addr(), pair.replica().addr());
    write_that_is_not_replicated(&pair);
    pair.heal_replication();
    pair.wait_synced();
    assert_eq!(call(replica, &["GET", "late"]), "1");
    assert!(call(replica, &["SET", "k", "v"]).contains("READONLY"));
    pair.replica_mut().kill9();
    assert_eq!(call(primary, &["SET", "later", "1"]), "OK");
    pair.replica_mut().restart();
    pair.wait_synced();
    assert_eq!(call(replica, &["GET", "later"]), "1");
}

#[test]
fn sentinels_name_the_replica_when_the_primary_is_killed() {
    let Ok(mut fleet) = servers::redis_sentinel(RedisOptions::default()) else { return };
    let first = fleet.master_addr().expect("they agree");
    let (primary, replica) = (fleet.pair.primary().addr(), fleet.pair.replica().addr());
    assert_eq!(first, fleet.pair.primary_link());
    assert_eq!(call(first, &["SET", "early", "1"]), "OK", "what they name is the primary");
    assert_eq!(call(primary, &["GET", "early"]), "1");
    fleet.pair.wait_synced();
    fleet.pair.cut_replication();
    // Without a witness, whom the sentinels would take for a second candidate.
    assert_eq!(call(first, &["SET", "late", "1"]), "OK");
    assert_eq!(call(first, &["GET", "late"]), "1", "clients are not cut off with the replica");

    fleet.sentinel_mut(0).kill9();
    fleet.pair.primary_mut().kill9();
    assert_eq!(fleet.wait_for_failover(first), replica, "two of three are enough");
    assert_eq!(call(replica, &["MGET", "early", "late"]), "1\n(nil)");
    assert_eq!(call(replica, &["SET", "k", "v"]), "OK");

    fleet.sentinel_mut(0).restart();
    let late = fleet.sentinels()[0];
    let request = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"];
    let said = format!("{}\n{}", replica.ip(), replica.port());
    eventually("the one that slept learns of it", || call(late, &request) == said);
    let all = fleet.sentinels();
    drop(fleet);
    assert!(all.into_iter().all(gone));
}

#[test]
fn a_slot_of_a_cluster_moves_with_its_keys_and_can_be_seen_on_its_way() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    assert_eq!(cluster.addrs().len(), 3);
    assert_eq!([0, 5461, 5462, 10923, 16383].map(|slot| cluster.node_of_slot(slot)), [0, 1, 1, 2, 2]);
    assert_eq!(cluster.slot_of("foo"), 12182, "the one in the specification");
    let (slot, keys) = (cluster.slot_of("{lock}a"), ["{lock}a", "{lock}b", "{lock}new"]);
    let from = cluster.node_of_slot(slot);
    let to = (from + 1) % 3;
    let [old, new] = [from, to].map(|nth| cluster.addrs()[nth]);
    let third = cluster.addrs()[3 - from - to];
    assert_eq!(call(old, &["MSET", keys[0], "1", keys[1], "2"]), "OK");

    let migration = cluster.begin_migration(slot, to);
    assert_eq!(cluster.node_of_slot(slot), from);
    assert_eq!(call(old, &["GET", keys[0]]), "1", "what has not moved is served");
    assert_eq!(call(old, &["SET", keys[2], "3"]), format!("-ASK {slot} {new}"));
    assert!(call(old, &["MGET", keys[0], keys[2]]).starts_with("-TRYAGAIN"));
    assert_eq!(call(new, &["GET", keys[0]]), format!("-MOVED {slot} {old}"));

    cluster.finish_migration(migration);
    assert_eq!(cluster.node_of_slot(slot), to);
    assert_eq!(call(new, &["MGET", keys[0], keys[1]]), "1\n2");
    for other in [old, third] {
        assert_eq!(call(other, &["GET", keys[0]]), format!("-MOVED {slot} {new}"));
    }
    cluster.migrate_slot(slot, from);
    assert_eq!(call(old, &["MGET", keys[0], keys[1]]), "1\n2", "and back in one go");
    cluster.wait_until_ok();
}

#[test]
fn a_node_of_a_cluster_keeps_its_slots_over_a_kill() {
    let options = RedisOptions { append_only: AppendOnly::Always, ..RedisOptions::default() };
    let Ok(mut cluster) = servers::redis_cluster_with(3, options) else { return };
    let node = cluster.node_of_slot(cluster.slot_of("k"));
    let addr = cluster.addrs()[node];
    assert_eq!(call(addr, &["SET", "k", "v"]), "OK");
    cluster.migrate_slot(0, 2);
    let id = call(addr, &["CLUSTER", "MYID"]);
    cluster.node_mut(node).kill9();
    cluster.node_mut(node).restart();
    cluster.wait_until_ok();
    assert_eq!(call(addr, &["CLUSTER", "MYID"]), id);
    assert_eq!(call(addr, &["GET", "k"]), "v");
    assert_eq!(cluster.node_of_slot(0), 2);
}

/// Sends a PING over TLS, as a client that trusts `ca` and wants to talk to `name`.
fn tls_ping(addr: SocketAddr, ca: &TlsFiles, name: &'static str) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca.ca_path()).unwrap()).unwrap();
    let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let client = ClientConnection::new(Arc::new(config), name.try_into().unwrap()).unwrap();
    let mut stream = StreamOwned::new(client, TcpStream::connect(addr)?);
    stream.write_all(b"PING\r\n")?;
    let mut answer = [0; 7];
    stream.read_exact(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[test]
fn redis_speaks_tls_with_a_certificate_that_a_careful_client_takes() {
    let (tls, other) = (TlsFiles::new(), TlsFiles::new());
    let options = RedisOptions { tls: Some(tls.clone()), ..RedisOptions::default() };
    let Ok(redis) = servers::redis(options.clone()) else { return };
    let addr = redis_tls_addr(&redis);
    assert_ne!(addr, redis.addr());
    assert_eq!(tls_ping(addr, &tls, "127.0.0.1").unwrap(), "+PONG\r\n");
    assert_eq!(tls_ping(addr, &tls, "localhost").unwrap(), "+PONG\r\n");
    let refused = tls_ping(addr, &tls, "example.org").unwrap_err().to_string();
    assert!(refused.contains("NotValidForName") || refused.contains("not valid for name"), "{refused}");
    let refused = tls_ping(addr, &other, "127.0.0.1").unwrap_err().to_string();
    assert!(refused.contains("UnknownIssuer") || refused.contains("BadSignature"), "{refused}");
    assert!(redis_call(addr, &["PING"]).is_err(), "nothing else is spoken there");
    assert_eq!(call(redis.addr(), &["PING"]), "PONG");

    // The ports of TLS and of the cluster's bus do not get mixed up.
    let cluster = servers::redis_cluster_with(2, options).unwrap();
    for node in cluster.nodes() {
        assert_eq!(tls_ping(redis_tls_addr(node), &tls, "127.0.0.1").unwrap(), "+PONG\r\n");
    }
    let (kept, path) = (redis, tls.ca_path());
    drop((tls, cluster));
    assert!(path.exists(), "a restart needs it");
    drop(kept);
    assert!(!path.exists());
}

/// How far the clock of a server is ahead of ours, in seconds.
fn ahead(addr: SocketAddr) -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let time = call(addr, &["TIME"]);
    let seconds: i64 = time.lines().next().unwrap().parse().unwrap();
    seconds - now.as_secs() as i64
}

#[test]
fn the_wall_clock_of_one_redis_jumps_while_it_runs() {
    let Ok(clock) = ClockShim::build() else { return };
    let options = RedisOptions { clock: Some(clock.clone()), ..RedisOptions::default() };
    let Ok(mut redis) = servers::redis(options) else { return };
    let other = servers::redis(RedisOptions::default()).unwrap();
    // A machine that is busy for minutes between two questions is not foreseen.
    let near = |addr, wanted: i64| (ahead(addr) - wanted).abs() < 30;
    for server in [&redis, &other] {
        assert_eq!(call(server.addr(), &["SET", "k", "v", "PX", "60000"]), "OK");
        assert!(near(server.addr(), 0));
    }
    clock.jump(120 * ClockShim::SECOND);
    assert!(near(redis.addr(), 120), "{}", ahead(redis.addr()));
    assert_eq!(call(redis.addr(), &["GET", "k"]), "(nil)", "a minute is over");
    assert!(near(other.addr(), 0));
    assert_eq!(call(other.addr(), &["GET", "k"]), "v");

    assert_eq!(call(redis.addr(), &["SET", "k", "v", "PX", "60000"]), "OK");
    clock.jump(-3720 * ClockShim::SECOND);
    assert_eq!(clock.offset(), -3600 * ClockShim::SECOND);
    assert!(near(redis.addr(), -3600), "{}", ahead(redis.addr()));
    let left: i64 = call(redis.addr(), &["PTTL", "k"]).parse().unwrap();
    assert!(left > 3_600_000, "a clock that goes back makes a lease longer: {left} ms");
    redis.restart();
    assert!(near(redis.addr(), -3600), "a restart does not set the clock");
}
