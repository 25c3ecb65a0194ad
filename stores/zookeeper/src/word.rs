//! The four-letter words. Servers answer each on a connection of its own.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::tls::Tls;

/// More than a server says to any of them that we use.
const MOST: u64 = 64 << 10;

/// Says a word to a server, and hears the answer.
pub async fn say(server: &str, tls: Option<&Tls>, word: &str) -> io::Result<String> {
    let stream = TcpStream::connect(server).await?;
    match tls {
        Some(tls) => talk(tls.wrap(host(server), stream).await?, word).await,
        None => talk(stream, word).await,
    }
}

/// The host of `host:port`, without brackets.
pub fn host(server: &str) -> &str {
    let host = server.rsplit_once(':').map_or(server, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

async fn talk(mut stream: impl AsyncRead + AsyncWrite + Unpin, word: &str) -> io::Result<String> {
    // A server that lets nobody in says why, and closes: that is still to be read.
    let sent = async {
        stream.write_all(word.as_bytes()).await?;
        stream.flush().await
    };
    let sent = sent.await;
    let mut told = Vec::new();
    let heard = stream.take(MOST).read_to_end(&mut told).await;
    if told.is_empty() {
        heard.and(sent)?;
    }
    Ok(String::from_utf8_lossy(&told).into_owned())
}
