//! An HTTP server in front of moto that rejects some requests before they are executed, as DynamoDB's request router does.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The error code with which an operation such as `PutItem` is rejected, or `None` to forward it. `CODE:REASON` is a cancelled
/// transaction whose first part has that reason.
pub type Rejection = dyn Fn(&str) -> Option<&'static str> + Send + Sync;

pub struct Front {
    pub addr: SocketAddr,
    /// The number of rejected requests.
    pub refused: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Front {
    pub async fn start(behind: SocketAddr, reject: Arc<Rejection>) -> Front {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let refused = Arc::new(AtomicUsize::new(0));
        let count = refused.clone();
        let task = tokio::spawn(async move {
            loop {
                let Ok((client, _)) = listener.accept().await else { return };
                let (reject, count) = (reject.clone(), count.clone());
                tokio::spawn(async move { serve(client, behind, &*reject, &count).await });
            }
        });
        Front { addr, refused, task }
    }
}

/// Serves one request on each connection, as moto does.
async fn serve(
    mut client: TcpStream,
    behind: SocketAddr,
    reject: &Rejection,
    count: &AtomicUsize,
) -> Option<()> {
    let mut request = Vec::new();
    let whole = loop {
        let head = request.windows(4).position(|four| four == b"\r\n\r\n");
        if let Some(head) = head {
            let text = String::from_utf8_lossy(&request[..head]).to_lowercase();
            let field = |name: &str| {
                text.lines()
                    .find_map(|line| Some(line.strip_prefix(name)?.trim_start_matches(':').trim().to_owned()))
            };
            let length: usize = field("content-length").and_then(|n| n.parse().ok()).unwrap_or(0);
            if request.len() >= head + 4 + length {
                break field("x-amz-target").unwrap_or_default();
            }
        }
        if client.read_buf(&mut request).await.ok()? == 0 {
            return None;
        }
    };
    let operation = whole.rsplit('.').next().unwrap_or_default();
    if let Some(code) = reject(operation) {
        count.fetch_add(1, Ordering::SeqCst);
        let (code, reason) = code.split_once(':').unwrap_or((code, ""));
        let reasons = match reason {
            "" => String::new(),
            reason => format!(",\"CancellationReasons\":[{{\"Code\":\"{reason}\"}},{{\"Code\":\"None\"}}]"),
        };
        let body =
            format!("{{\"__type\":\"com.amazonaws.dynamodb.v20120810#{code}\",\"message\":\"no\"{reasons}}}");
        let length = body.len();
        let answer = format!(
            "HTTP/1.1 400 Bad Request\r\nContent-Type: application/x-amz-json-1.0\r\nContent-Length: {length}\r\n\
             Connection: close\r\n\r\n{body}"
        );
        return client.write_all(answer.as_bytes()).await.ok();
    }
    let mut server = TcpStream::connect(behind).await.ok()?;
    server.write_all(&request).await.ok()?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer).await.ok()?;
    client.write_all(&answer).await.ok()
}
