//! A service that hangs or is unreachable, a store that is unreachable, clients that stop or hang up, and which request waits for which.

use lockkeeper_testkit::servers::{self, RedisOptions};
use rustix::process::Signal;

use super::common::*;
use super::tools::*;

#[test]
fn a_service_that_is_away_hangs_or_breaks_off_is_told_apart() {
    let (place, service) = (Place::new("gate_away"), Service::start());
    let gate = Gate::start(&place, &service.url(), "--timeout 300ms");
    let hung = gate.put("/never", 5, "x");
    assert_eq!((hung.status, hung.problem().as_str()), (504, "unknown"));
    // A port without a listener.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let gate = Gate::start(&place, &format!("http://{closed}"), "--space closed");
    let away = gate.put("/a", 5, "x");
    assert_eq!((away.status, away.problem().as_str()), (502, "unreached"));
    // One that hears the request and hangs up.
    let rude = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let gate = Gate::start(&place, &format!("http://{}", rude.local_addr().unwrap()), "--space rude");
    std::thread::spawn(move || {
        let (stream, _) = rude.accept().unwrap();
        Wire(stream).hear("body");
    });
    let broken = gate.put("/b", 5, "the body");
    assert_eq!((broken.status, broken.problem().as_str()), (504, "unknown"), "it may have happened");
}

/// Connections are kept, and the service may close them whenever nothing is under way. The gate does not look at a kept one until it is
/// needed: so what has happened to it is seen then, before anything is said.
#[test]
fn a_connection_that_the_service_has_closed_is_not_used_again() {
    let place = Place::new("gate_closed");
    let hasty = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let gate = Gate::start(&place, &format!("http://{}", hasty.local_addr().unwrap()), "");
    let (tell, closed) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in hasty.incoming() {
            let mut wire = Wire(stream.unwrap());
            wire.hear("body");
            wire.say("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone");
            drop(wire);
            tell.send(()).unwrap();
        }
    });
    for n in 0..20 {
        assert_eq!(gate.put("/a", 5, "the body").status, 200, "request {n}");
        closed.recv().unwrap();
    }
}

#[test]
fn a_store_that_is_away_lets_no_new_fence_through_and_soon_none() {
    let Ok(mut redis) = servers::redis(RedisOptions::default()) else { return };
    let (place, service) = (Place::new("gate_store"), Service::start());
    for (options, alone) in [("--shared", false), ("--ttl 5s", true)] {
        let options = format!("--space s{alone} --store redis://{} {options}", redis.addr());
        let gate = Gate::start(&place, &service.url(), &options);
        assert_eq!(gate.put("/a", 5, "five").status, 200);
        redis.kill9();
        let refused = |fence| {
            let answer = gate.put("/a", fence, "x");
            answer.status == 503 && answer.problem() == "unavailable"
        };
        assert!(refused(6), "a mark that cannot be raised");
        // Who is alone with its marks knows what it has seen, until the lock cannot be believed in any more.
        until(|| refused(4));
        assert!(refused(4) && refused(5) && refused(6));
        assert!(!gate.is_healthy());
        assert_eq!(curl(&[&gate.url("/a")]).status, 200, "what has no fence needs no store");
        redis.restart();
    }
    assert_eq!(service.written(), ["five", "five"]);
}

#[test]
fn the_newer_waits_for_the_older_also_when_its_client_hangs_up() {
    let (place, service) = (Place::new("gate_wait"), Service::start());
    let gate = Gate::start(&place, &service.url(), "--resource first-segments:1 --shared");
    let hurried = Gate::start(&place, &service.url(), "--resource first-segments:1 --shared");
    let put = |fence: &str, value: &str, path: &str| {
        begin(&["-X", "PUT", "-H", &format!("Lock-Fence: {fence}"), "-d", value, &gate.url(path)])
    };
    let mut five = put("5", "five", "/a/slow");
    service.until_begun(1);
    let mut six = put("6", "six", "/a/quick");
    // Its mark is raised before it waits.
    until(|| text(&place.run("record get fence/http=/a")) == "6");
    assert_eq!(gate.put("/a/quick", 5, "late").status, 412);
    five.kill().unwrap();
    five.wait().unwrap();
    // It hung up; the service does not know, and is still at it.
    assert_eq!(gate.put("/a/quick", 5, "later").status, 412);
    assert!(six.try_wait().unwrap().is_none(), "it did not wait");
    assert_eq!(service.begun(), 1, "the newer one was passed on while the older was under way");
    service.go();
    assert_eq!(finish(six).status, 200);
    assert_eq!(service.written(), ["five", "six"]);
    // What another gate has under way is not known here, and the page says so.
    let seven = put("7", "seven", "/a/slow");
    service.until_begun(3);
    assert_eq!(hurried.put("/a/quick", 8, "eight").status, 200);
    service.go();
    assert_eq!(finish(seven).status, 200);
    assert_eq!(
        service.written(),
        ["five", "six", "eight", "seven"],
        "--shared is for those who send each resource to one gate"
    );
}

/// The account ended with the head of an answer if the client was gone by then, and the next fence met a service that was still at
/// the one before.
#[test]
fn the_newer_waits_for_the_older_also_when_its_client_hangs_up_in_the_middle_of_the_answer() {
    let (place, service) = (Place::new("gate_half_heard"), Service::start());
    let gate = Gate::start(&place, &service.url(), "--resource first-segments:1");
    let mut five = Wire::to(gate.addr);
    five.say("PUT /a/stream HTTP/1.1\r\nHost: a\r\nLock-Fence: 5\r\nContent-Length: 4\r\n\r\nfive");
    five.hear("begun");
    assert_eq!(gate.metric("requests_in_flight"), 1, "it has not ended");
    drop(five);
    until(|| gate.metric("connections") == 0);
    let mut six = begin(&["-X", "PUT", "-H", "Lock-Fence: 6", "-d", "six", &gate.url("/a/quick")]);
    until(|| text(&place.run("record get fence/http=/a")) == "6");
    assert_eq!(gate.put("/a/quick", 5, "late").status, 412);
    assert!(six.try_wait().unwrap().is_none(), "it did not wait");
    assert_eq!(service.begun(), 1, "the newer one was passed on while the older was under way");
    service.go();
    assert_eq!(finish(six).status, 200);
    assert_eq!(service.written(), ["five", "six"]);
    assert_eq!(gate.metric("requests_in_flight"), 0);
}

#[test]
fn a_client_that_stops_in_the_middle_keeps_nobody_waiting_for_ever() {
    let (place, service) = (Place::new("gate_stall"), Service::start());
    let gate = Gate::start(&place, &service.url(), "--timeout 2s --idle 2s");
    let mut stalled = Wire::to(gate.addr);
    stalled.say("PUT /a HTTP/1.1\r\nHost: a\r\nLock-Fence: 5\r\nContent-Length: 100\r\n\r\nsome");
    service.until_begun(1);
    assert_eq!(gate.put("/a", 6, "six").status, 200);
    stalled.hear("504");
    assert_eq!(service.written(), ["six"]);
    // A connection on which nothing is said is closed, and so is one that has said half a head, or nothing more.
    let (mut silent, mut half, mut served) = (Wire::to(gate.addr), Wire::to(gate.addr), Wire::to(gate.addr));
    half.say("GET / HTTP/1.1\r\n");
    silent.hear("");
    served.say("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    served.hear("\"GET\"");
    for wire in [&mut silent, &mut half, &mut served] {
        std::io::copy(&mut wire.0, &mut std::io::sink()).unwrap();
    }
}

/// A client that does not read fills all buffers, and then hyper does not poll its response any more: so no timer saw how long that
/// had been so.
#[test]
fn a_client_that_stops_reading_keeps_nobody_waiting_for_ever() {
    let (place, service) = (Place::new("gate_deaf"), Service::start());
    for method in ["PUT", "GET"] {
        let gate = Gate::start(&place, &service.url(), &format!("--idle 2s --wait 30s --space {method}"));
        let mut stopped = Wire::to(gate.addr);
        stopped.say(&format!(
            "{method} /big HTTP/1.1\r\nHost: a\r\nLock-Fence: 5\r\nContent-Length: 4\r\n\r\nfive"
        ));
        stopped.hear("HTTP/1.1 200");
        let six = gate.put("/big", 6, "six");
        assert_eq!(six.status, 200, "{method} {}", &six.body[..200.min(six.body.len())]);
    }
    assert_eq!(service.written(), ["five", "six", "six"]);
}

#[test]
fn who_waits_for_an_answer_is_not_silent() {
    let (place, service) = (Place::new("gate_patient"), Service::start());
    let gate = Gate::start(&place, &service.url(), "--idle 1s");
    let mut slow = Wire::to(gate.addr);
    slow.say("PUT /slow HTTP/1.1\r\nHost: a\r\nLock-Fence: 5\r\nContent-Length: 4\r\n\r\nslow");
    service.until_begun(1);
    std::thread::sleep(std::time::Duration::from_millis(2500));
    service.go();
    slow.hear("HTTP/1.1 200");
}

#[test]
fn of_two_gates_one_stands_by_and_takes_over() {
    let (place, service) = (Place::new("gate_standby"), Service::start());
    let options = "--ttl 3s --lock-delay 1s";
    let first = Gate::start(&place, &service.url(), options);
    let second = Gate::start_next(&place, &service.url(), options);
    assert!(first.is_healthy() && !second.is_healthy());
    assert_eq!(first.put("/a", 5, "five").status, 200);
    let waits = second.put("/a", 6, "six");
    assert_eq!((waits.status, waits.problem().as_str()), (503, "unavailable"));
    // One that ends well gives the marks to the next at once.
    first.signal(Signal::TERM);
    assert_eq!(first.end().0, 0);
    until(|| second.is_healthy());
    assert_eq!((second.put("/a", 4, "late").status, second.put("/a", 6, "six").status), (412, 200));
    // One that is killed may have left something under way: they are held back for a while.
    let third = Gate::start_next(&place, &service.url(), options);
    let killed = std::time::Instant::now();
    drop(second);
    until(|| third.is_healthy());
    assert!(killed.elapsed() > std::time::Duration::from_millis(900), "{:?}", killed.elapsed());
    assert_eq!((third.put("/a", 5, "late").status, third.put("/a", 7, "seven").status), (412, 200));
    assert_eq!(service.written(), ["five", "six", "seven"]);
}
