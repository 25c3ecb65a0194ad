//! `lockkeeper gate`: the check of fences in front of a service that cannot be changed.

mod admin;
mod at_once;
mod body;
mod forward;
mod headers;
mod links;
mod metrics;
mod patience;
mod resource;
mod serve;
mod tunnel;

use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use lockkeeper::{Lockkeeper, Outcome};
use lockkeeper_fenced::http::{FenceLayer, Require};
use serde_json::json;
use tokio::net::TcpListener;

use self::forward::Upstream;
use self::resource::Resource;
use self::serve::Gate as Serving;
use crate::args::{Common, utf8};
use crate::exit::{Failure, OK};
use crate::signals::Signals;
use crate::span;
use crate::text::plain;

/// Check fences in front of a service that cannot be changed.
///
/// A reverse proxy that refuses a request whose header Lock-Fence is older than one that its resource has seen. Bodies are
/// streamed, and websockets passed through.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Gate {
    /// The service, as http://HOST[:PORT][/PATH]
    #[arg(long, value_name = "URL", value_parser = forward::upstream)]
    pub upstream: Upstream,
    /// Where to listen; port 0 takes a free one, and says which
    #[arg(long, value_name = "ADDR")]
    pub listen: SocketAddr,
    /// Where to serve /metrics and /healthz [default: nowhere]
    #[arg(long, value_name = "ADDR")]
    pub admin: Option<SocketAddr>,
    /// What a fence is for: path, first-segments:N or header:NAME
    #[arg(long, value_name = "WHAT", default_value = "path", value_parser = resource::parse)]
    pub resource: Resource,
    /// Which requests must have a fence: those that may change something, all, or none
    #[arg(long, value_name = "WHICH", value_enum, default_value_t)]
    pub require_fence: Required,
    /// Whose marks these are: give each service its own, if several share a store
    #[arg(long, value_name = "NAME", default_value = "http", value_parser = utf8("space"))]
    pub space: String,
    /// Serve beside other --shared gates of this space: slower, and each waits for its own requests alone
    #[arg(long, conflicts_with_all = ["ttl", "lock_delay"])]
    pub shared: bool,
    /// How long our silence may last before another gate of this space takes over
    #[arg(long, value_name = "SPAN", default_value = "10s", value_parser = span::ttl, allow_hyphen_values = true)]
    pub ttl: Duration,
    /// How long nobody takes over after an unclean end: the service may still be at what it was sent
    #[arg(long, value_name = "SPAN", default_value = "10s", value_parser = span::up_to_a_day, allow_hyphen_values = true)]
    pub lock_delay: Duration,
    /// How long a request may be silent until the answer begins, on either side, then 504
    #[arg(long, value_name = "SPAN", default_value = "60s", value_parser = span::long, allow_hyphen_values = true)]
    pub timeout: Duration,
    /// How long it may take to reach the service, then 502
    #[arg(long, value_name = "SPAN", default_value = "5s", value_parser = span::long, allow_hyphen_values = true)]
    pub connect_timeout: Duration,
    /// How long an answer, its reader, or a connection between requests may be silent
    #[arg(long, value_name = "SPAN", default_value = "5m", value_parser = span::long, allow_hyphen_values = true)]
    pub idle: Duration,
    /// How long a newer fence waits for older requests that are under way, then 503
    #[arg(long, value_name = "SPAN", default_value = "60s", value_parser = span::long, allow_hyphen_values = true)]
    pub wait: Duration,
    /// How long what is under way may take after TERM, before it is cut off
    #[arg(long, value_name = "SPAN", default_value = "30s", value_parser = span::up_to_a_day, allow_hyphen_values = true)]
    pub drain: Duration,
    /// The most connections at a time [default: what the limit of open files allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub connections: Option<u32>,
    /// A late write would be harm: refuse a store that can forget a mark
    #[arg(long)]
    pub correctness: bool,
    #[command(flatten)]
    pub common: Common,
}

/// `--require-fence`
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum Required {
    #[default]
    Unsafe,
    All,
    None,
}

/// How long a lock that is free may take to be had, and to be given back.
const PATIENCE: Duration = Duration::from_secs(1);

const EXAMPLES: &str = "\
Examples:
  lockkeeper gate --upstream http://127.0.0.1:9000 --listen 0.0.0.0:8000
  lockkeeper gate --upstream http://billing:80 --listen 0.0.0.0:8000 --resource first-segments:2
  lockkeeper run orders/42 -- sh -c 'curl -H \"Lock-Fence: $LOCKKEEPER_FENCE\" -X PUT …'

Answers of its own: 412 stale, 428 no fence, 400 no such fence or ambiguous, 502 the service cannot be reached,
503 the store cannot be asked or older requests are under way, 504 it may have happened.
One gate of a space serves fences at a time, by a lock in the store; others stand by with 503.

Exit codes: 0 after a signal, when all that was under way has ended; 74 if some was cut off; 64 bad
call, 69 it cannot listen or the store is unavailable, 78 the store has no records.";

impl Gate {
    pub fn go(self) -> Result<i32, Failure> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime =
            runtime.map_err(|e| unavailable(format!("the operating system gives no event queue: {e}")))?;
        let result = runtime.block_on(self.serve());
        // The process ends now. What was cut off is not taken apart on the way: that would give the lock back.
        std::mem::forget(runtime);
        result
    }

    async fn serve(self) -> Result<i32, Failure> {
        let mut signals = Signals::ending()?;
        let keeper = self.common.open().await?;
        if keeper.profile().store == "memory" && !self.correctness {
            tracing::warn!(
                "the marks are in memory: and gone, with all they keep out, when this process ends"
            );
        }
        let layer = self.layer(&keeper)?;
        let files = serve::raise_file_limit();
        let connections = self.connections.map_or_else(|| serve::room(files), |n| n as usize);
        let listener = listen(self.listen).await?;
        let admin = match self.admin {
            Some(addr) => Some(listen(addr).await?),
            None => None,
        };
        if tokio::time::timeout(PATIENCE, layer.owned()).await.is_err() {
            let space = &self.space;
            tracing::warn!(
                space,
                "another gate keeps these marks: standing by. Each service needs a --space of its own"
            );
        }
        self.tell(&listener, admin.as_ref());
        let gate = Serving::new(&self, layer.clone(), connections);
        if let Some(admin) = admin {
            tokio::spawn(admin::serve(admin, gate.metrics.clone(), keeper, layer.clone()));
        }
        let cut_off = gate.until_drained(listener, &mut signals, self.drain).await;
        match cut_off {
            0 => _ = tokio::time::timeout(PATIENCE, layer.let_go()).await,
            // An unclean end: the lock is not given back, and is held back for the next one.
            _ => std::mem::forget(layer),
        }
        match cut_off {
            0 => Ok(OK),
            n => Err(Failure::new(
                Outcome::Unknown,
                format!("{n} requests were still under way, and were cut off: they may have happened"),
            )),
        }
    }

    fn layer(&self, keeper: &Lockkeeper) -> Result<FenceLayer, Failure> {
        let resource = self.resource.clone();
        let layer = FenceLayer::new(keeper, move |request| resource.of(request))?
            .space(&*self.space)?
            .wait(self.wait)
            .require(match self.require_fence {
                Required::Unsafe => Require::Unsafe,
                Required::All => Require::All,
                Required::None => Require::None,
            });
        let layer = if self.correctness { layer.for_correctness()? } else { layer };
        Ok(if self.shared { layer } else { layer.alone(self.ttl, self.lock_delay)? })
    }

    /// The line that says that it is ready: from now on connections are taken.
    fn tell(&self, listener: &TcpListener, admin: Option<&TcpListener>) {
        let addr =
            |listener: &TcpListener| listener.local_addr().map(|addr| addr.to_string()).unwrap_or_default();
        let (listen, admin, upstream) = (addr(listener), admin.map(addr), plain(&self.upstream.text));
        let line = match self.common.json {
            true => json!({ "event": "ready", "listen": listen, "admin": admin, "upstream": upstream })
                .to_string(),
            false => {
                let admin = admin.map_or(String::new(), |admin| format!(", with /metrics on {admin}"));
                format!("lockkeeper: the gate to {upstream} listens on {listen}{admin}")
            }
        };
        // Nobody is left to tell if stderr is gone.
        let _ = writeln!(std::io::stderr(), "{line}");
    }
}

fn unavailable(message: String) -> Failure {
    Failure::new(Outcome::Unavailable, message)
}

async fn listen(addr: SocketAddr) -> Result<TcpListener, Failure> {
    // Many may knock at once.
    let open = || {
        let socket =
            if addr.is_ipv4() { tokio::net::TcpSocket::new_v4()? } else { tokio::net::TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        socket.bind(addr)?;
        socket.listen(4096)
    };
    open().map_err(|e| {
        unavailable(format!("cannot listen on {addr}: {e}")).next("take a free port, or 0 for any")
    })
}
