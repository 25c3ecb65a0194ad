//! `lockkeeper verify` on real stores: in health, ended by a signal, killed, and unreachable. The usual tests run the laws on the other stores already.

mod common;
use common::*;

use std::process::{Output, Stdio};
use std::time::Instant;

use lockkeeper_testkit::servers::{
    self, AppendOnly, EtcdOptions, PostgresOptions, RedisOptions, ZooKeeperOptions,
};
use rustix::process::Signal;
use serde_json::Value;

/// Runs a verification of this store to its end, and looks at its verdicts.
fn verify(place: &Place, url: &str) -> Value {
    let output = place.lk(["verify", "--json", "--store", url]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)));
    let failed: Vec<&Value> = laws(&report).filter(|law| law["outcome"] != "kept").collect();
    assert_eq!(report["verdict"], "kept", "{failed:?}");
    assert_eq!(output.status.code(), Some(0));
    assert!(failed.iter().all(|law| law["outcome"] == "left-out"), "{failed:?}");
    assert!(laws(&report).filter(|law| law["outcome"] == "kept").count() > 60, "{report}");
    assert_eq!(report["left"], Value::Null);
    assert_eq!(below(place, url, report["prefix"].as_str().unwrap()), 0);
    report
}

fn laws(report: &Value) -> impl Iterator<Item = &Value> {
    report["laws"].as_array().expect("laws").iter()
}

/// How many locks and records there are below the prefix.
fn below(place: &Place, url: &str, prefix: &str) -> usize {
    let count = |words: &[&str]| {
        let output: Output = place.lk(words).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).matches(prefix).count()
    };
    let records = match url.starts_with("redlock:") {
        true => 0,
        false => count(&["record", "ls", prefix, "--json", "--store", url]),
    };
    count(&["ls", prefix, "--json", "--store", url]) + records
}

#[test]
fn the_default_store_keeps_its_promises_beside_other_users() {
    let place = Place::new("verify_sqlite");
    let holder = place.hold("mine");
    let report = verify(&place, &place.url());
    assert_eq!(report["store"], "sqlite");
    let promises: Vec<_> = report["promises"].as_array().unwrap().iter().collect();
    assert_eq!(promises.len(), 6, "{promises:?}");
    let locks = text(&place.run("ls"));
    assert!(locks.contains("mine"), "the lock of another user was touched: {locks}");
    drop(holder);
}

#[test]
fn redis_keeps_its_promises() {
    let Ok(()) = servers::only_with_full() else { return };
    let options = RedisOptions { append_only: AppendOnly::Always, ..RedisOptions::default() };
    let Ok(server) = servers::redis(options) else { return };
    verify(&Place::new("verify_redis"), &format!("redis://{}", server.addr()));
}

#[test]
fn postgres_keeps_its_promises() {
    let Ok(()) = servers::only_with_full() else { return };
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("postgres://postgres@{}/postgres?timeout=20s", server.addr());
    verify(&Place::new("verify_postgres"), &url);
}

#[test]
fn etcd_keeps_its_promises() {
    let Ok(()) = servers::only_with_full() else { return };
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    verify(&Place::new("verify_etcd"), &format!("etcd://{}?timeout=20s", server.addr()));
}

#[test]
fn zookeeper_keeps_its_promises() {
    let Ok(()) = servers::only_with_full() else { return };
    let patient =
        ZooKeeperOptions { extra: vec!["maxSessionTimeout=60000".into()], ..ZooKeeperOptions::default() };
    let Ok(server) = servers::zookeeper(patient) else { return };
    let url = format!("zk://{}/locks?timeout=20s&session=20s&create=yes", server.addr());
    verify(&Place::new("verify_zookeeper"), &url);
}

#[test]
fn redlock_keeps_its_promises() {
    let Ok(()) = servers::only_with_full() else { return };
    let nodes: Vec<_> = (0..3).map_while(|_| servers::redis(RedisOptions::default()).ok()).collect();
    if nodes.len() < 3 {
        return;
    }
    let hosts: Vec<String> = nodes.iter().map(|server| server.addr().to_string()).collect();
    // The nodes are as young as the test.
    let url = format!("redlock://{}?young_node=0s&node_timeout=800ms&timeout=5s", hosts.join(","));
    verify(&Place::new("verify_redlock"), &url);
}

/// A verification that has begun: there are locks below its prefix.
fn begun(place: &Place) -> std::process::Child {
    let child =
        place.lk(["verify", "--quiet"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + LONG;
    while below(place, &place.url(), "lockkeeper-verify/") == 0 {
        assert!(Instant::now() < end, "the verification did not begin");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    child
}

#[test]
fn a_verification_that_a_signal_ends_leaves_nothing() {
    let place = Place::new("verify_signal");
    let child = begun(&place);
    kill(&child, Signal::INT);
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{told}");
    assert!(told.contains("ended by a signal; nothing is left in the store"), "{told}");
    assert_eq!(below(&place, &place.url(), "lockkeeper-verify/"), 0);
}

#[test]
fn what_a_killed_verification_leaves_ends_by_itself() {
    let place = Place::new("verify_killed");
    let child = begun(&place);
    kill(&child, Signal::KILL);
    assert!(!child.wait_with_output().unwrap().status.success());
    let end = Instant::now() + lockkeeper_testkit::verify::LONGEST + LONG;
    while below(&place, &place.url(), "lockkeeper-verify/") > 0 {
        assert!(Instant::now() < end, "something is left: {}", text(&place.run("ls")));
        std::thread::sleep(std::time::Duration::from_millis(500));
    }
}

fn kill(child: &std::process::Child, signal: Signal) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, signal).expect("it runs");
}

#[test]
fn an_unreachable_store_is_told_from_a_bad_one() {
    let place = Place::new("verify_unreachable");
    let output = place.lk(["verify", "--store", "redis://127.0.0.1:1"]).output().unwrap();
    assert_eq!(output.status.code(), Some(69));
    let output = place.lk(["verify", "--connections", "1"]).output().unwrap();
    assert_eq!(output.status.code(), Some(64));
}
