//! The proxy does what it is told, at the message it is told, and says whether it did.

#[path = "proxy/real.rs"]
mod real;

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lockkeeper_testkit::proxy::{Direction, Fault, Framing, Pick, Proxy, Upstream, every_point};
use lockkeeper_testkit::servers::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

const LONG: Duration = Duration::from_secs(20);
/// Long enough for what will not come to have come.
const SHORT: Duration = Duration::from_millis(200);

/// A server that answers each line `PING n` with `+n`, and counts how many it has seen.
struct Pinger {
    addr: SocketAddr,
    seen: Arc<AtomicU64>,
}

impl Pinger {
    async fn start() -> Pinger {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (addr, seen) = (listener.local_addr().unwrap(), Arc::new(AtomicU64::new(0)));
        let count = seen.clone();
        tokio::spawn(async move {
            loop {
                let mut stream = BufReader::new(listener.accept().await.unwrap().0);
                let count = count.clone();
                tokio::spawn(async move {
                    let mut line = String::new();
                    while stream.read_line(&mut line).await.is_ok_and(|n| n > 0) {
                        count.fetch_add(1, Ordering::SeqCst);
                        let n = line.trim_end().rsplit(' ').next().unwrap();
                        if stream.write_all(format!("+{n}\r\n").as_bytes()).await.is_err() {
                            break;
                        }
                        line.clear();
                    }
                });
            }
        });
        Pinger { addr, seen }
    }

    fn seen(&self) -> u64 {
        self.seen.load(Ordering::SeqCst)
    }
}

struct Client(BufReader<TcpStream>);

impl Client {
    async fn connect(proxy: &Proxy) -> Client {
        Client(BufReader::new(TcpStream::connect(proxy.addr()).await.unwrap()))
    }

    async fn send(&mut self, n: u64) {
        let _ = self.0.write_all(format!("PING {n}\r\n").as_bytes()).await;
    }

    /// The next answer; `None` at the end of the connection.
    async fn hear(&mut self) -> std::io::Result<Option<u64>> {
        let mut line = String::new();
        let read =
            tokio::time::timeout(LONG, self.0.read_line(&mut line)).await.expect("neither answer nor end");
        Ok((read? > 0).then(|| line.trim_end()[1..].parse().unwrap()))
    }

    async fn ping(&mut self, n: u64) -> Option<u64> {
        self.send(n).await;
        self.hear().await.ok().flatten()
    }

    async fn is_silent(&mut self) -> bool {
        tokio::time::timeout(SHORT, self.0.fill_buf()).await.is_err()
    }
}

async fn world() -> (Pinger, Proxy, Client) {
    let server = Pinger::start().await;
    let proxy = Proxy::start(server.addr, Framing::Resp);
    let client = Client::connect(&proxy).await;
    (server, proxy, client)
}

#[tokio::test]
async fn without_faults_everything_passes_and_is_counted() {
    let (server, proxy, mut client) = world().await;
    for n in 1..=20 {
        assert_eq!(client.ping(n).await, Some(n));
    }
    let count = proxy.count();
    assert_eq!((count.connections, count.open, count.requests, count.replies), (1, 1, 20, 20));
    assert_eq!((proxy.fired(), server.seen(), proxy.trouble()), (0, 20, None));
}

#[tokio::test]
async fn a_cut_request_never_arrives_and_a_cut_after_it_arrives() {
    let (server, proxy, mut client) = world().await;
    let fault = proxy.inject(Fault::at_request(3).cut());
    assert_eq!((client.ping(1).await, client.ping(2).await), (Some(1), Some(2)));
    assert!(!fault.fired());
    assert_eq!(client.ping(3).await, None);
    assert!(fault.fired());
    assert_eq!(server.seen(), 2);

    let mut client = Client::connect(&proxy).await;
    let fault = proxy.inject(Fault::at_reply(1).cut_after());
    assert_eq!(client.ping(3).await, Some(3), "the reply itself is passed on");
    assert_eq!(client.ping(4).await, None);
    assert!(fault.fired());
}

#[tokio::test]
async fn the_unknown_outcome_happens_and_is_not_heard_of() {
    let (server, proxy, mut client) = world().await;
    let fault = proxy.inject(Fault::at_request(2).cut_before_reply());
    assert_eq!(client.ping(1).await, Some(1));
    assert_eq!(client.ping(2).await, None);
    fault.until_fired().await;
    assert_eq!(server.seen(), 2, "it reached the server");
    let mut client = Client::connect(&proxy).await;
    assert_eq!(client.ping(3).await, Some(3), "once only");
}

#[tokio::test]
async fn earlier_answers_still_come_before_the_cut() {
    let (_server, proxy, mut client) = world().await;
    proxy.inject(Fault::at_request(3).cut_before_reply());
    for n in 1..=4 {
        client.send(n).await;
    }
    assert_eq!(client.hear().await.unwrap(), Some(1));
    assert_eq!(client.hear().await.unwrap(), Some(2));
    assert!(client.hear().await.is_err() || client.hear().await.unwrap().is_none());
}

#[tokio::test]
async fn a_reset_is_a_reset() {
    let (_server, proxy, mut client) = world().await;
    let fault = proxy.inject(Fault::at_request(1).reset_before_reply());
    client.send(1).await;
    assert_eq!(client.hear().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert!(fault.fired());
    let mut client = Client::connect(&proxy).await;
    assert_eq!(client.ping(1).await, Some(1));
    assert_eq!(proxy.reset(Pick::Any), 1);
    assert_eq!(client.hear().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn messages_are_dropped_and_duplicated() {
    let (server, proxy, mut client) = world().await;
    let dropped = proxy.inject(Fault::at_request(2).drop());
    let twice = proxy.inject(Fault::at_request(3).duplicate());
    for n in 1..=4 {
        client.send(n).await;
    }
    for n in [1, 3, 3, 4] {
        assert_eq!(client.hear().await.unwrap(), Some(n));
    }
    assert!(dropped.fired() && twice.fired() && server.seen() == 4);
    let gone = proxy.inject(Fault::at_reply(1).drop());
    client.send(5).await;
    client.send(6).await;
    assert_eq!(client.hear().await.unwrap(), Some(6));
    assert!(gone.fired());
}

#[tokio::test]
async fn what_is_held_goes_on_when_released_and_what_is_delayed_comes_late() {
    let (server, proxy, mut client) = world().await;
    let held = proxy.inject(Fault::at_reply(1).hold());
    client.send(1).await;
    held.until_fired().await;
    assert!(client.is_silent().await && server.seen() == 1);
    held.release();
    assert_eq!(client.hear().await.unwrap(), Some(1));

    let late = Duration::from_millis(150);
    proxy.inject(Fault::at_request(1).and_every_later_one().delay(late));
    let start = Instant::now();
    assert_eq!((client.ping(2).await, client.ping(3).await), (Some(2), Some(3)));
    assert!(start.elapsed() >= late * 2, "{:?}", start.elapsed());
    proxy.heal();
    assert_eq!(client.ping(4).await, Some(4));
}

/// A server that noticed that the client had left would not answer the request.
#[tokio::test]
async fn what_is_delivered_late_arrives_after_its_client_has_left() {
    let (server, proxy, mut client) = world().await;
    let late = proxy.inject(Fault::at_request(1).deliver_late());
    client.send(1).await;
    late.until_fired().await;
    client.send(2).await;
    drop(client);
    assert_eq!(server.seen(), 0);
    late.release();
    while proxy.count().replies < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(server.seen(), 2);
}

#[tokio::test]
async fn one_way_is_cut_and_the_other_is_not() {
    let (server, proxy, mut client) = world().await;
    assert_eq!(client.ping(1).await, Some(1));
    proxy.hold(Direction::Replies);
    client.send(2).await;
    assert!(client.is_silent().await);
    assert_eq!(server.seen(), 2, "requests still arrive");
    proxy.heal();
    assert_eq!(client.hear().await.unwrap(), Some(2));
    proxy.hold(Direction::Requests);
    client.send(3).await;
    assert!(client.is_silent().await);
    assert_eq!(server.seen(), 2, "this one does not");
    proxy.heal();
    assert_eq!(client.hear().await.unwrap(), Some(3));
}

#[tokio::test]
async fn one_of_two_connections_is_cut() {
    let (_server, proxy, mut first) = world().await;
    let mut second = Client::connect(&proxy).await;
    assert_eq!((first.ping(1).await, second.ping(2).await), (Some(1), Some(2)));
    assert_eq!(proxy.cut(Pick::Index(0)), 1);
    assert_eq!((first.ping(1).await, second.ping(3).await), (None, Some(3)));

    let mut listener = Client::connect(&proxy).await;
    listener.0.write_all(b"SUBSCRIBE 7\r\n").await.unwrap();
    assert_eq!(listener.hear().await.unwrap(), Some(7));
    let fault = proxy.inject(Fault::at_request(1).on(Pick::sent("subscribe")).cut());
    assert_eq!(second.ping(4).await, Some(4));
    assert!(!fault.fired(), "messages of other connections do not count");
    assert_eq!(listener.ping(8).await, None);
    assert!(fault.fired());
    assert_eq!(proxy.cut(Pick::sent("PING 4")), 1);
    assert_eq!(second.ping(5).await, None);
}

#[tokio::test]
async fn a_server_that_is_gone_refuses_until_it_is_healed() {
    let (_server, proxy, mut client) = world().await;
    for round in 0..20 {
        assert_eq!(client.ping(round).await, Some(round));
        proxy.cut_all();
        let refused = TcpStream::connect(proxy.addr()).await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::ConnectionRefused, "round {round}");
        assert_eq!(client.ping(1).await, None);
        proxy.heal();
        client = Client::connect(&proxy).await;
    }
}

#[tokio::test]
async fn a_server_that_is_gone_for_a_moment_is_there_again() {
    let (_server, proxy, mut client) = world().await;
    for round in 0..200 {
        assert_eq!(client.ping(round).await, Some(round));
        proxy.cut_all();
        proxy.heal();
        client = Client::connect(&proxy).await;
    }
}

#[tokio::test]
async fn a_slow_line_is_slow_and_can_be_healed() {
    let (_server, proxy, mut client) = world().await;
    proxy.throttle(40);
    let start = Instant::now();
    assert_eq!(client.ping(1).await, Some(1));
    // Eight bytes there and four back, at forty a second.
    assert!(start.elapsed() >= Duration::from_millis(280), "{:?}", start.elapsed());
    proxy.throttle(1);
    client.send(2).await;
    assert!(client.is_silent().await);
    proxy.heal();
    assert_eq!(client.hear().await.unwrap(), Some(2));
}

#[tokio::test]
async fn what_is_not_the_protocol_is_told_and_not_guessed() {
    let server = Pinger::start().await;
    let proxy = Proxy::start(server.addr, Framing::Http2);
    let mut client = Client::connect(&proxy).await;
    assert_eq!(client.ping(1).await, None);
    assert!(proxy.trouble().unwrap().contains("no HTTP/2 preface"));
}

#[tokio::test]
async fn bytes_pass_both_ways_over_a_unix_socket_and_one_end_may_close_first() {
    let dir = TempDir::new("proxy");
    let path = dir.join("echo");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        stream.write_all(&all).await.unwrap();
    });
    let proxy = Proxy::start(Upstream::Unix(path), Framing::Bytes);
    let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
    let sent: Vec<u8> = (0..1_000_000_u32).map(|n| (n % 251) as u8).collect();
    client.write_all(&sent).await.unwrap();
    client.shutdown().await.unwrap();
    let mut back = Vec::new();
    client.read_to_end(&mut back).await.unwrap();
    assert!(back == sent, "{} of {} bytes came back", back.len(), sent.len());
}

#[tokio::test]
async fn every_point_is_covered_and_then_the_sweep_ends() {
    let points = every_point(50, async |n| {
        let (server, proxy, mut client) = world().await;
        let fault = proxy.inject(Fault::at_request(n).cut_before_reply());
        for k in 1..=5 {
            if client.ping(k).await.is_none() {
                break;
            }
        }
        assert_eq!(server.seen(), n.min(5), "the server saw all up to the cut");
        fault.fired()
    });
    assert_eq!(points.await, 5);
}

#[tokio::test]
#[should_panic = "this tests nothing"]
async fn a_sweep_whose_fault_never_fires_is_no_test() {
    every_point(50, async |_| false).await;
}
