//! `lockkeeper gate`: the flags of the reverse proxy in `lockkeeper-gate`, and its start and end as a process.

use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use lockkeeper::{Lockkeeper, Outcome};
use lockkeeper_fenced::http::{FenceLayer, Require};
use lockkeeper_gate::{GateOptions, GateServer, ResourceSelector, UpstreamUrl};
use serde_json::json;
use tokio::net::TcpListener;

use crate::args::{CommonArgs, utf8};
use crate::duration;
use crate::exit::{ExitFailure, OK};
use crate::signals::SignalStream;
use crate::text::plain;

/// Check fences (fencing tokens) in front of an HTTP service that cannot be changed.
///
/// A reverse proxy. A client sends the fence of its lock in the header Lock-Fence. The gate refuses a request whose fence is older
/// than the newest one that the same resource has seen. It streams bodies and forwards websockets.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct GateArgs {
    /// The service, as http://HOST, with a port and a path if it has them
    #[arg(long, value_name = "URL")]
    pub upstream: UpstreamUrl,
    /// Where to listen; port 0 takes a free port, and the gate prints which
    #[arg(long, value_name = "ADDR")]
    pub listen: SocketAddr,
    /// Where to serve /metrics and /healthz [default: nowhere]
    #[arg(long, value_name = "ADDR")]
    pub admin: Option<SocketAddr>,
    /// Which part of a request names the resource: path, first-segments:N or header:NAME
    #[arg(long, value_name = "PART", default_value = "path")]
    pub resource: ResourceSelector,
    /// Which requests must have a fence: those with an unsafe method (POST, PUT, …), all, or none
    #[arg(long, value_name = "WHICH", value_enum, default_value_t)]
    pub require_fence: Required,
    /// The name of the set of marks: if several services share a store, each needs its own
    #[arg(long, value_name = "NAME", default_value = "http", value_parser = utf8("space"))]
    pub space: String,
    /// Serve beside other --shared gates of this space: slower, and each waits for its own requests only
    #[arg(long, conflicts_with_all = ["ttl", "lock_delay"])]
    pub shared: bool,
    /// How long other gates of this space wait for a gate that has stopped renewing its lock
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse_ttl, allow_hyphen_values = true)]
    pub ttl: Duration,
    /// How long no gate takes over after an unclean end: the service may still work on its last requests
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse_up_to_a_day, allow_hyphen_values = true)]
    pub lock_delay: Duration,
    /// How long a request may make no progress until the response begins, then 504
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration::parse_long, allow_hyphen_values = true)]
    pub timeout: Duration,
    /// How long connecting to the service may take, then 502
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration::parse_long, allow_hyphen_values = true)]
    pub connect_timeout: Duration,
    /// How long a response, its reader, or a connection between two requests may be silent
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse_long, allow_hyphen_values = true)]
    pub idle: Duration,
    /// How long a request with a newer fence waits for older requests in flight, then 503
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration::parse_long, allow_hyphen_values = true)]
    pub wait: Duration,
    /// How long requests in flight may take after TERM, before the gate cuts them off
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse_up_to_a_day, allow_hyphen_values = true)]
    pub drain: Duration,
    /// The most connections at a time [default: as many as the limit of open files allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub connections: Option<u32>,
    /// Refuse a store that may forget a mark: for a service where a late write does harm
    #[arg(long)]
    pub correctness: bool,
    #[command(flatten)]
    pub common: CommonArgs,
}

/// `--require-fence`
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum Required {
    #[default]
    Unsafe,
    All,
    None,
}

/// How long acquiring a free lock may take, and releasing it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
/// Connections that the kernel queues before the gate accepts them.
const BACKLOG: u32 = 4096;

const EXAMPLES: &str = "\
Examples:
  lockkeeper gate --upstream http://127.0.0.1:9000 --listen 0.0.0.0:8000
  lockkeeper gate --upstream http://billing:80 --listen 0.0.0.0:8000 --resource first-segments:2
  lockkeeper run orders/42 -- sh -c 'curl -H \"Lock-Fence: $LOCKKEEPER_FENCE\" -X PUT …'

The gate's own responses: 412 the fence is stale, 428 the fence is missing, 400 the fence or the
request is malformed or ambiguous, 502 the service is unreachable, 503 the store is unreachable or
older requests are in flight, 504 the request may have been carried out.
One gate of a space serves fences at a time: it holds a lock in the store. The others stand by and
respond 503.

Exit codes: 0 after a signal, when all requests in flight have ended; 74 if some were cut off; 64 bad
call, 69 it cannot listen or the store is unreachable, 78 the store has no records.";

impl GateArgs {
    pub fn execute(self) -> Result<i32, ExitFailure> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime =
            runtime.map_err(|e| unavailable(format!("the operating system gives no event queue: {e}")))?;
        let result = runtime.block_on(self.serve());
        // The process ends now. Dropping the tasks of requests that were cut off would release the lock of the marks.
        std::mem::forget(runtime);
        result
    }

    async fn serve(self) -> Result<i32, ExitFailure> {
        let keeper = self.common.open().await?;
        let mut signals = SignalStream::ending()?;
        if keeper.profile().store == "memory" && !self.correctness {
            tracing::warn!(
                "the marks are in memory: they are lost when this process ends, and older fences pass again"
            );
        }
        let marks = self.marks(&keeper)?;
        let listener = listen(self.listen).await?;
        let admin = match self.admin {
            Some(addr) => Some(listen(addr).await?),
            None => None,
        };
        let Ok(owned) = signals.race(tokio::time::timeout(LOCK_TIMEOUT, marks.owned())).await else {
            return Ok(OK);
        };
        if owned.is_err() {
            let space = &self.space;
            tracing::warn!(
                space,
                "another gate keeps these marks: standing by until it ends. Each service needs a --space of its own"
            );
        }
        self.print_ready(&listener, admin.as_ref());
        let gate = GateServer::new(self.upstream.clone(), marks.clone(), self.options());
        if let Some(admin) = admin {
            tokio::spawn(lockkeeper_gate::serve_admin(admin, gate.metrics(), keeper, marks.clone()));
        }
        let cut_off = gate.serve(listener, async || _ = signals.next_ending().await).await;
        if cut_off > 0 {
            // An unclean end: the lock of the marks stays, and the store holds it back for --lock-delay.
            std::mem::forget(marks);
            return Err(ExitFailure::new(
                Outcome::Unknown,
                format!(
                    "{cut_off} requests were still in flight and were cut off: they may have been carried out"
                ),
            ));
        }
        let _ = tokio::time::timeout(LOCK_TIMEOUT, marks.let_go()).await;
        Ok(OK)
    }

    fn marks(&self, keeper: &Lockkeeper) -> Result<FenceLayer, ExitFailure> {
        let resource = self.resource.clone();
        let marks = FenceLayer::new(keeper, move |request| resource.select(request))?
            .space(&*self.space)?
            .wait(self.wait)
            .require(match self.require_fence {
                Required::Unsafe => Require::Unsafe,
                Required::All => Require::All,
                Required::None => Require::None,
            });
        let marks = if self.correctness { marks.for_correctness()? } else { marks };
        Ok(if self.shared { marks } else { marks.alone(self.ttl, self.lock_delay)? })
    }

    fn options(&self) -> GateOptions {
        let files = lockkeeper_gate::raise_file_limit();
        GateOptions {
            timeout: self.timeout,
            connect_timeout: self.connect_timeout,
            idle_timeout: self.idle,
            overtaken_grace: self.wait / 4,
            drain_timeout: self.drain,
            max_connections: self
                .connections
                .map_or_else(|| lockkeeper_gate::connections_for(files), |n| n as usize),
            resource: self.resource.clone(),
        }
    }

    /// Prints that the gate is ready: from now on it accepts connections.
    fn print_ready(&self, listener: &TcpListener, admin: Option<&TcpListener>) {
        let addr =
            |listener: &TcpListener| listener.local_addr().map(|addr| addr.to_string()).unwrap_or_default();
        let (listen, admin, upstream) = (addr(listener), admin.map(addr), plain(self.upstream.as_str()));
        let line = match self.common.json {
            true => json!({ "event": "ready", "listen": listen, "admin": admin, "upstream": upstream })
                .to_string(),
            false => {
                let admin = admin.map_or(String::new(), |admin| format!(", with /metrics on {admin}"));
                format!("lockkeeper: the gate to {upstream} listens on {listen}{admin}")
            }
        };
        // If stderr is closed, the gate serves all the same.
        let _ = writeln!(std::io::stderr(), "{line}");
    }
}

fn unavailable(message: String) -> ExitFailure {
    ExitFailure::new(Outcome::Unavailable, message)
}

async fn listen(addr: SocketAddr) -> Result<TcpListener, ExitFailure> {
    let open = || {
        let socket =
            if addr.is_ipv4() { tokio::net::TcpSocket::new_v4()? } else { tokio::net::TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        socket.bind(addr)?;
        socket.listen(BACKLOG)
    };
    open().map_err(|e| {
        unavailable(format!("cannot listen on {addr}: {e}")).next("choose a free port, or 0 for any")
    })
}
