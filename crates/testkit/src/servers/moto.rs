use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;

use super::process::Launch;
use super::{Place, Program, Server, Skip, demand};

/// Starts moto, the stand-in for DynamoDB and S3: real HTTP, real conditions, everything in memory. One call is atomic because
/// Python runs one at a time, so it proves what *we* ask, not what Amazon answers under load. Any credentials will do.
///
/// # Errors
/// [`Skip`] if the tests are to run without `moto`.
///
/// # Panics
/// If it is missing or does not start.
pub fn moto() -> Result<Server, Skip> {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/venv/bin/moto_server");
    demand("moto", program.is_file(), "moto in target/venv, where ./scripts/test installs it")?;
    Ok(Server::start(Moto { program }))
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

    fn prepare(&self, _place: &Place) -> io::Result<()> {
        Ok(())
    }

    fn launch(&self, place: &Place) -> Launch {
        let addr = place.addr(0);
        Launch::new(&self.program, ["-H", &addr.ip().to_string(), "-p", &addr.port().to_string()])
    }

    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }

    fn ping(&self, place: &Place, _pid: u32) -> io::Result<()> {
        let limit = Duration::from_secs(1);
        let mut stream = TcpStream::connect_timeout(&place.addr(0), limit)?;
        stream.set_read_timeout(Some(limit))?;
        stream.write_all(b"GET /moto-api/ HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        answer.contains(" 200 ").then_some(()).ok_or_else(|| io::Error::other(answer))
    }
}
