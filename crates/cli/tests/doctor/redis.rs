//! The doctor on Redis and Redlock.
#![cfg(all(feature = "redis", feature = "redlock"))]

use std::time::Instant;

use lockkeeper_testkit::proxy::{Direction, Framing, Proxy};
use lockkeeper_testkit::servers::{self, AppendOnly, ClockShim, RedisOptions, Server, redis_call};

use crate::common::*;
use crate::tools::{examine, examine_with};

fn server_with(append_only: AppendOnly, extra: &[(&str, &str)]) -> Option<Server> {
    let extra = extra.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    servers::redis(RedisOptions { append_only, extra, ..RedisOptions::default() }).ok()
}

fn url(server: &Server) -> String {
    format!("redis://{}", server.addr())
}

#[test]
fn a_healthy_server_is_healthy_and_stays_as_it_was() {
    let Some(server) = server_with(AppendOnly::Always, &[]) else { return };
    let place = Place::new("doctor_redis");
    let report = examine(&place, &url(&server));
    report.is_healthy_but(&[]);
    assert_eq!(report.exit_code(), 0);
    assert_eq!(
        (report.standing("fence").as_str(), report.standing("exclusion").as_str()),
        ("kept", "likely")
    );
    assert_eq!(report.0["servers"][0]["role"], "primary");
    let clock = &report.0["clocks"][0];
    assert!(
        clock["offset_us"].as_i64().unwrap().abs() <= clock["offset_bound_us"].as_i64().unwrap() + 1_000_000
    );
    let left = redis_call(server.addr(), &["KEYS", "*doctor*"]).unwrap();
    assert!(!left.contains("lockkeeper-doctor"), "{left}");
}

#[test]
fn eviction_is_harm_and_every_setting_is_named_at_once() {
    let settings = [("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru")];
    let Some(server) = server_with(AppendOnly::EverySecond, &settings) else { return };
    let report = examine(&Place::new("doctor_evicts"), &url(&server));
    assert_eq!((report.exit_code(), report.standing("durability").as_str()), (2, "broken"));
    report.has("harm", "may evict locks").has("risk", "appendfsync everysec");
    report.advises("maxmemory-policy to noeviction").advises("appendfsync to always");
}

#[test]
fn a_replica_is_a_risk() {
    let Ok(pair) =
        servers::redis_pair(RedisOptions { append_only: AppendOnly::Always, ..RedisOptions::default() })
    else {
        return;
    };
    pair.wait_synced();
    let place = Place::new("doctor_replica");
    let report = examine(&place, &url(pair.primary()));
    report.is_healthy_but(&["fail-over"]);
    assert_eq!(report.0["servers"][0]["facts"]["connected_slaves"], "1", "{}", report.0);
    let wrong = examine(&place, &url(pair.replica()));
    wrong.has("harm", "is a replica");
}

/// A server whose clock is an hour ahead.
#[test]
fn a_clock_that_is_wrong_is_found() {
    let Ok(clock) = ClockShim::build() else { return };
    clock.jump(3600 * ClockShim::SECOND);
    let options =
        RedisOptions { append_only: AppendOnly::Always, clock: Some(clock), ..RedisOptions::default() };
    let Ok(server) = servers::redis(options) else { return };
    let report = examine(&Place::new("doctor_clock"), &url(&server));
    report.is_healthy_but(&["ahead of this host's"]);
    assert_eq!((report.exit_code(), report.standing("fence").as_str()), (1, "at risk"));
}

/// The proxy takes connections and passes nothing on: the doctor must end all the same, and say where it got stuck.
#[test]
fn a_silent_server_is_found_within_the_time_limit() {
    let Some(server) = server_with(AppendOnly::Always, &[]) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Resp);
    proxy.hold(Direction::Replies);
    let begun = Instant::now();
    let report = examine_with(
        &Place::new("doctor_silent"),
        &format!("redis://{}", proxy.addr()),
        &["--timeout", "2s", "--ttl", "10m"],
    );
    assert!(begun.elapsed() < LONG * 2, "it took {:?}", begun.elapsed());
    assert_eq!(report.exit_code(), 3, "{}", report.0);
    report.has("harm", "the store cannot be opened");
    assert!(report.0["reach"][0]["connect_ms"].is_number(), "the port accepted: {}", report.0);
}

#[test]
fn a_user_without_a_right_is_told_which_one() {
    let Some(server) = server_with(AppendOnly::Always, &[]) else { return };
    let rights = "~lock:* ~lockkeeper:* &lockkeeper:* +ping +info +config|get +script|load +evalsha +eval +get +time -set";
    let mut words = vec!["ACL", "SETUSER", "weak", "reset", "on", ">secret"];
    words.extend(rights.split(' '));
    redis_call(server.addr(), &words).unwrap();
    let report = examine(&Place::new("doctor_rights"), &format!("redis://weak:secret@{}", server.addr()));
    assert_eq!((report.exit_code(), report.standing("availability").as_str()), (2, "broken"), "{}", report.0);
    report.has("harm", "this user may not");
}

#[test]
fn redlock_is_healthy_and_a_missing_node_is_found() {
    let servers: Option<Vec<Server>> = (0..3).map(|_| server_with(AppendOnly::Always, &[])).collect();
    let Some(mut servers) = servers else { return };
    let hosts = servers.iter().map(|server| server.addr().to_string()).collect::<Vec<_>>().join(",");
    // Nodes that have just been started do not vote for as long as max_ttl, unless the URL says otherwise.
    let url = format!("redlock://{hosts}?max_ttl=10m&young_node=0s&node_timeout=10s&timeout=20s");
    let place = Place::new("doctor_redlock");
    examine(&place, &url).is_healthy_but(&["young_node is shorter"]);
    servers[0].kill9();
    let report = examine(&place, &url);
    report.has("risk", "2 of 3 nodes reply, and 2 are needed").has("risk", "cannot be reached");
    assert_eq!(report.exit_code(), 1, "{}", report.0);
    servers[1].kill9();
    let report = examine_with(&place, &url, &["--timeout", "5s", "--ttl", "10m"]);
    assert_eq!(report.exit_code(), 3, "{}", report.0);
}
