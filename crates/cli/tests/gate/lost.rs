//! A gate that lost its lock: another one may let newer fences through, and nothing older may come after them.

use std::io::{ErrorKind, Read, Write};
use std::time::Duration;

use lockkeeper_testkit::servers::{self, RedisOptions};

use super::common::*;
use super::tools::*;

/// A websocket stayed open, and a body that was half sent was sent to its end, though the gate had long lost its lock.
#[test]
fn what_is_half_passed_on_is_cut_off_when_the_lock_is_lost() {
    let Ok(mut redis) = servers::redis(RedisOptions::default()) else { return };
    let (place, service, switches) = (Place::new("gate_lost"), Service::start(), switching("websocket"));
    let options = format!("--store redis://{} --ttl 5s", redis.addr());
    let gate = Gate::start(&place, &service.url(), &options);
    let tunnels = Gate::start(&place, &format!("http://{switches}"), &format!("{options} --space tunnels"));
    let open = |fence: &str| {
        let mut wire = Wire::to(tunnels.addr);
        wire.say(&format!(
            "GET /a HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n{fence}\r\n"
        ));
        wire.hear("101 Switching Protocols");
        wire.say("hello");
        wire.hear("hello");
        wire
    };
    let (mut free, mut five) = (open(""), open("Lock-Fence: 5\r\n"));
    let mut half = Wire::to(gate.addr);
    half.say("PUT /a HTTP/1.1\r\nHost: a\r\nLock-Fence: 5\r\nContent-Length: 100000\r\n\r\n");
    service.until_begun(1);
    redis.kill9();
    // It is cut, and not merely silent.
    std::io::copy(&mut five.0, &mut std::io::sink()).unwrap();
    free.say("no one else is");
    free.hear("no one else is");
    // Byte by byte, until one comes after the loss.
    half.0.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    let mut status = [0; 12];
    until(|| {
        // It may be closed already: then there is an answer to read.
        let _ = half.0.write_all(b"x");
        match half.0.read(&mut status) {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Err(error) => panic!("{error}"),
        }
    });
    assert_eq!(&status, b"HTTP/1.1 504", "it may have happened");
    assert!(service.written().is_empty());
}
