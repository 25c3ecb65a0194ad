//! Starts moto, the stand-in for DynamoDB and S3.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;

use super::process::Launch;
use super::{Program, Server, ServerSite, Skip, demand};

/// Starts moto, the stand-in for DynamoDB and S3: real HTTP, real conditions, everything in memory. It serves one request at a time,
/// which it needs to be atomic (see `moto.py`); so it proves what *we* ask, not what Amazon answers under load. Any credentials will do.
///
/// # Errors
/// [`Skip`] if the tests are to run without `moto`.
///
/// # Panics
/// If it is missing or does not start.
pub fn moto() -> Result<Server, Skip> {
    let bin = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/venv/bin");
    demand(
        "moto",
        bin.join("moto_server").is_file(),
        "moto in target/venv, where ./scripts/test installs it",
    )?;
    Ok(Server::start(Moto { program: bin.join("python") }))
}

struct Moto {
    program: PathBuf,
}

impl Program for Moto {
    fn name(&self) -> &str {
        "moto"
    }

    fn ports(&self) -> usize {
        1
    }

    fn prepare(&self, place: &ServerSite) -> io::Result<()> {
        std::fs::write(place.join("one_at_a_time.py"), include_str!("moto.py"))
    }

    fn launch(&self, place: &ServerSite) -> Launch {
        let addr = place.addr(0);
        let script = place.join("one_at_a_time.py").display().to_string();
        let [ip, port] = [addr.ip().to_string(), addr.port().to_string()];
        Launch::new(&self.program, [&*script, "-H", &ip, "-p", &port])
    }

    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }

    fn ping(&self, place: &ServerSite, _pid: u32) -> io::Result<()> {
        let limit = Duration::from_secs(1);
        let mut stream = TcpStream::connect_timeout(&place.addr(0), limit)?;
        stream.set_read_timeout(Some(limit))?;
        stream.write_all(b"GET /moto-api/ HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        answer.contains(" 200 ").then_some(()).ok_or_else(|| io::Error::other(answer))
    }
}
