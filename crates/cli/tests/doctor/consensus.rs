//! The doctor on etcd and ZooKeeper.
#![cfg(all(feature = "etcd", feature = "zookeeper"))]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use lockkeeper_testkit::servers::{self, EtcdOptions, ZooKeeperOptions};

use crate::common::*;
use crate::tools::{Report, examine};

/// The version that Debian has is one with a known bug: with another one there is no such finding.
fn healthy_etcd(report: &Report, more: &[&str]) {
    let version =
        report.0["servers"].as_array().unwrap().iter().find_map(|server| server["version"].as_str());
    let known_bug = version.unwrap().starts_with("3.4.")
        && report.findings("risk").iter().any(|risk| risk.contains("15247"));
    let expected = [if known_bug { &["15247"][..] } else { &[] }, more].concat();
    report.is_healthy_but(&expected);
    assert_eq!(report.standing("exclusion"), if known_bug { "at risk" } else { "kept" });
    assert!(
        !known_bug || report.changes().iter().any(|change| change.contains("3.4.31")),
        "{:?}",
        report.changes()
    );
    assert!(version != Some("3.4.23") || known_bug, "3.4.23 has this bug");
}

/// Sends a request to the JSON gateway of etcd.
fn post(addr: SocketAddr, path: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(addr).unwrap();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}

#[test]
fn etcd_is_healthy_until_it_raises_an_alarm() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let place = Place::new("doctor_etcd");
    let url = format!("etcd://{}?timeout=20s", server.addr());
    healthy_etcd(&examine(&place, &url), &[]);
    let raised = post(
        server.addr(),
        "/v3/maintenance/alarm",
        r#"{"action":"ACTIVATE","memberID":0,"alarm":"NOSPACE"}"#,
    );
    assert!(raised.contains("200 OK"), "{raised}");
    let report = examine(&place, &url);
    report.has("harm", "NOSPACE").advises("the alarm NOSPACE to disarmed");
    assert_eq!((report.exit_code(), report.standing("availability").as_str()), (2, "broken"));
}

#[test]
fn a_dead_member_of_etcd_is_found_although_the_store_works() {
    let Ok(mut cluster) = servers::etcd_cluster(3, EtcdOptions::default()) else { return };
    cluster.settle();
    let dead = cluster.nodes()[2].addr().to_string();
    let url = format!("etcd://{}?timeout=20s", cluster.hosts());
    cluster.node_mut(2).kill9();
    // The others may need a moment for another leader.
    cluster.leader();
    let report = examine(&Place::new("doctor_etcd_dead"), &url);
    report.has("risk", &format!("the member {dead} sends no reply (2 of 3 do)"));
    assert_eq!(report.exit_code(), 1, "{}", report.0);
}

#[test]
fn zookeeper_is_healthy_alone_and_several_old_servers_are_a_risk() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let place = Place::new("doctor_zookeeper");
    let report = examine(&place, &format!("zk://{}/locks?create=yes&timeout=20s", server.addr()));
    report.is_healthy_but(&[]);
    assert_eq!((report.exit_code(), report.standing("exclusion").as_str()), (0, "kept"));
    drop(server);
    let Ok(mut cluster) = servers::zookeeper_cluster(3, ZooKeeperOptions::default()) else { return };
    cluster.settle();
    let url = format!("zk://{}/locks?create=yes&timeout=20s", cluster.hosts());
    let report = examine(&place, &url);
    // Debian has 3.8.0.
    if report.0["servers"][0]["version"] == "3.8.0" {
        report.is_healthy_but(&["can lose writes"]).advises("ZooKeeper to 3.9.4 or later");
        assert_eq!((report.exit_code(), report.standing("durability").as_str()), (1, "at risk"));
    }
    let dead = cluster.nodes()[2].addr().to_string();
    cluster.node_mut(2).kill9();
    cluster.leader();
    let report = examine(&place, &url);
    report.has("risk", &format!("the server {dead} does not reply to srvr (2 of 3 do)"));
}
