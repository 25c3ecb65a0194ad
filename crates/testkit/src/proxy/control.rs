//! The proxy's handle: cut, heal, hold and count.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::net::{Shutdown, listen, shutdown};
use tokio::sync::oneshot;

use super::fault::{ConnectionEnd, Fault, Pick};
use super::fault_plan::{FaultPlan, locked};
use super::framing::Framing;
use super::{Count, Direction, Injected, Upstream, connection};
use crate::port::Port;

const BACKLOG: i32 = 128;

/// Where new connections go now.
type CurrentUpstream = Mutex<Arc<Upstream>>;

/// A running proxy. Dropping it closes everything.
pub struct Proxy {
    script: Arc<FaultPlan>,
    upstream: Arc<CurrentUpstream>,
    addr: SocketAddr,
    listener: TcpListener,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _port: Option<Port>,
}

impl Proxy {
    /// Starts a proxy in front of `upstream`, on a port of its own of 127.0.0.1. The server need not run yet.
    ///
    /// # Panics
    /// If the machine gives no port or no thread.
    pub fn start(upstream: impl Into<Upstream>, framing: Framing) -> Proxy {
        let (port, listener) = Port::listen();
        Proxy::run(upstream.into(), framing, listener, Some(port))
    }

    /// Starts a proxy on another host of this machine, such as 127.0.0.2, and on the port of `upstream`. The nodes of a cluster that announce
    /// their ports without a host send a client there that has reached one of them by such a proxy.
    ///
    /// # Panics
    /// If the address is in use, or the machine gives no thread.
    pub fn start_on(host: Ipv4Addr, upstream: SocketAddr, framing: Framing) -> Proxy {
        let listener = TcpListener::bind((host, upstream.port())).expect("the address is free");
        Proxy::run(upstream.into(), framing, listener, None)
    }

    fn run(upstream: Upstream, framing: Framing, listener: TcpListener, port: Option<Port>) -> Proxy {
        let addr = listener.local_addr().expect("a listener has an address");
        let taking = listener.try_clone().expect("a listener can be shared");
        taking.set_nonblocking(true).expect("a listener need not block");
        let script = Arc::new(FaultPlan::new(framing));
        let (stop, stopped) = oneshot::channel();
        let upstream = Arc::new(Mutex::new(Arc::new(upstream)));
        let (target, shared) = (upstream.clone(), script.clone());
        let thread = std::thread::Builder::new()
            .name("fault-proxy".into())
            .spawn(move || accept_until_stopped(shared, target, taking, stopped))
            .expect("a thread can be started");
        Proxy { script, upstream, addr, listener, stop: Some(stop), thread: Some(thread), _port: port }
    }

    /// Where clients are to connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Adds a fault. Several may wait at once; where two meet at one message, the one injected first happens.
    pub fn inject(&self, fault: Fault) -> Injected {
        self.script.add(fault)
    }

    /// Closes these connections now, and says how many they were. New ones are taken as before.
    pub fn cut(&self, which: Pick) -> usize {
        self.script.end(&which, ConnectionEnd::Close)
    }

    /// Like [`Proxy::cut`], with a RST to the client.
    pub fn reset(&self, which: Pick) -> usize {
        self.script.end(&which, ConnectionEnd::Reset)
    }

    /// The server is gone: every connection is closed and new ones are refused until [`Proxy::heal`].
    pub fn cut_all(&self) {
        self.script.weather.send_modify(|weather| weather.refusing = true);
        // Linux takes a listener that is shut down back to "bound": the port stays reserved, and no client connects.
        let _ = shutdown(&self.listener, Shutdown::Read);
        self.cut(Pick::Any);
    }

    /// The address leads to another server from now on, as a virtual address does after a fail-over: open connections are closed, and new
    /// ones go there.
    pub fn redirect(&self, upstream: impl Into<Upstream>) {
        *locked(&self.upstream) = Arc::new(upstream.into());
        self.cut(Pick::Any);
    }

    /// The one-way cut: nothing more goes this way, on no connection, until [`Proxy::heal`]. Neither end notices.
    pub fn hold(&self, direction: Direction) {
        self.script.weather.send_modify(|weather| weather.held[direction as usize] = true);
    }

    /// At most this many bytes a second each way on each connection, until [`Proxy::heal`].
    pub fn throttle(&self, bytes_per_second: u32) {
        self.script.weather.send_modify(|weather| weather.bytes_per_second = Some(bytes_per_second));
    }

    /// Everything is well again: faults are forgotten, what is held goes on, new connections are taken.
    ///
    /// # Panics
    /// If the port cannot be listened on again.
    pub fn heal(&self) {
        self.script.clear();
        let refusing = self.script.weather.borrow().refusing;
        if refusing {
            listen(&self.listener, BACKLOG).expect("the port is ours");
        }
        self.script.weather.send_modify(|weather| *weather = Default::default());
    }

    /// The messages that went through so far.
    pub fn count(&self) -> Count {
        let [requests, replies] = [0, 1].map(|way: usize| self.script.messages[way].load(Ordering::Relaxed));
        Count {
            connections: self.script.connections.load(Ordering::Relaxed),
            open: self.script.open_lines(),
            requests,
            replies,
            fired: self.fired(),
        }
    }

    /// How often a fault fired since the start. [`Injected::fired`] tells it of one.
    pub fn fired(&self) -> u64 {
        self.script.fired.load(Ordering::Relaxed)
    }

    /// Returns the bytes that the proxy could not understand, if any: a connection that does not speak the protocol is closed.
    pub fn trouble(&self) -> Option<String> {
        locked(&self.script.trouble).clone()
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Proxy({}, {:?})", self.addr, self.count())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept_until_stopped(
    script: Arc<FaultPlan>,
    upstream: Arc<CurrentUpstream>,
    listener: TcpListener,
    stopped: oneshot::Receiver<()>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime can be made").block_on(async {
        tokio::select! {
            () = accept(script, upstream, listener) => {}
            _ = stopped => {}
        }
    });
}

async fn accept(script: Arc<FaultPlan>, upstream: Arc<CurrentUpstream>, listener: TcpListener) {
    let mut weather = script.weather.subscribe();
    loop {
        let _ = weather.wait_for(|weather| !weather.refusing).await;
        // Tokio takes a listener that was once shut down for closed for ever: after each change it gets a new one.
        let fresh = listener.try_clone().and_then(tokio::net::TcpListener::from_std);
        let fresh = fresh.expect("a listener can be watched");
        tokio::select! {
            // The weather first: it changes before the listener is shut down, and one that was shut down and listens again
            // is ready for ever in tokio's eyes, without a connection to accept: the task would spin.
            biased;
            _ = weather.changed() => {}
            () = take(&script, &upstream, &fresh) => {}
        }
    }
}

/// Takes connections until that fails.
async fn take(script: &Arc<FaultPlan>, upstream: &Arc<CurrentUpstream>, listener: &tokio::net::TcpListener) {
    while let Ok((client, _)) = listener.accept().await {
        let (script, upstream) = (script.clone(), locked(upstream).clone());
        let line = script.open_line();
        tokio::spawn(async move {
            // One that came in just before the listener was shut down is not among those that `cut_all` closed.
            if !script.weather.borrow().refusing {
                connection::serve(&script, &line, client, &upstream).await;
            }
            script.close_line(&line);
        });
    }
}
