//! Endpoints: passwords, rights, TLS, sockets, and addresses where no server or another program listens.

use std::net::TcpListener;
use std::time::Duration;

use lockkeeper_core::{Expect, Outcome, Page};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, join_queue, name, refused, request, request_all, take,
};
use lockkeeper_testkit::servers::{
    self, RedisOptions, Server, TempDir, TlsFiles, redis_socket, redis_tls_addr,
};

use crate::common::{client_of, failed, open, refused_at_open, says, tell, url};

fn server() -> Option<Server> {
    servers::redis(RedisOptions::default()).ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_password_and_a_wrong_one_are_told_apart() {
    let extra = vec![("requirepass".to_owned(), "open sesame".to_owned())];
    let Ok(server) = servers::redis(RedisOptions { extra, ..RedisOptions::default() }) else { return };
    let addr = server.addr();
    says(&refused_at_open(&url(&server)).await, Outcome::Denied, &["NOAUTH", "redis://USER:PASSWORD@"]);
    for bad in ["redis://:wrong@", "redis://stranger:open%20sesame@"] {
        let error = refused_at_open(&format!("{bad}{addr}")).await;
        says(&error, Outcome::Denied, &["WRONGPASS"]);
        assert!(!error.to_string().contains("sesame"), "the password is told: {error}");
    }
    for good in ["redis://:open%20sesame@", "redis://default:open%20sesame@"] {
        let store = open(&format!("{good}{addr}")).await;
        give_back(&store, &take(&store, &request("jobs")).await.key).await;
    }
}

/// The rights that the manual names, word by word.
const RIGHTS: &str =
    "~lock:* ~lockkeeper:* &lockkeeper:* +@read +@write +@scripting +@pubsub +@connection +info +time +role";

fn user(server: &Server, name: &str, rights: &str) -> String {
    let mut words = vec!["ACL", "SETUSER", name, "reset", "on", ">pw"];
    words.extend(rights.split(' '));
    tell(server.addr(), &words);
    format!("redis://{name}:pw@{}", server.addr())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_in_the_manual_are_enough() {
    let manual = include_str!("../../../../docs/stores/redis.md");
    assert!(manual.contains(RIGHTS), "the manual names other rights now");
    let Some(server) = server() else { return };
    let worker = user(&server, "worker", RIGHTS);
    let (one, two) = (open(&worker).await, open(&worker).await);
    assert!(one.profile().findings.iter().any(|finding| finding.text.contains("no append-only file")));
    let held = take(&one, &request_all(&["a", "b"])).await;
    let _events = two.watch("").await.unwrap();
    let waiter = join_queue(&two, &request("a"), 1).await;
    assert_eq!(one.list("", &Page::FIRST).await.unwrap().locks.len(), 2);
    give_back(&one, &held.key).await;
    granted(waiter).await;
    one.break_lock(&name("a"), "why not").await.unwrap();
    one.write(&name("r"), b"v", Expect::Absent, Some(Duration::from_secs(60))).await.unwrap();
    assert_eq!(one.scan("", &Page::FIRST).await.unwrap().records.len(), 1);
    let replicated =
        open(&format!("{}?wait_replicas=1&timeout=2s", user(&server, "w", &format!("{RIGHTS} +wait")))).await;
    says(&failed(&replicated, &request("c")).await, Outcome::Unavailable, &["0 of 1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_error_for_a_user_names_the_missing_rights() {
    let Some(server) = server() else { return };
    let elsewhere = RIGHTS.replace("~lock:*", "~other:*");
    let mute = RIGHTS.replace("+@scripting", "-@scripting");
    for rights in [elsewhere, mute] {
        let store = open(&user(&server, "worker", &rights)).await;
        says(&failed(&store, &request("jobs")).await, Outcome::Denied, &["NOPERM", "docs/stores/redis.md"]);
    }
    let blind = user(&server, "blind", &RIGHTS.replace(" +info", " -info"));
    says(&refused_at_open(&blind).await, Outcome::Denied, &["NOPERM"]);
}

/// A right that is taken away while the store is open, and given again.
#[tokio::test(flavor = "multi_thread")]
async fn a_right_that_comes_back_is_noticed_without_a_new_open() {
    let Some(server) = server() else { return };
    let store = open(&user(&server, "worker", RIGHTS)).await;
    take(&store, &request("before")).await;
    tell(server.addr(), &["ACL", "SETUSER", "worker", "-@write"]);
    says(&failed(&store, &request("jobs")).await, Outcome::Denied, &["NOPERM"]);
    tell(server.addr(), &["ACL", "SETUSER", "worker", "+@write"]);
    take(&store, &request("jobs")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_needs_an_authority_that_vouches_for_the_server() {
    let tls = TlsFiles::new();
    let options = RedisOptions { tls: Some(tls.clone()), ..RedisOptions::default() };
    let Ok(server) = servers::redis(options) else { return };
    let (plain, secure) = (server.addr(), redis_tls_addr(&server));
    let ca = tls.ca_path().display().to_string();
    let store = open(&format!("rediss://{secure}?ca={ca}")).await;
    let held = take(&store, &request("jobs")).await;
    // Another way in to the same locks.
    let other = open(&format!("redis://{plain}")).await;
    let waiter = join_queue(&other, &request("jobs"), 1).await;
    give_back(&store, &held.key).await;
    granted(waiter).await;

    let stranger = TlsFiles::new().ca_path();
    assert!(!stranger.exists(), "the files went with their owner");
    let stranger = TlsFiles::new();
    let wrong = stranger.ca_path().display().to_string();
    for url in [format!("rediss://{secure}"), format!("rediss://{secure}?ca={wrong}")] {
        says(&refused_at_open(&url).await, Outcome::Unavailable, &["certificate"]);
    }
    // TLS at a plain endpoint, and the other way round: an error, not silence.
    for url in [format!("rediss://{plain}?ca={ca}&timeout=1s"), format!("redis://{secure}?timeout=1s")] {
        says(&refused_at_open(&url).await, Outcome::Unavailable, &["no Redis at"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn databases_are_apart_and_a_socket_is_an_endpoint_like_any_other() {
    let options = RedisOptions { unix_socket: true, ..RedisOptions::default() };
    let Ok(server) = servers::redis(options) else { return };
    let socket = format!("redis+unix://{}?db=3", redis_socket(&server).display());
    let three = open(&socket).await;
    take(&three, &request("jobs")).await;
    refused(&open(&format!("{}/3", url(&server))).await, &request("jobs")).await;
    take(&client_of(&server).await, &request("jobs")).await;
    let nowhere = format!("{}/99", url(&server));
    let error = refused_at_open(&nowhere).await;
    says(&error, Outcome::Invalid, &["DB index is out of range"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_without_a_server_is_unavailable() {
    let unused = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = unused.local_addr().unwrap();
    // It takes connections and says nothing.
    let silent = refused_at_open(&format!("redis://{addr}?timeout=200ms")).await;
    says(&silent, Outcome::Unavailable, &["did not answer", "200ms"]);
    drop(unused);
    says(&refused_at_open(&format!("redis://{addr}")).await, Outcome::Unavailable, &["no Redis at"]);
    let dir = TempDir::new("endpoint");
    let socket = format!("redis+unix://{}", dir.join("sock").display());
    says(&refused_at_open(&socket).await, Outcome::Unavailable, &["no Redis at"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_and_a_single_server_are_not_taken_for_each_other() {
    let Ok(cluster) = servers::redis_cluster(1) else { return };
    let node = refused_at_open(&url(&cluster.nodes()[0])).await;
    says(&node, Outcome::Invalid, &["redis+cluster://"]);
    let Some(server) = server() else { return };
    let single = refused_at_open(&format!("redis+cluster://{}", server.addr())).await;
    says(&single, Outcome::Unavailable, &["no node of a cluster", "redis://"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_is_no_place_for_locks() {
    let Some(primary) = server() else { return };
    let options = RedisOptions { replica_of: Some(primary.addr()), ..RedisOptions::default() };
    let Ok(replica) = servers::redis(options) else { return };
    says(&refused_at_open(&url(&replica)).await, Outcome::Invalid, &["is a replica", "primary"]);
    eventually("it is loaded", || async {
        tell(replica.addr(), &["INFO", "replication"]).contains("master_link_status:up")
    })
    .await;
    says(&refused_at_open(&url(&replica)).await, Outcome::Invalid, &["is a replica", "primary"]);
}
