//! Starts one Redis server.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;

use super::process::Launch;
use super::{ClockShim, Program, Server, ServerSite, Skip, TlsFiles, require};

/// When Redis makes its append-only file durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AppendOnly {
    /// There is none: a restart forgets everything.
    #[default]
    Off,
    /// Once a second.
    EverySecond,
    /// Before each answer.
    Always,
}

/// How to run a Redis server. The default is in memory, on a TCP port only.
#[derive(Clone, Debug, Default)]
pub struct RedisOptions {
    /// Whether it also listens on a Unix socket: [`redis_socket`] says where.
    pub unix_socket: bool,
    /// How durable it is.
    pub append_only: AppendOnly,
    /// Whose replica it is.
    pub replica_of: Option<SocketAddr>,
    /// Whether it also listens for TLS, with these certificates: [`redis_tls_addr`] says where. Clients need none.
    pub tls: Option<TlsFiles>,
    /// The wall clock it lives on, if not the machine's.
    pub clock: Option<ClockShim>,
    /// More settings, such as `("maxmemory", "50mb")`.
    pub extra: Vec<(String, String)>,
}

/// Starts a Redis server.
///
/// # Errors
/// [`Skip`] if the tests are to run without `redis`.
///
/// # Panics
/// If the program is missing or does not start.
///
/// ```no_run
/// use lockkeeper_testkit::servers::{self, RedisOptions};
/// let Ok(mut redis) = servers::redis(RedisOptions::default()) else { return };
/// servers::redis_call(redis.addr(), &["SET", "k", "v"]).unwrap();
/// redis.kill9();
/// redis.restart();
/// ```
pub fn redis(options: RedisOptions) -> Result<Server, Skip> {
    Ok(Server::start(Redis { program: redis_server()?, options, cluster: false }))
}

/// Starts a node of a cluster: alone, and without a slot. The last port of its place is that of the cluster's bus.
pub(super) fn redis_node(options: RedisOptions) -> Result<Server, Skip> {
    Ok(Server::start(Redis { program: redis_server()?, options, cluster: true }))
}

pub(super) fn redis_server() -> Result<PathBuf, Skip> {
    require("redis", "redis-server", "redis-server")
}

/// The Unix socket of a Redis server that was started with one.
pub fn redis_socket(server: &Server) -> PathBuf {
    server.place().join("sock")
}

/// Where a Redis server that was started with [`RedisOptions::tls`] listens for TLS.
pub fn redis_tls_addr(server: &Server) -> SocketAddr {
    server.place().addr(1)
}

struct Redis {
    program: PathBuf,
    options: RedisOptions,
    cluster: bool,
}

impl Redis {
    fn settings(&self, place: &ServerSite) -> Vec<(String, String)> {
        let dir = place.dir().display().to_string();
        let mut all = vec![
            ("bind", "127.0.0.1".to_owned()),
            ("port", place.addr(0).port().to_string()),
            ("dir", dir),
            ("save", String::new()),
            ("daemonize", "no".to_owned()),
            // It would wait for 5 s, in case that more replicas come.
            ("repl-diskless-sync-delay", "0".to_owned()),
        ];
        if self.options.append_only != AppendOnly::Off {
            let always = self.options.append_only == AppendOnly::Always;
            all.push(("appendonly", "yes".to_owned()));
            all.push(("appendfsync", if always { "always" } else { "everysec" }.to_owned()));
        }
        if self.options.unix_socket {
            all.push(("unixsocket", place.join("sock").display().to_string()));
        }
        if let Some(primary) = self.options.replica_of {
            all.push(("replicaof", format!("{} {}", primary.ip(), primary.port())));
        }
        if let Some(tls) = &self.options.tls {
            all.push(("tls-port", place.addr(1).port().to_string()));
            all.push(("tls-ca-cert-file", tls.ca_path().display().to_string()));
            all.push(("tls-cert-file", tls.cert_path().display().to_string()));
            all.push(("tls-key-file", tls.key_path().display().to_string()));
            all.push(("tls-auth-clients", "no".to_owned()));
        }
        if self.cluster {
            all.push(("cluster-enabled", "yes".to_owned()));
            all.push(("cluster-config-file", "nodes.conf".to_owned()));
            all.push(("cluster-port", place.addr(self.ports() - 1).port().to_string()));
        }
        let all = all.into_iter().map(|(key, value)| (key.to_owned(), value));
        all.chain(self.options.extra.iter().cloned()).collect()
    }
}

impl Program for Redis {
    fn name(&self) -> &str {
        "redis"
    }

    fn ports(&self) -> usize {
        1 + usize::from(self.options.tls.is_some()) + usize::from(self.cluster)
    }

    fn prepare(&self, _place: &ServerSite) -> io::Result<()> {
        Ok(())
    }

    fn launch(&self, place: &ServerSite) -> Launch {
        let settings = self.settings(place).into_iter();
        let launch =
            Launch::new(&self.program, settings.flat_map(|(key, value)| [format!("--{key}"), value]));
        let env = self.options.clock.as_ref().map(ClockShim::env).unwrap_or_default();
        Launch { env, ..launch }
    }

    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }

    fn ping(&self, place: &ServerSite, pid: u32) -> io::Result<()> {
        let wanted = [format!("process_id:{pid}"), "loading:0".to_owned()];
        match redis_call(place.addr(0), &["INFO"]) {
            // Another server on this port would answer as well, and one that still reads its file answers nothing else.
            Ok(info) if wanted.iter().all(|line| info.lines().any(|l| l == line)) => Ok(()),
            Ok(_) => Err(io::Error::other("it still loads, or another server answers")),
            Err(e) if e.to_string().contains("NOAUTH") => Ok(()),
            Err(e) => Err(e),
        }
    }
}

/// Sends one command to a Redis server and returns the answer as text, the parts of an array on lines of their own.
///
/// # Errors
/// If there is no connection, no answer within a second, or an error for an answer.
pub fn redis_call(addr: SocketAddr, command: &[&str]) -> io::Result<String> {
    let limit = Duration::from_secs(1);
    let mut stream = TcpStream::connect_timeout(&addr, limit)?;
    stream.set_read_timeout(Some(limit))?;
    let parts = command.iter().map(|part| format!("${}\r\n{part}\r\n", part.len()));
    let text: String = std::iter::once(format!("*{}\r\n", command.len())).chain(parts).collect();
    stream.write_all(text.as_bytes())?;
    answer(&mut BufReader::new(stream))
}

fn answer(from: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    let Some((kind, rest)) = line.trim_end().split_at_checked(1) else {
        return Err(io::ErrorKind::UnexpectedEof.into());
    };
    let length: i64 = rest.parse().unwrap_or(0);
    match kind {
        "-" => Err(io::Error::other(rest.to_owned())),
        "$" | "*" if length < 0 => Ok("(nil)".into()),
        "$" => {
            let mut bulk = vec![0; length as usize + 2];
            from.read_exact(&mut bulk)?;
            bulk.truncate(length as usize);
            Ok(String::from_utf8_lossy(&bulk).into_owned())
        }
        "*" => Ok((0..length).map(|_| answer(from)).collect::<io::Result<Vec<_>>>()?.join("\n")),
        _ => Ok(rest.to_owned()),
    }
}
