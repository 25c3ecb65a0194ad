//! One connection: two pumps, and the script between them.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;

use super::fault::ConnectionEnd;
use super::fault_plan::{Conditions, FaultPlan, Plan, ProxiedConnection, locked};
use super::framing::Piece;
use super::{Direction, Upstream};

/// How much of what a client sent is remembered for [`super::Pick::Sent`].
const REMEMBERED: usize = 4096;
/// A message that is to be sent twice has to be kept: not more of it than this.
const KEPT: usize = 1 << 20;
const READ: usize = 16 << 10;

/// Serves one client until one side, or the script, ends it.
pub(super) async fn serve(
    script: &FaultPlan,
    line: &ProxiedConnection,
    mut client: TcpStream,
    upstream: &Upstream,
) {
    let _ = client.set_nodelay(true);
    let end = match upstream {
        Upstream::Tcp(addr) => match TcpStream::connect(addr).await {
            Ok(mut server) => {
                let _ = server.set_nodelay(true);
                let (read, write) = server.split();
                join(script, line, &mut client, read, write).await
            }
            Err(_) => ConnectionEnd::Close,
        },
        Upstream::Unix(path) => match UnixStream::connect(path).await {
            Ok(mut server) => {
                let (read, write) = server.split();
                join(script, line, &mut client, read, write).await
            }
            Err(_) => ConnectionEnd::Close,
        },
    };
    if end == ConnectionEnd::Reset {
        let _ = client.set_zero_linger();
    }
}

async fn join(
    script: &FaultPlan,
    line: &ProxiedConnection,
    client: &mut TcpStream,
    from_server: impl AsyncRead + Unpin,
    to_server: impl AsyncWrite + Unpin,
) -> ConnectionEnd {
    let (from_client, to_client) = client.split();
    let requests = Pump::new(script, line, Direction::Requests);
    let replies = Pump::new(script, line, Direction::Replies);
    let pumps = async {
        // The end of one stream is passed on and leaves the other one open.
        tokio::try_join!(requests.run(from_client, to_server), replies.run(from_server, to_client))
    };
    let mut told = line.told.subscribe();
    tokio::select! {
        biased;
        end = told.wait_for(Option::is_some) => end.ok().and_then(|end| *end).unwrap_or(ConnectionEnd::Close),
        ended = pumps => ended.err().unwrap_or(ConnectionEnd::Close),
    }
}

/// One direction of one connection.
struct Pump<'a> {
    script: &'a FaultPlan,
    line: &'a ProxiedConnection,
    direction: Direction,
    weather: watch::Receiver<Conditions>,
}

/// How the message under way is treated; for the rest of its pieces.
enum Way {
    Pass,
    PassThenEnd(ConnectionEnd),
    Drop,
    Twice(Vec<u8>),
}

impl<'a> Pump<'a> {
    fn new(script: &'a FaultPlan, line: &'a ProxiedConnection, direction: Direction) -> Self {
        Pump { script, line, direction, weather: script.weather.subscribe() }
    }

    async fn run(
        mut self,
        mut from: impl AsyncRead + Unpin,
        mut to: impl AsyncWrite + Unpin,
    ) -> Result<(), ConnectionEnd> {
        let mut splitter = self.script.framing.splitter(self.direction);
        let (mut buf, mut way) = (Vec::with_capacity(READ), None);
        loop {
            let mut used = 0;
            while let Some(piece) = self.understood(splitter.piece(&buf[used..]))? {
                let bytes = &buf[used..used + piece.len];
                used += piece.len;
                let now = match way.take() {
                    Some(way) => way,
                    None => self.begin(piece).await?,
                };
                way = self.pass(&mut to, now, bytes, piece.last).await?;
            }
            buf.drain(..used);
            buf.reserve(READ);
            let known = buf.len();
            match from.read_buf(&mut buf).await {
                // The server's end, or the test's, ends the connection.
                Ok(0) | Err(_) if self.direction == Direction::Requests && self.outlives_client() => {
                    std::future::pending::<()>().await;
                }
                Ok(0) => {
                    let _ = to.shutdown().await;
                    return Ok(());
                }
                Ok(_) => {}
                Err(_) => return Err(ConnectionEnd::Close),
            }
            self.remember(&buf[known..]);
        }
    }

    /// Ends the connection on bytes that are not the protocol: a fault that cannot count messages must not look like one
    /// that did not fire.
    fn understood<T>(&self, piece: Result<T, String>) -> Result<T, ConnectionEnd> {
        piece.map_err(|why| {
            let text = format!("connection {}, {:?}: {why}", self.line.index, self.direction);
            eprintln!("proxy: {:?} is not spoken here: {text}", self.script.framing);
            locked(&self.script.trouble).get_or_insert(text);
            ConnectionEnd::Close
        })
    }

    fn outlives_client(&self) -> bool {
        self.line.outlives_client.load(Ordering::Relaxed)
    }

    fn remember(&self, bytes: &[u8]) {
        if self.direction == Direction::Requests {
            let mut sent = locked(&self.line.sent);
            let room = REMEMBERED.saturating_sub(sent.len());
            sent.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
    }

    /// Asks the script about the message that begins, and waits if it says so.
    async fn begin(&mut self, piece: Piece) -> Result<Way, ConnectionEnd> {
        if piece.mark.gives_up && self.outlives_client() {
            return Ok(Way::Drop);
        }
        match self.script.plan(self.line, self.direction, piece.mark) {
            Plan::Pass => Ok(Way::Pass),
            Plan::PassThenEnd(end) => Ok(Way::PassThenEnd(end)),
            Plan::End(end) => Err(end),
            Plan::Drop => Ok(Way::Drop),
            Plan::Duplicate => Ok(Way::Twice(Vec::new())),
            Plan::Hold(span, mut released) => {
                let released = released.wait_for(|released| *released);
                // A sender that is gone can release nothing any more: that is a release too.
                let _ = tokio::time::timeout(span.unwrap_or(Duration::MAX), released).await;
                Ok(Way::Pass)
            }
            Plan::DeliverLate(mut released) => {
                self.line.outlives_client.store(true, Ordering::Relaxed);
                let _ = released.wait_for(|released| *released).await;
                Ok(Way::Pass)
            }
        }
    }

    /// Passes a piece on, and returns how the next piece of the same message is treated.
    async fn pass(
        &mut self,
        to: &mut (impl AsyncWrite + Unpin),
        way: Way,
        bytes: &[u8],
        last: bool,
    ) -> Result<Option<Way>, ConnectionEnd> {
        if !matches!(way, Way::Drop) {
            self.write(to, bytes).await?;
        }
        match way {
            Way::Twice(mut kept) => {
                kept.extend_from_slice(bytes);
                if kept.len() > KEPT {
                    return self.understood(Err("a message too long to be sent twice".into()));
                }
                if !last {
                    return Ok(Some(Way::Twice(kept)));
                }
                self.write(to, &kept).await?;
            }
            Way::PassThenEnd(end) if last => return Err(end),
            way if !last => return Ok(Some(way)),
            _ => {}
        }
        Ok(None)
    }

    async fn write(&mut self, to: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> Result<(), ConnectionEnd> {
        let direction = self.direction as usize;
        let mut rest = bytes;
        while !rest.is_empty() {
            let calm = self.weather.wait_for(|weather| !weather.held[direction]).await;
            let rate = calm.map_err(|_| ConnectionEnd::Close)?.bytes_per_second;
            // A slow line carries ten portions a second, so that it can be healed in the middle of a long message.
            let len = rate.map_or(rest.len(), |rate| (rate as usize / 10).clamp(1, rest.len()));
            if let Some(rate) = rate {
                tokio::time::sleep(Duration::from_secs_f64(len as f64 / f64::from(rate.max(1)))).await;
            }
            if to.write_all(&rest[..len]).await.is_err()
                && (self.direction == Direction::Requests || !self.outlives_client())
            {
                return Err(ConnectionEnd::Close);
            }
            rest = &rest[len..];
        }
        Ok(())
    }
}
