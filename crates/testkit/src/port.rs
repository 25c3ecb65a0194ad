//! Reserves ports of 127.0.0.1 for the servers of tests.

use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::fs::{FlockOperation, flock};

/// Below the range from which the kernel hands out ports by itself: no process gets one of these by chance while a server
/// that it belongs to is down.
const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// A port of 127.0.0.1 that no other test takes while this lives, even when no process listens on it.
#[derive(Debug)]
pub struct Port {
    number: u16,
    // The lock goes with the file, also when the process is killed.
    _claim: File,
}

impl Port {
    /// Reserves a port on which no process listens now.
    ///
    /// # Panics
    /// If there is none, or the temporary directory cannot be written to.
    pub fn claim() -> Port {
        Port::listen().0
    }

    /// Claims a port and listens on it.
    ///
    /// # Panics
    /// If there is none, or the temporary directory cannot be written to.
    pub fn listen() -> (Port, TcpListener) {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        // Processes begin at different places, so that they rarely try the same port.
        let start = std::process::id().wrapping_mul(2_654_435_761) % u32::from(COUNT);
        for _ in 0..COUNT {
            let offset = (start + u32::from(NEXT.fetch_add(1, Ordering::Relaxed))) % u32::from(COUNT);
            let number = FIRST + offset as u16;
            let Some(claim) =
                try_claim(&number.to_string()).expect("ports can be claimed in the temporary directory")
            else {
                continue;
            };
            if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, number)) {
                return (Port { number, _claim: claim }, listener);
            }
        }
        panic!("no free port between {FIRST} and {}", FIRST + COUNT);
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.number
    }
}

/// Claims something of this machine that only one test may have at a time. `None`: another one has it.
pub(crate) fn try_claim(what: &str) -> io::Result<Option<File>> {
    let user = rustix::process::getuid().as_raw();
    let dir = std::env::temp_dir().join(format!("lockkeeper-ports-{user}"));
    fs::create_dir_all(&dir)?;
    let file = File::options().create(true).append(true).open(dir.join(what))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_claimed_port_is_free_and_is_given_once() {
        let ports: Vec<Port> = (0..50).map(|_| Port::claim()).collect();
        assert_eq!(ports.iter().map(Port::number).collect::<HashSet<_>>().len(), 50);
        assert!(try_claim(&ports[0].number().to_string()).unwrap().is_none(), "still claimed");
        TcpListener::bind((Ipv4Addr::LOCALHOST, ports[0].number())).unwrap();
    }
}
