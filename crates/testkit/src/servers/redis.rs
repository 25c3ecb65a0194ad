use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;

use super::process::Launch;
use super::{Place, Program, Server, Skip, require};

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
    let program = require("redis", "redis-server", "redis-server")?;
    Ok(Server::start(Redis { program, options }))
}

/// The Unix socket of a Redis server that was started with one.
pub fn redis_socket(server: &Server) -> PathBuf {
    server.place().join("sock")
}

struct Redis {
    program: PathBuf,
    options: RedisOptions,
}

impl Redis {
    fn settings(&self, place: &Place) -> Vec<(String, String)> {
        let dir = place.dir().display().to_string();
        let mut all = vec![
            ("bind", "127.0.0.1".to_owned()),
            ("port", place.addr(0).port().to_string()),
            ("dir", dir),
            ("save", String::new()),
            ("daemonize", "no".to_owned()),
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
        let all = all.into_iter().map(|(key, value)| (key.to_owned(), value));
        all.chain(self.options.extra.iter().cloned()).collect()
    }
}

impl Program for Redis {
    fn name(&self) -> &str {
        "redis"
    }

    fn ports(&self) -> usize {
        1
    }

    fn prepare(&self, _place: &Place) -> io::Result<()> {
        Ok(())
    }

    fn launch(&self, place: &Place) -> Launch {
        let settings = self.settings(place);
        Launch::new(&self.program, settings.into_iter().flat_map(|(key, value)| [format!("--{key}"), value]))
    }

    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }

    fn ping(&self, place: &Place, pid: u32) -> io::Result<()> {
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
