//! `store init`: what a store needs is made once, and a call that lacks a store prints how to get it. Stores that are left out unless
//! they are asked for.

mod common;
use common::*;

#[test]
fn a_store_that_needs_nothing_is_opened() {
    let place = Place::new("store_opened");
    let url = place.url();
    let done = place.lk(["store", "init", &url]).output().unwrap();
    assert!(done.status.success() && text(&done).starts_with("opened"), "{done:?}");
    assert!(place.db().exists());
    // The store may come from the environment, as everywhere.
    assert_eq!(json(&place.run("store init --json"))["store"], "opened");
    assert_eq!(place.run("store init sqlite:/no/such/place/locks.db").status.code(), Some(69));
    assert_eq!(place.run("store init nonsense").status.code(), Some(64));
}

#[cfg(not(feature = "dynamodb"))]
#[test]
fn a_build_without_dynamodb_says_how_to_get_one() {
    let place = Place::new("store_without");
    for line in ["store init dynamodb://eu-central-1/locks", "ls --store dynamodb://eu-central-1/locks"] {
        let refused = place.run(line);
        assert_eq!(refused.status.code(), Some(78), "{refused:?}");
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(said.contains("--features dynamodb"), "{said}");
    }
}

#[cfg(not(feature = "zookeeper-tls"))]
#[test]
fn a_build_without_tls_for_zookeeper_says_how_to_get_one() {
    let place = Place::new("store_without_tls");
    let refused = place.run("ls --store zks://127.0.0.1/locks");
    assert_eq!(refused.status.code(), Some(78), "{refused:?}");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("--features zookeeper-tls"), "{said}");
}

#[cfg(feature = "zookeeper-tls")]
#[test]
fn processes_exclude_each_other_over_tls() {
    use lockkeeper_testkit::servers::{TlsFiles, ZooKeeperOptions, zookeeper, zookeeper_tls_addr};
    let tls = TlsFiles::new();
    let options = ZooKeeperOptions { tls: Some(tls.clone()), ..ZooKeeperOptions::default() };
    let Ok(server) = zookeeper(options) else { return };
    let place = Place::new("store_zks");
    let url = format!("zks://{}?timeout=20s", zookeeper_tls_addr(&server));
    let lk = |line: &str, ca: &TlsFiles| {
        let mut command = place.lk(line.split(' '));
        // Whom the machine believes.
        command.env("LOCKKEEPER_STORE", &url).env("SSL_CERT_FILE", ca.ca_path()).env_remove("SSL_CERT_DIR");
        command
    };
    let mut holder = Running::new(lk("hold nightly --ttl 5s", &tls));
    assert!(holder.line().starts_with("held "));
    assert_eq!(lk("run nightly --skip -- true", &tls).output().unwrap().status.code(), Some(75));
    let waiter = lk("run nightly --correctness -- true", &tls).spawn().unwrap();
    holder.signal(rustix::process::Signal::TERM);
    assert!(waiter.wait_with_output().unwrap().status.success());
    let stranger = lk("run nightly -- true", &TlsFiles::new()).output().unwrap();
    assert_eq!(stranger.status.code(), Some(77), "{stranger:?}");
    assert!(String::from_utf8_lossy(&stranger.stderr).contains("?ca=FILE"), "{stranger:?}");
}

#[cfg(feature = "dynamodb")]
#[test]
fn the_table_is_made_once_and_then_used() {
    let Ok(server) = lockkeeper_testkit::servers::moto() else { return };
    let place = Place::new("store_dynamodb");
    let url =
        format!("dynamodb://test:secret@eu-central-1/locks?endpoint=http://{}&timeout=10s", server.addr());
    let lk = |words: &[&str]| place.lk(words).env("LOCKKEEPER_STORE", &url).output().unwrap();
    // Before: told what to do, and nothing is done.
    let missing = lk(&["run", "nightly", "--", "true"]);
    assert_eq!(missing.status.code(), Some(64), "{missing:?}");
    assert!(String::from_utf8_lossy(&missing.stderr).contains("lockkeeper store init"), "{missing:?}");
    assert!(text(&lk(&["store", "init"])).starts_with("made"));
    assert!(text(&lk(&["store", "init"])).starts_with("it was there"));
    let done = lk(&["run", "nightly", "--correctness", "--", "sh", "-c", "echo $LOCKKEEPER_FENCE"]);
    assert!(done.status.success() && text(&done).trim().parse::<u64>().is_ok(), "{done:?}");
}

/// A job that never waits, from a crontab: every run is a process of its own, and looks only once. The runs of one machine know
/// of each other, so that a dead holder does not keep all of them out for ever.
#[cfg(feature = "dynamodb")]
#[test]
fn a_job_that_never_waits_gets_the_lock_of_a_dead_holder() {
    let Ok(server) = lockkeeper_testkit::servers::moto() else { return };
    let place = Place::new("store_skip");
    let url =
        format!("dynamodb://test:secret@eu-central-1/locks?endpoint=http://{}&timeout=10s", server.addr());
    let lk = |line: &str| {
        let mut command = place.lk(line.split(' '));
        command.env("LOCKKEEPER_STORE", &url);
        command
    };
    assert!(lk("store init").output().unwrap().status.success());
    let mut holder = Running::new(lk("hold nightly --ttl 2s"));
    assert!(holder.line().starts_with("held "));
    assert_eq!(lk("run nightly --skip -- true").output().unwrap().status.code(), Some(75));
    holder.signal(rustix::process::Signal::KILL);
    let started = std::time::Instant::now();
    loop {
        let done = lk("run nightly --skip -- true").output().unwrap();
        if done.status.success() {
            break;
        }
        assert_eq!(done.status.code(), Some(75), "{done:?}");
        assert!(started.elapsed() < LONG, "the dead holder still excludes all others");
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
}
