//! Clients that ask again as soon as they are answered, each for a resource of its own.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The median time from a request to its answer, and how many there were.
pub async fn median_latency(addr: SocketAddr, connections: usize, time: Duration) -> (Duration, usize) {
    let clients: Vec<_> = (0..connections).map(|n| tokio::spawn(client(addr, n, time))).collect();
    let (mut all, mut requests) = (Vec::new(), 0);
    for client in clients {
        let (seen, sent) = client.await.expect("it ends well");
        all.extend(seen);
        requests += sent;
    }
    (crate::median(all), requests)
}

async fn client(addr: SocketAddr, n: usize, time: Duration) -> (Vec<Duration>, usize) {
    let mut stream = TcpStream::connect(addr).await.expect("a connection");
    stream.set_nodelay(true).expect("an option");
    let body = "x".repeat(100);
    let request =
        format!("PUT /orders/{n} HTTP/1.1\r\nHost: a\r\nLock-Fence: 5\r\nContent-Length: 100\r\n\r\n{body}");
    let (began, mut seen, mut requests, mut some) = (Instant::now(), Vec::new(), 0, [0; 4096]);
    while began.elapsed() < time {
        let sent = Instant::now();
        stream.write_all(request.as_bytes()).await.expect("it takes a request");
        let mut heard = 0;
        while !some[..heard].ends_with(b"written") {
            let more = stream.read(&mut some[heard..]).await.expect("it answers");
            assert!(
                more > 0 && some.starts_with(b"HTTP/1.1 200"),
                "{}",
                String::from_utf8_lossy(&some[..heard])
            );
            heard += more;
        }
        requests += 1;
        // The first fifth warms up.
        if began.elapsed() > time / 5 {
            seen.push(sent.elapsed());
        }
    }
    (seen, requests)
}
