//! The way to a quiet end.

use std::net::TcpStream;

use rustix::process::Signal;

use super::common::*;
use super::tools::*;

#[test]
fn after_term_what_is_under_way_ends_well_and_nobody_new_is_let_in() {
    let (place, service) = (Place::new("gate_drain"), Service::start());
    let gate = Gate::start(&place, &service.url(), "--admin 127.0.0.1:0");
    let mut idle = Wire::to(gate.addr);
    idle.say("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    idle.hear("\"GET\"");
    let slow = begin(&["-X", "PUT", "-H", "Lock-Fence: 5", "-d", "slow", &gate.url("/slow")]);
    service.until_begun(2);
    gate.signal(Signal::TERM);
    until(|| gate.metric("draining") == 1);
    until(|| TcpStream::connect(gate.addr).is_err());
    let health = curl(&[&format!("http://{}/healthz", gate.admin.unwrap())]);
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
    for (options, twice) in [("--drain 200ms", false), ("--drain 1h", true)] {
        let (place, service) = (Place::new(&format!("gate_cut_{twice}")), Service::start());
        let gate = Gate::start(&place, &service.url(), options);
        let mut slow = begin(&["-X", "PUT", "-H", "Lock-Fence: 5", "-d", "slow", &gate.url("/slow")]);
        service.until_begun(1);
        gate.signal(Signal::TERM);
        if twice {
            until(|| TcpStream::connect(gate.addr).is_err());
            gate.signal(Signal::INT);
        }
        let (ended, said) = gate.end();
        assert_eq!(ended, 74, "{said:?}");
        assert!(said.last().unwrap().contains("1 requests were still under way"), "{said:?}");
        slow.wait().unwrap();
    }
}
