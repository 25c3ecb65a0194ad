//! The unknown outcome on real servers, with their own clients: so the framing is right about what they really say.

use std::net::SocketAddr;
use std::process::Command;

use lockkeeper_testkit::proxy::{Fault, Framing, Proxy, Upstream, every_point};
use lockkeeper_testkit::servers::{
    self, EtcdOptions, PostgresOptions, RedisOptions, ZooKeeperOptions, redis_call, require,
};

/// Whether it ended well, and what it said.
fn run(command: &mut Command) -> (bool, String) {
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn a_set_on_a_real_redis_has_an_unknown_outcome() {
    let Ok(redis) = servers::redis(RedisOptions { unix_socket: true, ..RedisOptions::default() }) else {
        return;
    };
    let socket = servers::redis_socket(&redis);
    for upstream in [Upstream::Tcp(redis.addr()), Upstream::Unix(socket)] {
        redis_call(redis.addr(), &["FLUSHALL"]).unwrap();
        let proxy = Proxy::start(upstream, Framing::Resp);
        let fault = proxy.inject(Fault::at_request(1).cut_before_reply());
        let answer = redis_call(proxy.addr(), &["SET", "lock", "mine", "NX", "PX", "60000"]);
        assert!(answer.is_err() && fault.fired(), "{answer:?}");
        assert_eq!(redis_call(redis.addr(), &["GET", "lock"]).unwrap(), "mine", "and yet it happened");

        let fault = proxy.inject(Fault::at_request(1).cut());
        assert!(redis_call(proxy.addr(), &["SET", "other", "mine"]).is_err() && fault.fired());
        assert_eq!(redis_call(redis.addr(), &["GET", "other"]).unwrap(), "(nil)", "this one did not");
        assert_eq!(redis_call(proxy.addr(), &["PING"]).unwrap(), "PONG");
    }
}

#[tokio::test]
async fn an_insert_on_a_real_postgres_has_an_unknown_outcome_at_every_request() {
    let Ok(postgres) = servers::postgres(PostgresOptions::default()) else { return };
    let Ok(program) = require("postgres", "psql", "postgresql-client") else { return };
    let psql = |addr: SocketAddr, sql: &str| {
        let mut command = Command::new(&program);
        command.args(["-h", "127.0.0.1", "-U", "postgres", "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", sql]);
        run(command.args(["-p", &addr.port().to_string()]))
    };
    assert!(psql(postgres.addr(), "create table t (n int)").0);
    let points = every_point(20, async |n| {
        let proxy = Proxy::start(postgres.addr(), Framing::Postgres);
        let fault = proxy.inject(Fault::at_request(n).cut_before_reply());
        let (done, said) = psql(proxy.addr(), &format!("insert into t values ({n})"));
        assert!(done != fault.fired(), "request {n}: {said}");
        assert_eq!(proxy.trouble(), None);
        fault.fired()
    });
    // "May we encrypt?", the start-up, and the statement; psql does not wait for an answer to its farewell.
    assert_eq!(points.await, 3);
    let (_, rows) = psql(postgres.addr(), "select n from t order by n");
    assert_eq!(rows.trim(), "3\n4", "the third was done and not heard of; the fourth went well");
}

#[tokio::test]
async fn a_put_on_a_real_etcd_has_an_unknown_outcome() {
    let Ok(etcd) = servers::etcd(EtcdOptions::default()) else { return };
    let Ok(program) = require("etcd", "etcdctl", "etcd-client") else { return };
    let etcdctl = |addr: SocketAddr, args: &[&str]| {
        let mut command = Command::new(&program);
        command.env("ETCDCTL_API", "3").args(["--command-timeout=5s", &format!("--endpoints={addr}")]);
        run(command.args(args))
    };
    let points = every_point(20, async |n| {
        let proxy = Proxy::start(etcd.addr(), Framing::Http2);
        let fault = proxy.inject(Fault::at_request(n).cut_before_reply());
        let key = format!("k{n}");
        let (done, said) = etcdctl(proxy.addr(), &["put", &key, "v"]);
        assert!(done != fault.fired(), "request {n}: {said}");
        assert_eq!(proxy.trouble(), None);
        let there = etcdctl(etcd.addr(), &["get", &key, "--print-value-only"]).1;
        assert_eq!(there.trim(), "v", "it happened, whether it was heard of or not");
        fault.fired()
    });
    assert_eq!(points.await, 1, "one put is one request");
}

#[test]
fn a_create_on_a_real_zookeeper_has_an_unknown_outcome() {
    let Ok(zookeeper) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let cli = |addr: SocketAddr, args: &[&str]| {
        let jar = "/usr/share/java/zookeeper.jar";
        let mut command = Command::new("java");
        command.args(["-cp", jar, "org.apache.zookeeper.ZooKeeperMain", "-server", &addr.to_string()]);
        run(command.args(args))
    };
    let proxy = Proxy::start(zookeeper.addr(), Framing::ZooKeeper);
    // The first request opens the session.
    let fault = proxy.inject(Fault::at_request(2).cut_before_reply());
    let (_, said) = cli(proxy.addr(), &["create", "/lock", "mine"]);
    assert!(fault.fired() && !said.contains("Created /lock"), "{said}");
    assert_eq!(proxy.trouble(), None);
    let (_, there) = cli(zookeeper.addr(), &["get", "/lock"]);
    assert!(there.lines().any(|line| line == "mine"), "{there}");
}
