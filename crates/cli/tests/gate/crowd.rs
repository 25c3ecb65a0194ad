//! Many connections at once.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::common::*;
use super::tools::*;

/// The memory of a process, in KiB.
fn memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().split(' ').next().unwrap().parse().unwrap()
}

fn request(stream: &mut TcpStream, n: usize) {
    let request =
        format!("PUT /{n} HTTP/1.1\r\nHost: a\r\nLock-Fence: {}\r\nContent-Length: 1\r\n\r\nx", n + 1);
    stream.write_all(request.as_bytes()).unwrap();
}

fn answered(stream: &mut TcpStream) {
    let mut some = [0; 1024];
    let n = stream.read(&mut some).unwrap();
    assert!(some[..n].starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&some[..n]));
}

/// 2,000 by day, 10,000 with LOCKKEEPER_FULL: all open, each served, and served again while all are open.
#[test]
fn thousands_of_connections_are_held_and_served() {
    let count = if std::env::var_os("LOCKKEEPER_FULL").is_some() { 10_000 } else { 2_000 };
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).unwrap();
    if most.is_some_and(|most| most < count as u64 + 1000) {
        return println!("left out: only {most:?} files may be open here");
    }
    let (place, service) = (Place::new("gate_crowd"), Service::start());
    let gate = Gate::start(&place, &service.url(), "--connections 12000");
    let before = memory(gate.child.id());
    let began = Instant::now();
    let mut streams: Vec<TcpStream> = (0..count).map(|_| TcpStream::connect(gate.addr).unwrap()).collect();
    until(|| gate.metric("connections") == count as u64);
    let opened = began.elapsed();
    // A hundred at a time, so that the service, which is one thread, is not the one that is tested.
    for round in 0..2 {
        for (part, streams) in streams.chunks_mut(100).enumerate() {
            streams.iter_mut().enumerate().for_each(|(n, stream)| request(stream, part * 100 + n));
            streams.iter_mut().for_each(answered);
        }
        assert_eq!(service.begun(), count * (round + 1));
    }
    assert_eq!(gate.metric("connections"), count as u64, "some were closed");
    let each = (memory(gate.child.id()) - before) * 1024 / count as u64;
    println!(
        "{count} connections in {opened:?}, each served twice in {:?}; {each} bytes each",
        began.elapsed()
    );
    assert!(each < 64 << 10, "{each} bytes for each connection");
}
