//! The four-letter words of ZooKeeper's admin protocol. A server answers one of them on each connection.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::tls::ZooKeeperTls;

/// More than a server replies to any word that this store uses.
const MAX_REPLY: u64 = 64 << 10;

/// Sends a word to a server, and returns the reply.
pub async fn send(server: &str, tls: Option<&ZooKeeperTls>, word: &str) -> io::Result<String> {
    let stream = TcpStream::connect(server).await?;
    match tls {
        Some(tls) => exchange(tls.wrap(host(server), stream).await?, word).await,
        None => exchange(stream, word).await,
    }
}

/// The host of `host:port`, without brackets.
pub fn host(server: &str) -> &str {
    let host = server.rsplit_once(':').map_or(server, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin, word: &str) -> io::Result<String> {
    // A server that rejects connections sends the reason and closes: read it also when the write fails.
    let sent = async {
        stream.write_all(word.as_bytes()).await?;
        stream.flush().await
    };
    let sent = sent.await;
    let mut reply = Vec::new();
    let read = stream.take(MAX_REPLY).read_to_end(&mut reply).await;
    if reply.is_empty() {
        read.and(sent)?;
    }
    Ok(String::from_utf8_lossy(&reply).into_owned())
}
