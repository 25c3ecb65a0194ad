//! Why nobody serves. The client underneath does not tell, so every server is asked once more.

use std::io::{self, ErrorKind};

use futures_util::future::join_all;
use zookeeper_client as zk;

use crate::fault::Failure;
use crate::tls::Tls;
use crate::word;

/// What keeps a server from serving us.
#[derive(Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "tls"), expect(dead_code, reason = "some of them only TLS tells"))]
pub enum Reason {
    /// We do not believe it, or it does not believe us: asking again is no use.
    Barred(String),
    /// What it says is not TLS.
    NotTls,
    /// It has closed the connection and said nothing.
    Silent,
    /// Something else.
    Other(String),
}

/// Asks all servers. `said` is what the client says.
pub async fn ask(servers: &[String], tls: Option<&Tls>, said: &zk::Error) -> Failure {
    let asked = servers.iter().map(async |server| {
        // With one byte more than the word has: fewer than five are not enough for TLS to find out that this is none.
        let reason = reason(word::say(server, tls, "srvr\n").await, tls);
        (matches!(reason, Reason::Barred(_)), format!("{server}: {}", text(reason, tls.is_some())))
    });
    let told = join_all(asked).await;
    let barred = told.iter().all(|(barred, _)| *barred);
    let told: Vec<String> = told.into_iter().map(|(_, text)| text).collect();
    let text = format!("no ZooKeeper that serves ({said}): {}", told.join("; "));
    if barred { Failure::Barred(text) } else { Failure::Away(text) }
}

fn reason(answer: io::Result<String>, tls: Option<&Tls>) -> Reason {
    let error = match answer {
        Ok(told) if told.is_empty() => return Reason::Silent,
        Ok(told) => {
            let line = told.lines().next().unwrap_or_default();
            return Reason::Other(format!("it gives no session, and says {line:?}"));
        }
        Err(error) => error,
    };
    if let Some(reason) = tls.and_then(|tls| tls.judge(&error)) {
        return reason;
    }
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Reason::Silent,
        _ => Reason::Other(error.to_string()),
    }
}

fn text(reason: Reason, encrypted: bool) -> String {
    match (reason, encrypted) {
        (Reason::Barred(text) | Reason::Other(text), _) => text,
        (Reason::NotTls, _) => "this is not TLS. Name its secureClientPort, or use zk://".into(),
        (Reason::Silent, true) => {
            "it closes the connection without a word. Name its secureClientPort, or use zk:// if this \
             is its port without TLS; or it has too many connections (maxClientCnxns)"
                .into()
        }
        (Reason::Silent, false) => {
            "it closes the connection without a word. Use zks:// if this is its port for TLS \
             (secureClientPort); or it has too many connections (maxClientCnxns)"
                .into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_says_is_told_as_it_says_it() {
        let told = "This ZooKeeper instance is not currently serving requests\n";
        let said = text(reason(Ok(told.into()), None), false);
        assert_eq!(said, format!("it gives no session, and says {:?}", told.trim_end()));
    }
}
