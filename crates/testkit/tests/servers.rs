//! The servers of the tests are real, start on free ports, and are gone afterwards.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lockkeeper_testkit::servers::{
    self, AppendOnly, EtcdOptions, Launch, PostgresOptions, Program, RedisOptions, Server, ServerSite,
    Signal, ZooKeeperOptions, redis_call, redis_socket,
};

fn alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// Asks again until it is so; the deadline is far beyond what a healthy machine needs.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn redis_keeps_its_data_and_its_port_over_kill_and_restart_if_told_to() {
    let options = RedisOptions { append_only: AppendOnly::Always, ..RedisOptions::default() };
    let Ok(mut redis) = servers::redis(options) else { return };
    let addr = redis.addr();
    redis_call(addr, &["SET", "k", "v"]).unwrap();
    let first = redis.pid().unwrap();
    redis.kill9();
    assert!(!alive(first) && redis.pid().is_none());
    assert!(redis_call(addr, &["GET", "k"]).is_err(), "no server is there");
    redis.restart();
    assert_eq!(redis.addr(), addr);
    assert_eq!(redis_call(addr, &["GET", "k"]).unwrap(), "v");
    redis.restart();
    assert_eq!(redis_call(addr, &["GET", "k"]).unwrap(), "v", "also when it was stopped, not killed");
    let (dir, last) = (redis.place().dir().to_owned(), redis.pid().unwrap());
    drop(redis);
    assert!(!alive(last) && !dir.exists());
}

#[test]
fn redis_in_memory_forgets_and_a_paused_one_takes_connections_without_an_answer() {
    let Ok(mut redis) = servers::redis(RedisOptions::default()) else { return };
    redis_call(redis.addr(), &["SET", "k", "v"]).unwrap();
    redis.pause();
    TcpStream::connect(redis.addr()).expect("the kernel takes it");
    assert!(redis_call(redis.addr(), &["PING"]).is_err());
    redis.resume();
    assert_eq!(redis_call(redis.addr(), &["PING"]).unwrap(), "PONG");
    redis.kill9();
    redis.restart();
    assert_eq!(redis_call(redis.addr(), &["GET", "k"]).unwrap(), "(nil)");
}

#[test]
fn redis_listens_on_a_unix_socket_follows_a_primary_and_takes_settings() {
    let options = RedisOptions { unix_socket: true, ..RedisOptions::default() };
    let Ok(primary) = servers::redis(options) else { return };
    let mut socket = UnixStream::connect(redis_socket(&primary)).unwrap();
    socket.write_all(b"SET k v\r\n").unwrap();
    let mut answer = [0; 5];
    socket.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"+OK\r\n");

    let extra = vec![("maxmemory-policy".to_owned(), "allkeys-lru".to_owned())];
    let options = RedisOptions { replica_of: Some(primary.addr()), extra, ..RedisOptions::default() };
    let replica = servers::redis(options).unwrap();
    assert!(
        redis_call(replica.addr(), &["CONFIG", "GET", "maxmemory-policy"]).unwrap().contains("allkeys-lru")
    );
    eventually("the replica has it", || redis_call(replica.addr(), &["GET", "k"]).is_ok_and(|v| v == "v"));
}

#[test]
fn many_servers_start_at_once_and_none_takes_the_port_of_another() {
    let start = || servers::redis(RedisOptions::default()).ok();
    let servers: Vec<Option<Server>> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..6).map(|_| scope.spawn(start)).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    for (n, server) in servers.iter().flatten().enumerate() {
        redis_call(server.addr(), &["SET", "me", &n.to_string()]).unwrap();
    }
    for (n, server) in servers.iter().flatten().enumerate() {
        assert_eq!(redis_call(server.addr(), &["GET", "me"]).unwrap(), n.to_string());
    }
}

/// A session with PostgreSQL, in as few words as possible.
struct Session(TcpStream);

impl Session {
    fn open(server: &Server) -> Session {
        let mut session = Session(TcpStream::connect(server.addr()).unwrap());
        session.0.write_all(b"\0\0\0\x17\0\x03\0\0user\0postgres\0\0").unwrap();
        assert!(session.hears("server_version", Duration::from_secs(20)));
        session
    }

    fn request(&mut self, sql: &str) {
        let length = (sql.len() as u32 + 5).to_be_bytes();
        self.0.write_all(&[b"Q", &length[..], sql.as_bytes(), b"\0"].concat()).unwrap();
    }

    /// Whether this comes before the connection is silent for so long, or ends.
    fn hears(&mut self, what: &str, patience: Duration) -> bool {
        self.0.set_read_timeout(Some(patience)).unwrap();
        let (mut seen, mut chunk) = (String::new(), [0; 4096]);
        while !seen.contains(what) {
            match self.0.read(&mut chunk) {
                Ok(n) if n > 0 => seen.push_str(&String::from_utf8_lossy(&chunk[..n])),
                _ => return false,
            }
        }
        true
    }
}

#[test]
fn postgres_starts_stops_and_its_sessions_are_paused_and_killed_with_it() {
    let settings = vec![("max_connections".to_owned(), "10".to_owned())];
    let Ok(mut postgres) = servers::postgres(PostgresOptions { settings, ..PostgresOptions::default() })
    else {
        return;
    };
    let addr = postgres.addr();
    let mut session = Session::open(&postgres);
    postgres.pause();
    session.request("select 'awake' || current_setting('max_connections')");
    assert!(!session.hears("awake10", Duration::from_millis(300)), "it was not paused with its server");
    postgres.resume();
    assert!(session.hears("awake10", Duration::from_secs(20)));

    for _ in 0..3 {
        // A child of the old server that is not gone yet would keep the new one from starting.
        let _busy = Session::open(&postgres);
        postgres.kill9();
        assert!(TcpStream::connect(addr).is_err());
        postgres.restart();
    }
    let (_open, start) = (Session::open(&postgres), Instant::now());
    postgres.stop();
    assert!(start.elapsed() < Duration::from_secs(15), "it waited for a session to end");
    assert!(postgres.log().contains("database system is shut down"), "{}", postgres.log());
    postgres.restart();
    assert_eq!(postgres.addr(), addr);
}

#[test]
fn etcd_starts_again_after_a_kill() {
    let Ok(mut etcd) = servers::etcd(EtcdOptions::default()) else { return };
    let post = |etcd: &Server, path: &str, body: &str| {
        let mut stream = TcpStream::connect(etcd.addr()).unwrap();
        let head = format!("POST {path} HTTP/1.0\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all((head + body).as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    post(&etcd, "/v3/kv/put", r#"{"key":"aw==","value":"dg=="}"#);
    etcd.kill9();
    etcd.restart();
    assert!(post(&etcd, "/v3/kv/range", r#"{"key":"aw=="}"#).contains("dg=="));
}

#[test]
fn zookeeper_starts_again_after_a_kill() {
    let Ok(mut zookeeper) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let request = |server: &Server| {
        let mut stream = TcpStream::connect(server.addr()).unwrap();
        stream.write_all(b"srvr").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(request(&zookeeper).contains("Mode: standalone"));
    zookeeper.kill9();
    zookeeper.restart();
    assert!(request(&zookeeper).contains("Mode: standalone"));
}

/// A program that says something and ends.
struct Broken;

impl Program for Broken {
    fn name(&self) -> &str {
        "broken"
    }
    fn ports(&self) -> usize {
        1
    }
    fn prepare(&self, _place: &ServerSite) -> std::io::Result<()> {
        Ok(())
    }
    fn launch(&self, _place: &ServerSite) -> Launch {
        Launch::new("/bin/sh", ["-c", "echo the disk is on fire; exit 3"])
    }
    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }
    fn ping(&self, _place: &ServerSite, _pid: u32) -> std::io::Result<()> {
        Err(std::io::Error::other("no answer"))
    }
}

#[test]
fn a_failed_start_shows_the_log_and_keeps_its_directory() {
    let panic = std::panic::catch_unwind(|| Server::start(Broken)).unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains("broken did not start: it ended with exit status: 3"), "{text}");
    assert!(text.ends_with("the disk is on fire"), "{text}");
    let dir = text.lines().find_map(|line| line.strip_prefix("in: ")).unwrap();
    std::fs::remove_dir_all(dir).unwrap();
}

/// Not a test of its own: the next ones run it in a process that they can kill, or that has other variables set.
#[test]
#[ignore = "run by other tests"]
fn child_starts_a_redis_and_waits() {
    let Ok(redis) = servers::redis(RedisOptions::default()) else { return };
    println!("\ndir={}\npid={}", redis.place().dir().display(), redis.pid().unwrap());
    let _ = std::io::stdin().read(&mut [0]);
}

fn child() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "child_starts_a_redis_and_waits"]);
    command
}

#[test]
fn a_killed_test_leaves_no_server_behind() {
    if servers::require("redis", "redis-server", "redis-server").is_err() {
        return;
    }
    let mut test = child().stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(test.stdout.take().unwrap()));
    let mut said = |what: &str| {
        lines.find_map(|line| line.unwrap().strip_prefix(what).map(str::to_owned)).expect("it says so")
    };
    let (dir, pid) = (said("dir="), said("pid=").parse().unwrap());
    assert!(alive(pid));
    test.kill().unwrap();
    test.wait().unwrap();
    eventually("the server is gone", || !alive(pid));
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn running_without_a_server_is_said_aloud() {
    let dir = servers::TempDir::new("skip");
    let file = dir.join("skipped");
    let mut command = child();
    let command = command.env("LOCKKEEPER_WITHOUT", "etcd, redis").env("LOCKKEEPER_SKIPPED", &file);
    let output = command.output().unwrap();
    assert!(output.status.success());
    let line = "SKIPPED: child_starts_a_redis_and_waits needs redis, and LOCKKEEPER_WITHOUT names it";
    assert!(String::from_utf8_lossy(&output.stderr).contains(line), "{output:?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), format!("{line}\n"));
}

#[test]
fn moto_answers_and_is_gone_afterwards() {
    let Ok(moto) = servers::moto() else { return };
    let pid = moto.pid().unwrap();
    moto.ready().unwrap();
    drop(moto);
    assert!(!alive(pid));
}
