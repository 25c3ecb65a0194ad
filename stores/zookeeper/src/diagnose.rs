//! Finds out why no server accepts a session. The client library does not report it, so each server is asked once more
//! on a separate connection.

use std::io::{self, ErrorKind};

use futures_util::future::join_all;
use zookeeper_client as zk;

use crate::error::{Failure, RefusalCause};
use crate::four_letter;
use crate::tls::ZooKeeperTls;

/// Asks all servers. `client_error` is the error of the client library.
pub async fn diagnose(servers: &[String], tls: Option<&ZooKeeperTls>, client_error: &zk::Error) -> Failure {
    let queries = servers.iter().map(async |server| {
        // With a line feed, because a TLS server needs five bytes to find out that a message is not TLS.
        let cause = cause(four_letter::send(server, tls, "srvr\n").await, tls);
        (matches!(cause, RefusalCause::Untrusted(_)), format!("{server}: {}", text(cause, tls.is_some())))
    });
    let reports = join_all(queries).await;
    let untrusted = reports.iter().all(|(untrusted, _)| *untrusted);
    let reports: Vec<String> = reports.into_iter().map(|(_, text)| text).collect();
    let text = format!("no ZooKeeper that serves ({client_error}): {}", reports.join("; "));
    if untrusted { Failure::Untrusted(text) } else { Failure::NotSent(text) }
}

fn cause(reply: io::Result<String>, tls: Option<&ZooKeeperTls>) -> RefusalCause {
    let error = match reply {
        Ok(reports) if reports.is_empty() => return RefusalCause::Silent,
        Ok(reports) => {
            let line = reports.lines().next().unwrap_or_default();
            return RefusalCause::Other(format!("it opens no session, and replies {line:?}"));
        }
        Err(error) => error,
    };
    if let Some(cause) = tls.and_then(|tls| tls.classify(&error)) {
        return cause;
    }
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => RefusalCause::Silent,
        _ => RefusalCause::Other(error.to_string()),
    }
}

fn text(cause: RefusalCause, encrypted: bool) -> String {
    match (cause, encrypted) {
        (RefusalCause::Untrusted(text) | RefusalCause::Other(text), _) => text,
        (RefusalCause::NotTls, _) => {
            "it does not speak TLS on this port. Use its secureClientPort, or use zk://".into()
        }
        (RefusalCause::Silent, true) => {
            "it closes the connection without a reply. Use its secureClientPort, or use zk:// if this \
             is its port without TLS; or it has too many connections (maxClientCnxns)"
                .into()
        }
        (RefusalCause::Silent, false) => {
            "it closes the connection without a reply. Use zks:// if this is its port for TLS \
             (secureClientPort); or it has too many connections (maxClientCnxns)"
                .into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reply_of_a_server_is_quoted() {
        let reports = "This ZooKeeper instance is not currently serving requests\n";
        let client_error = text(cause(Ok(reports.into()), None), false);
        assert_eq!(client_error, format!("it opens no session, and replies {:?}", reports.trim_end()));
    }
}
