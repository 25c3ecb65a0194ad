//! Clients that mean harm, or are broken in a way that does it: each has a way around the check, or keeps others out.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use super::common::*;
use super::tools::*;

/// Sends a request by hand, on a connection of its own; the status and the body of the answer.
fn send(gate: &Gate, head: &str) -> (u16, String) {
    let mut wire = Wire::to(gate.addr);
    wire.say(&format!("{head}Connection: close\r\n\r\n"));
    let mut answer = String::new();
    wire.0.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap_or_default().parse().unwrap_or(0);
    (status, answer)
}

#[test]
fn however_a_path_is_written_its_mark_is_one() {
    let (place, service) = (Place::new("gate_paths"), Service::start());
    let gate = Gate::start(&place, &service.url(), "");
    assert_eq!(gate.put("/a", 7, "seven").status, 200);
    for path in ["/a", "//a", "/./a", "/%61", "/a/", "/a;x=1"] {
        let head = format!("PUT {path} HTTP/1.1\r\nHost: h\r\nLock-Fence: 6\r\nContent-Length: 0\r\n");
        let (status, answer) = send(&gate, &head);
        assert_eq!(status, 412, "{path} bypassed the mark of /a: {answer}");
    }
    assert_eq!(service.written(), ["seven"]);
}

#[test]
fn what_the_service_could_read_in_another_way_is_refused() {
    let (place, service) = (Place::new("gate_ambiguous"), Service::start());
    let gate = Gate::start(&place, &service.url(), "--resource header:X-Account");
    for lines in [
        "",
        "Host: h\r\nHost: h\r\n",
        "Host: h\r\nConnection: host\r\n",
        "Host: h\r\nConnection: lock-fence\r\n",
        "Host: h\r\nConnection: X-Account\r\n",
    ] {
        let head =
            format!("PUT /a HTTP/1.1\r\n{lines}X-Account: 1\r\nLock-Fence: 6\r\nContent-Length: 0\r\n");
        let (status, answer) = send(&gate, &head);
        assert!(status == 400 && answer.contains("ambiguous"), "{lines:?} was passed on: {answer}");
    }
    // One service resolves the dots, and another one does not: one of the two would write what another mark is kept of.
    let gate = Gate::start(&place, &service.url(), "--space dots --resource first-segments:2");
    for path in ["/orders/42/../43", "/orders/42/%2e%2E/43", "/orders/42%2f..%5c43"] {
        let head = format!("PUT {path} HTTP/1.1\r\nHost: h\r\nLock-Fence: 6\r\nContent-Length: 0\r\n");
        let (status, answer) = send(&gate, &head);
        assert!(status == 400 && answer.contains("ambiguous"), "{path} was passed on: {answer}");
    }
    // A GET that is to be taken for a DELETE may change something.
    for name in ["X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"] {
        let told = curl(&["-H", &format!("{name}: DELETE"), &gate.url("/a")]);
        assert_eq!((told.status, told.problem().as_str()), (428, "missing"), "{name}");
    }
    assert_eq!(service.begun(), 0);
    assert_eq!(curl(&[&gate.url("/a")]).status, 200);
}

/// A body of which a byte comes now and then kept every newer fence out.
#[test]
fn a_body_that_trickles_does_not_keep_newer_fences_out() {
    let (place, service) = (Place::new("gate_trickle"), Service::start());
    let gate = Gate::start(&place, &service.url(), "--wait 8s");
    let mut slow = Wire::to(gate.addr);
    slow.say("PUT /a HTTP/1.1\r\nHost: h\r\nLock-Fence: 5\r\nContent-Length: 100000\r\n\r\n");
    service.until_begun(1);
    let mut out = slow.0.try_clone().unwrap();
    // Until the gate hangs up.
    let trickle = std::thread::spawn(move || {
        while out.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let newer = gate.put("/a", 6, "six");
    assert_eq!(newer.status, 200, "a body that trickles kept a newer fence out: {newer:?}");
    assert!(slow.hear("\r\n\r\n").contains("504"), "the outcome is unknown");
    drop(slow);
    trickle.join().unwrap();
    assert_eq!(service.written(), ["six"]);
}

/// A client that sends faster than the service reads kept newer fences out for as long as that took: hyper does not ask the body while
/// it waits for the service.
#[test]
fn an_upload_to_a_slow_service_does_not_keep_newer_fences_out() {
    for http in ["--http1.1", "--http2-prior-knowledge"] {
        let (place, service) = (Place::new(&format!("gate_slow{http}")), SlowService::start());
        let gate = Gate::start(&place, &format!("http://{}", service.addr), "--wait 8s");
        // At 160 KB/s it takes minutes.
        let big = place.dir.join("big");
        std::fs::File::create(&big).unwrap().set_len(64 << 20).unwrap();
        let url = gate.url("/a");
        let put = |fence: &str, more: &[&str]| {
            let (lock, copy) = (format!("Lock-Fence: {fence}"), format!("X-Fence: {fence}"));
            begin(&[&[http, "-X", "PUT", "-H", &lock, "-H", &copy], more, &[&url]].concat())
        };
        let mut upload = put("5", &["-T", big.to_str().unwrap()]);
        until(|| service.read.load(std::sync::atomic::Ordering::Relaxed) > 128 << 10);
        let newer = finish(put("6", &["-d", "six"]));
        assert_eq!(newer.status, 200, "{http}: an upload kept a newer fence out: {newer:?}");
        assert_eq!(*service.whole.lock().unwrap(), ["6"], "{http}");
        // And the gate has let go of the client, too.
        until(|| upload.try_wait().unwrap().is_some());
    }
}

/// A client that read a little now and then kept newer fences out for as long as its response was long: it was never silent.
#[test]
fn a_response_that_is_read_slowly_does_not_keep_newer_fences_out() {
    let (place, service) = (Place::new("gate_slow_reader"), Service::start());
    for http in ["--http1.1", "--http2-prior-knowledge"] {
        for method in ["PUT", "GET"] {
            let options = format!("--idle 2s --wait 8s --space {}{method}", &http[2..7].replace('.', "-"));
            let gate = Gate::start(&place, &service.url(), &options);
            let (url, body) = (gate.url("/big"), place.dir.join("body"));
            // 64 MiB at 50 KB/s take twenty minutes.
            let mut slow = begin(&[
                http,
                "-X",
                method,
                "-H",
                "Lock-Fence: 5",
                "-d",
                "five",
                "--limit-rate",
                "50k",
                "-o",
                body.to_str().unwrap(),
                &url,
            ]);
            until(|| std::fs::metadata(&body).is_ok_and(|body| body.len() > 0));
            // The same resource, and a short response.
            let newer = gate.put("/big/", 6, "six");
            assert_eq!(newer.status, 200, "{http} {method}: a slow reader kept a newer fence out: {newer:?}");
            slow.kill().unwrap();
            slow.wait().unwrap();
        }
    }
}

/// Late clients that ask again and again were counted as under way each time, and the holder waited for them.
#[test]
fn late_clients_in_a_loop_do_not_keep_the_holder_out() {
    let (place, service) = (Place::new("gate_late"), Service::start());
    for options in ["--space alone", "--space shared --shared"] {
        let gate = Gate::start(&place, &service.url(), &format!("{options} --wait 5s"));
        assert_eq!(gate.put("/a", 6, "six").status, 200);
        let (addr, end) = (gate.addr, std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false)));
        let late: Vec<_> = (0..16)
            .map(|_| {
                let end = end.clone();
                std::thread::spawn(move || {
                    let mut wire = Wire::to(addr);
                    while !end.load(std::sync::atomic::Ordering::Relaxed) {
                        wire.say("PUT /a HTTP/1.1\r\nHost: h\r\nLock-Fence: 5\r\nContent-Length: 0\r\n\r\n");
                        assert!(wire.hear("}").contains("412"));
                    }
                })
            })
            .collect();
        for fence in 7..12 {
            let holder = gate.put("/a", fence, "holder");
            assert_eq!(holder.status, 200, "{options}: late clients kept the holder out: {holder:?}");
        }
        end.store(true, std::sync::atomic::Ordering::Relaxed);
        late.into_iter().for_each(|client| client.join().unwrap());
    }
}

#[test]
fn a_head_that_trickles_is_cut_off() {
    let (place, service) = (Place::new("gate_head"), Service::start());
    let gate = Gate::start(&place, &service.url(), "--idle 1s");
    // At once, and after a request on the same connection.
    for requests in 0..2 {
        let mut wire = Wire::to(gate.addr);
        for _ in 0..requests {
            wire.say("GET /a HTTP/1.1\r\nHost: h\r\n\r\n");
            wire.hear("}");
        }
        let began = Instant::now();
        wire.say("GET /a HTTP/1.1\r\nHost: h\r\n");
        while wire.0.write_all(b"X-A: b\r\n").is_ok() {
            assert!(began.elapsed() < LONG, "a head that never ends is never cut off");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The upstream took 6, 7, 6: a gate that is alone remembers marks, and one that is not raised them behind its back.
#[test]
fn a_gate_that_is_alone_and_shared_ones_do_not_serve_together() {
    let (place, service) = (Place::new("gate_mix"), Service::start());
    let shared = Gate::start(&place, &service.url(), "--shared");
    let other = Gate::start(&place, &service.url(), "--shared");
    assert_eq!(shared.put("/a", 6, "six").status, 200);
    let alone = Gate::start_next(&place, &service.url(), "--ttl 60s --lock-delay 0s");
    assert_eq!(alone.put("/a", 6, "alone").status, 503, "a gate that is alone serves beside shared ones");
    assert!(!alone.is_healthy());
    assert_eq!(other.put("/a", 7, "seven").status, 200);
    assert_eq!(alone.put("/a", 6, "late").status, 503);
    drop((shared, other));
    until(|| alone.is_healthy());
    assert_eq!(alone.put("/a", 6, "late").status, 412);
    // And the other way round.
    let shared = Gate::start_next(&place, &service.url(), "--shared");
    assert_eq!(shared.put("/a", 8, "beside").status, 503, "a shared gate serves beside one that is alone");
    assert_eq!(alone.put("/a", 8, "eight").status, 200);
    assert_eq!(service.written(), ["six", "seven", "eight"]);
}
