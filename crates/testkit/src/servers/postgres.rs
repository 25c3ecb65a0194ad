//! Starts PostgreSQL servers.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;

use super::process::Launch;
use super::{ClockShim, Program, Server, ServerSite, Skip, TlsFiles, require};

/// The user for which PostgreSQL runs when the test is root: it refuses to be root itself.
const USER: &str = "postgres";

/// How to run a PostgreSQL server. Every user of this machine connects as `postgres`, without a password.
#[derive(Clone, Debug, Default)]
pub struct PostgresOptions {
    /// Settings, such as `("max_connections", "20")`.
    pub settings: Vec<(String, String)>,
    /// The wall clock it lives on, if not the machine's.
    pub clock: Option<ClockShim>,
    /// The files for TLS; without them the server accepts no TLS.
    pub tls: Option<TlsFiles>,
    /// Lines of `pg_hba.conf` before those that accept every client, such as `host all app 127.0.0.1/32 scram-sha-256`.
    pub hba: Vec<String>,
}

/// Starts a PostgreSQL server with a database cluster of its own. Its Unix socket is in its directory.
///
/// # Errors
/// [`Skip`] if the tests are to run without `postgres`.
///
/// # Panics
/// If the program is missing or does not start.
pub fn postgres(options: PostgresOptions) -> Result<Server, Skip> {
    let (program, user) = program()?;
    Ok(Server::start(Postgres { program, options, user, primary: None }))
}

/// Starts a standby that follows a primary, with a copy of its data as they are now. It can be read, and
/// `SELECT pg_promote()` makes a primary of it.
///
/// # Errors
/// [`Skip`] if the tests are to run without `postgres`.
///
/// # Panics
/// If the program is missing or does not start.
pub fn postgres_standby(primary: &Server, options: PostgresOptions) -> Result<Server, Skip> {
    let (program, user) = program()?;
    Ok(Server::start(Postgres { program, options, user, primary: Some(primary.addr()) }))
}

fn program() -> Result<(PathBuf, Option<String>), Skip> {
    let program = require("postgres", "postgres", "postgresql")?;
    // PATH may hold a link to it; initdb is where the real one is.
    let program = fs::canonicalize(&program).unwrap_or(program);
    Ok((program, user()))
}

/// As whom it runs, and everything that belongs to it.
pub(super) fn user() -> Option<String> {
    rustix::process::getuid().is_root().then(|| USER.to_owned())
}

/// Lets that user have a directory or a file.
pub(super) fn hand_over(path: &Path) -> io::Result<()> {
    if user().is_none() {
        return Ok(());
    }
    let (uid, gid) = ids_of(USER)?;
    std::os::unix::fs::chown(path, Some(uid), Some(gid))
}

struct Postgres {
    program: PathBuf,
    options: PostgresOptions,
    user: Option<String>,
    /// Whom it follows.
    primary: Option<SocketAddr>,
}

impl Postgres {
    /// The data directory: a new one, or a copy.
    fn make(&self, data: &str) -> Launch {
        let Some(primary) = self.primary else {
            // Tests do not cut the power here: no need to sync.
            let args = ["-D", data, "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"];
            return Launch::new(self.program.with_file_name("initdb"), args);
        };
        let (host, port) = (primary.ip().to_string(), primary.port().to_string());
        let args = [
            "-D",
            data,
            "-h",
            &host,
            "-p",
            &port,
            "-U",
            USER,
            "-R",
            "-X",
            "stream",
            "-c",
            "fast",
            "--no-sync",
        ];
        Launch::new(self.program.with_file_name("pg_basebackup"), args)
    }
}

impl Program for Postgres {
    fn name(&self) -> &str {
        "postgres"
    }

    fn ports(&self) -> usize {
        1
    }

    fn prepare(&self, place: &ServerSite) -> io::Result<()> {
        hand_over(place.dir())?;
        if let Some(tls) = &self.options.tls {
            // It refuses a key that others can read.
            for (from, to) in [(tls.cert_path(), "server.pem"), (tls.key_path(), "server.key")] {
                fs::copy(from, place.join(to))?;
                fs::set_permissions(place.join(to), fs::Permissions::from_mode(0o600))?;
                hand_over(&place.join(to))?;
            }
        }
        let make = self.make(&place.join("data").display().to_string());
        Launch { user: self.user.clone(), ..make }.run(&place.join("log"))?;
        // The first line that fits is the one that counts.
        let path = place.join("data").join("pg_hba.conf");
        let usual = fs::read_to_string(&path)?;
        fs::write(path, format!("{}\n{usual}", self.options.hba.join("\n")))
    }

    fn launch(&self, place: &ServerSite) -> Launch {
        let mut settings = vec![
            ("listen_addresses".to_owned(), "127.0.0.1".to_owned()),
            ("port".to_owned(), place.addr(0).port().to_string()),
            ("unix_socket_directories".to_owned(), place.dir().display().to_string()),
        ];
        if self.options.tls.is_some() {
            settings.push(("ssl".to_owned(), "on".to_owned()));
            settings.push(("ssl_cert_file".to_owned(), place.join("server.pem").display().to_string()));
            settings.push(("ssl_key_file".to_owned(), place.join("server.key").display().to_string()));
        }
        settings.extend(self.options.settings.iter().cloned());
        let settings = settings.into_iter().flat_map(|(key, value)| ["-c".into(), format!("{key}={value}")]);
        let data = ["-D".to_owned(), place.join("data").display().to_string()];
        let launch = Launch::new(&self.program, data.into_iter().chain(settings));
        let env = self.options.clock.as_ref().map(ClockShim::env).unwrap_or_default();
        Launch { user: self.user.clone(), env, ..launch }
    }

    fn stop_signal(&self) -> Signal {
        // TERM would wait for every session to end by itself.
        Signal::INT
    }

    fn ping(&self, place: &ServerSite, pid: u32) -> io::Result<()> {
        let file = fs::read_to_string(place.join("data").join("postmaster.pid"))?;
        let mine = file.lines().next() == Some(&pid.to_string());
        // The file of a server that was killed stays until the next one takes its place.
        if !mine || !file.lines().any(|line| matches!(line.trim(), "ready" | "standby")) {
            return Err(io::Error::other("not ready"));
        }
        log_in(place.addr(0))
    }
}

/// Opens a session and waits for "ready for query".
pub(super) fn log_in(addr: SocketAddr) -> io::Result<()> {
    let limit = Duration::from_secs(1);
    let mut stream = TcpStream::connect_timeout(&addr, limit)?;
    stream.set_read_timeout(Some(limit))?;
    let body = [&196_608_u32.to_be_bytes()[..], b"user\0postgres\0database\0postgres\0\0"].concat();
    stream.write_all(&[&(body.len() as u32 + 4).to_be_bytes()[..], &body].concat())?;
    let mut seen = Vec::new();
    let mut chunk = [0; 1024];
    while !seen.ends_with(b"Z\0\0\0\x05I") {
        match stream.read(&mut chunk)? {
            0 => return Err(io::Error::other(String::from_utf8_lossy(&seen).into_owned())),
            n => seen.extend_from_slice(&chunk[..n]),
        }
    }
    stream.write_all(b"X\0\0\0\x04")
}

fn ids_of(user: &str) -> io::Result<(u32, u32)> {
    let passwd = fs::read_to_string("/etc/passwd")?;
    let ids = passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == user).then_some(())?;
        Some((fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?))
    });
    ids.ok_or_else(|| io::Error::other(format!("there is no user {user}")))
}
