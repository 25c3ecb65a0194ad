//! Starts one etcd server.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;

use super::process::Launch;
use super::{Program, Server, ServerSite, Skip, TlsFiles, require};

/// How to run an etcd server of one member.
#[derive(Clone, Debug, Default)]
pub struct EtcdOptions {
    /// More arguments, such as `--quota-backend-bytes=8000000`.
    pub extra: Vec<String>,
    /// Whether it also listens for TLS, with these certificates: [`etcd_tls_addr`] says where. Clients need none.
    pub tls: Option<TlsFiles>,
}

/// Starts an etcd server. [`Server::addr`] is for clients; its peers' port is the second one of its place.
///
/// # Errors
/// [`Skip`] if the tests are to run without `etcd`.
///
/// # Panics
/// If the program is missing or does not start.
pub fn etcd(options: EtcdOptions) -> Result<Server, Skip> {
    let program = require("etcd", "etcd", "etcd-server")?;
    Ok(Server::start(Etcd { program, options }))
}

/// Where a server that was started with [`EtcdOptions::tls`] listens for TLS.
pub fn etcd_tls_addr(server: &Server) -> SocketAddr {
    server.place().addr(2)
}

struct Etcd {
    program: PathBuf,
    options: EtcdOptions,
}

impl Program for Etcd {
    fn name(&self) -> &str {
        "etcd"
    }

    fn ports(&self) -> usize {
        2 + usize::from(self.options.tls.is_some())
    }

    fn prepare(&self, _place: &ServerSite) -> io::Result<()> {
        Ok(())
    }

    fn launch(&self, place: &ServerSite) -> Launch {
        let peers = format!("http://{}", place.addr(1));
        let mut args = arguments(place, "one", &peers, &format!("one={peers}")).to_vec();
        if let Some(tls) = &self.options.tls {
            // Said again, with one more.
            args.push(format!("--listen-client-urls=http://{},https://{}", place.addr(0), place.addr(2)));
            args.push(format!("--cert-file={}", tls.cert_path().display()));
            args.push(format!("--key-file={}", tls.key_path().display()));
        }
        Launch::new(&self.program, args.into_iter().chain(self.options.extra.iter().cloned()))
    }

    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }

    fn ping(&self, place: &ServerSite, _pid: u32) -> io::Result<()> {
        health(place.addr(0))
    }
}

/// A member's arguments: its name, the address for its peers, and the addresses of all peers.
pub(super) fn arguments(place: &ServerSite, name: &str, peer: &str, all: &str) -> [String; 8] {
    let clients = format!("http://{}", place.addr(0));
    [
        format!("--name={name}"),
        "--logger=zap".to_owned(),
        format!("--data-dir={}", place.join("data").display()),
        format!("--listen-client-urls={clients}"),
        format!("--advertise-client-urls={clients}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster={all}"),
    ]
}

/// Healthy means that it has a leader and has committed something, not only that it listens.
pub(super) fn health(addr: SocketAddr) -> io::Result<()> {
    let answer = etcd_get(addr, "/health")?;
    answer.contains(r#""health":"true""#).then_some(()).ok_or_else(|| io::Error::other(answer))
}

/// The reply of a member over plain HTTP: `/health`, `/metrics`, `/version`.
///
/// # Errors
/// If it does not answer soon.
pub fn etcd_get(addr: SocketAddr, path: &str) -> io::Result<String> {
    let limit = Duration::from_secs(1);
    let mut stream = TcpStream::connect_timeout(&addr, limit)?;
    stream.set_read_timeout(Some(limit))?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
