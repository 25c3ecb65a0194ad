//! Starts PgBouncer in front of a PostgreSQL server.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use rustix::process::Signal;

use super::postgres::{hand_over, log_in, user};
use super::process::Launch;
use super::{Program, Server, ServerSite, Skip, require};

/// Starts a PgBouncer that pools transactions before a PostgreSQL server: each of them may come to another server process.
/// Every client connects as `postgres`.
///
/// # Errors
/// [`Skip`] if the tests are to run without `pgbouncer`.
///
/// # Panics
/// If the program is missing or does not start.
pub fn pgbouncer(server: SocketAddr) -> Result<Server, Skip> {
    let program = require("pgbouncer", "pgbouncer", "pgbouncer")?;
    Ok(Server::start(PgBouncer { program, server }))
}

struct PgBouncer {
    program: PathBuf,
    server: SocketAddr,
}

impl Program for PgBouncer {
    fn name(&self) -> &str {
        "pgbouncer"
    }

    fn ports(&self) -> usize {
        1
    }

    fn prepare(&self, place: &ServerSite) -> io::Result<()> {
        hand_over(place.dir())?;
        let (server, port) = (self.server, place.addr(0).port());
        // After a log-in that failed it would let every client wait for 15 s.
        let text = format!(
            "[databases]\n* = host={} port={} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 8\nmax_client_conn = 1000\n\
             server_login_retry = 0.2\nserver_connect_timeout = 2\n",
            server.ip(),
            server.port()
        );
        fs::write(place.join("pgbouncer.ini"), text)
    }

    fn launch(&self, place: &ServerSite) -> Launch {
        let launch = Launch::new(&self.program, [place.join("pgbouncer.ini")]);
        Launch { user: user(), ..launch }
    }

    fn ping(&self, place: &ServerSite, _: u32) -> io::Result<()> {
        log_in(place.addr(0))
    }

    fn stop_signal(&self) -> Signal {
        // In this version TERM waits for no client.
        Signal::TERM
    }
}
