use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;

use super::process::Launch;
use super::{Place, Program, Server, Skip, require};

/// How to run an etcd server of one member.
#[derive(Clone, Debug, Default)]
pub struct EtcdOptions {
    /// More arguments, such as `--quota-backend-bytes=8000000`.
    pub extra: Vec<String>,
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

struct Etcd {
    program: PathBuf,
    options: EtcdOptions,
}

impl Program for Etcd {
    fn name(&self) -> &str {
        "etcd"
    }

    fn ports(&self) -> usize {
        2
    }

    fn prepare(&self, _place: &Place) -> io::Result<()> {
        Ok(())
    }

    fn launch(&self, place: &Place) -> Launch {
        let [clients, peers] = [0, 1].map(|nth| format!("http://{}", place.addr(nth)));
        let args = [
            "--name=one".to_owned(),
            "--logger=zap".to_owned(),
            format!("--data-dir={}", place.join("data").display()),
            format!("--listen-client-urls={clients}"),
            format!("--advertise-client-urls={clients}"),
            format!("--listen-peer-urls={peers}"),
            format!("--initial-advertise-peer-urls={peers}"),
            format!("--initial-cluster=one={peers}"),
        ];
        Launch::new(&self.program, args.into_iter().chain(self.options.extra.iter().cloned()))
    }

    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }

    fn ping(&self, place: &Place, _pid: u32) -> io::Result<()> {
        let limit = Duration::from_secs(1);
        let mut stream = TcpStream::connect_timeout(&place.addr(0), limit)?;
        stream.set_read_timeout(Some(limit))?;
        stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        // Healthy means that it has a leader and has committed something, not only that it listens.
        answer.contains(r#""health":"true""#).then_some(()).ok_or_else(|| io::Error::other(answer))
    }
}
