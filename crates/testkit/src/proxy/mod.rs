//! A TCP proxy that makes connections fail at an exact message.
//!
//! It stands between a client and a real server, knows just enough of the protocol to tell messages apart
//! ([`Framing`]), and makes the faults of its plan: cut, reset, hold, delay, drop or duplicate the nth request or reply, or
//! pass a request on and cut before its reply, which is the one fault that every lock client gets wrong first.
//!
//! ```
//! # use std::io::{Read, Write};
//! use lockkeeper_testkit::proxy::{Fault, Framing, Proxy};
//! # let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
//! # let server_addr = server.local_addr().unwrap();
//! # std::thread::spawn(move || {
//! #     let mut s = server.accept().unwrap().0;
//! #     let _ = s.read(&mut [0; 64]);
//! #     let _ = s.write(b"+OK\r\n");
//! # });
//! let proxy = Proxy::start(server_addr, Framing::Resp);
//! let fault = proxy.inject(Fault::at_request(1).cut_before_reply());
//! let mut client = std::net::TcpStream::connect(proxy.addr()).unwrap();
//! client.write_all(b"SET k v\r\n").unwrap();
//! assert_eq!(client.read(&mut [0; 64]).unwrap(), 0, "the server did it, and the client never hears of it");
//! assert!(fault.fired(), "a fault that did not fire has tested nothing");
//! ```
//!
//! The proxy runs on a thread and a clock of its own: a test that pauses time or blocks its runtime does not stop it.

mod connection;
mod control;
mod fault;
mod fault_plan;
mod framing;
mod sweep;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;

pub use control::Proxy;
pub use fault::{At, Fault, Pick, Test};
pub use framing::Framing;
pub use sweep::every_point;

/// Where the real server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Upstream {
    /// At an address.
    Tcp(SocketAddr),
    /// At a socket in the file system.
    Unix(PathBuf),
}

impl From<SocketAddr> for Upstream {
    fn from(addr: SocketAddr) -> Self {
        Upstream::Tcp(addr)
    }
}

impl From<&Path> for Upstream {
    fn from(path: &Path) -> Self {
        Upstream::Unix(path.to_owned())
    }
}

/// Which way a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the client to the server.
    Requests = 0,
    /// From the server to the client.
    Replies = 1,
}

/// The messages that went through the proxy since it was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// Connections that were taken.
    pub connections: u64,
    /// Connections that are open now.
    pub open: usize,
    /// Requests that reached the proxy.
    pub requests: u64,
    /// Replies that reached the proxy.
    pub replies: u64,
    /// How often a fault fired.
    pub fired: u64,
}

/// A fault that was injected. Dropping this changes nothing: the fault stays until [`Proxy::heal`].
#[derive(Clone, Debug, Default)]
pub struct Injected(Arc<InjectedSignals>);

#[derive(Debug, Default)]
struct InjectedSignals {
    fired: watch::Sender<u64>,
    released: watch::Sender<bool>,
}

impl Injected {
    /// Whether it has happened. A test whose fault did not fire has tested nothing: assert this.
    pub fn fired(&self) -> bool {
        *self.0.fired.borrow() > 0
    }

    /// Waits until it has happened.
    pub async fn until_fired(&self) {
        // The sender lives in self: it cannot be gone.
        let _ = self.0.fired.subscribe().wait_for(|times| *times > 0).await;
    }

    /// Lets go of what it holds, now and later.
    pub fn release(&self) {
        self.0.released.send_replace(true);
    }

    fn fire(&self) {
        self.0.fired.send_modify(|times| *times += 1);
    }

    fn released(&self) -> watch::Receiver<bool> {
        self.0.released.subscribe()
    }
}
