//! The way to a quiet end.

use std::io::Read;
use std::net::TcpStream;

use rustix::process::Signal;

use super::common::*;
use super::tools::*;

#[test]
fn after_term_what_is_under_way_ends_well_and_nobody_new_is_let_in() {
    let (place, service) = (Place::new("gate_drain"), Service::start());
    let gate = Gate::start(&place, &service.url(), "");
    let mut idle = Wire::to(gate.addr);
    idle.say("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    idle.hear("\"GET\"");
    let slow = begin(&["-X", "PUT", "-H", "Lock-Fence: 5", "-d", "slow", &gate.url("/slow")]);
    service.until_begun(2);
    gate.signal(Signal::TERM);
    until(|| gate.metric("draining") == 1);
    until(|| TcpStream::connect(gate.addr).is_err());
    let health = curl(&[&format!("http://{}/healthz", gate.admin)]);
    assert_eq!((health.status, health.body.as_str()), (503, "draining\n"));
    // A connection that nothing is under way on is closed.
    std::io::copy(&mut idle.0, &mut std::io::sink()).unwrap();
    service.go();
    assert_eq!(finish(slow).status, 200);
    let (ended, said) = gate.end();
    assert_eq!(ended, 0, "{said:?}");
}

#[test]
fn the_wait_has_an_end_and_says_what_was_cut_off() {
    // An answer that has begun is as much under way as one that has not.
    let all = [
        ("--drain 200ms", "/slow", false),
        ("--drain 1h", "/slow", true),
        ("--drain 200ms", "/stream", false),
    ];
    for (n, (options, path, twice)) in all.into_iter().enumerate() {
        let (place, service) = (Place::new(&format!("gate_cut_{n}")), Service::start());
        let gate = Gate::start(&place, &service.url(), options);
        let mut slow = begin(&["-N", "-X", "PUT", "-H", "Lock-Fence: 5", "-d", "slow", &gate.url(path)]);
        service.until_begun(1);
        if path == "/stream" {
            // Its head at least.
            slow.stdout.as_mut().unwrap().read_exact(&mut [0; 9]).unwrap();
        }
        gate.signal(Signal::TERM);
        if twice {
            until(|| TcpStream::connect(gate.addr).is_err());
            gate.signal(Signal::INT);
        }
        let (ended, said) = gate.end();
        assert_eq!(ended, 74, "{said:?}");
        assert!(said.last().unwrap().contains("1 requests were still in flight"), "{said:?}");
        slow.wait().unwrap();
    }
}
