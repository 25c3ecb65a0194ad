//! What is passed on, and what is refused.

use rustix::process::Signal;

use super::common::*;
use super::tools::*;

#[test]
fn a_stale_fence_is_refused_and_stays_refused_after_kill_9() {
    let (place, service) = (Place::new("gate_stale"), Service::start());
    let gate = Gate::start(&place, &service.url(), "--correctness --lock-delay 0s");
    assert_eq!(gate.put("/a", 5, "five").status, 200);
    assert_eq!(gate.put("/a", 6, "six").status, 200);
    let stale = gate.put("/a", 5, "late");
    assert_eq!((stale.status, stale.problem().as_str()), (412, "stale"));
    assert_eq!((&stale.json()["presented"], &stale.json()["seen"]), (&5.into(), &6.into()));
    assert_eq!(gate.put("/b", 5, "another resource").status, 200);
    drop(gate);
    let gate = Gate::start(&place, &service.url(), "");
    assert_eq!(gate.put("/a", 5, "late").status, 412);
    assert_eq!(gate.put("/a", 6, "again").status, 200, "the same holder may repeat itself");
    let other = Gate::start(&place, &service.url(), "--space other");
    assert_eq!(other.put("/a", 5, "another space").status, 200);
    assert_eq!(service.written(), ["five", "six", "another resource", "again", "another space"]);
}

/// The page said that it is enough to take it out of the store.
#[test]
fn a_mark_that_was_taken_away_is_forgotten_by_the_next_gate_and_by_shared_ones_at_once() {
    let (place, service) = (Place::new("gate_forget"), Service::start());
    for (options, at_once) in [("--space alone", 412), ("--space shared --shared", 200)] {
        let gate = Gate::start(&place, &service.url(), options);
        assert_eq!((gate.put("/a", 9, "far too high").status, gate.put("/a", 5, "five").status), (200, 412));
        let space = options.split(' ').nth(1).unwrap();
        assert!(place.run(&format!("record rm fence/{space}=/a")).status.success());
        assert_eq!(gate.put("/a", 5, "five").status, at_once, "{options}");
        gate.signal(Signal::TERM);
        assert_eq!(gate.end().0, 0);
        let gate = Gate::start(&place, &service.url(), options);
        assert_eq!(gate.put("/a", 5, "again").status, 200, "{options}");
    }
}

#[test]
fn fences_are_demanded_as_told_and_resources_are_what_was_said() {
    let (place, service) = (Place::new("gate_rules"), Service::start());
    let gate = Gate::start(&place, &service.url(), "--resource first-segments:1");
    let missing = curl(&["-X", "POST", "-d", "x", &gate.url("/a")]);
    assert_eq!((missing.status, missing.problem().as_str()), (428, "missing"));
    assert_eq!(curl(&[&gate.url("/a")]).status, 200, "reading needs none");
    let bad = curl(&["-X", "POST", "-H", "Lock-Fence: many", "-d", "x", &gate.url("/a")]);
    assert_eq!((bad.status, bad.problem().as_str()), (400, "malformed"));
    assert_eq!(gate.put("/orders/1", 6, "one").status, 200);
    assert_eq!(gate.put("/orders/2", 5, "late").status, 412, "all orders are one resource");
    assert_eq!(gate.put("/bills/2", 5, "bill").status, 200);
    let all = Gate::start(
        &place,
        &service.url(),
        "--require-fence all --resource header:X-Account --space accounts",
    );
    assert_eq!(curl(&[&all.url("/a")]).status, 428);
    let nameless = all.put("/a", 5, "whose?");
    assert_eq!((nameless.status, nameless.problem().as_str()), (400, "no-resource"));
    let named = ["-X", "PUT", "-H", "X-Account: 7", "-H"];
    let put = |fence: &str, path: &str| {
        curl(&[&named[..], &[fence, "-d", "account", &all.url(path)]].concat()).status
    };
    assert_eq!((put("Lock-Fence: 6", "/a"), put("Lock-Fence: 5", "/b")), (200, 412));
    let none = Gate::start(&place, &service.url(), "--require-fence none --space none");
    assert_eq!(curl(&["-X", "POST", "-d", "no fence", &none.url("/a")]).status, 200);
    assert_eq!(service.written(), ["one", "bill", "account", "no fence"]);
}

#[test]
fn the_service_sees_the_request_as_it_was_and_who_sent_it() {
    let (place, service) = (Place::new("gate_headers"), Service::start());
    let gate = Gate::start(&place, &format!("{}/base/", service.url()), "");
    let more = [
        "-H",
        "Connection: X-Private",
        "-H",
        "X-Private: 1",
        "-H",
        "X-Forwarded-For: 10.1.1.1",
        "-H",
        "TE: x",
    ];
    let options =
        [&["-X", "PATCH", "-H", "Lock-Fence: 5", "-H", "Host: shop.example"][..], &more, &["-d", "x"]]
            .concat();
    for protocol in [&["--http1.1"][..], &["--http2-prior-knowledge"]] {
        let url = gate.url("/orders/42?a=b%20c");
        let options: Vec<&str> = match protocol {
            ["--http1.1"] => [protocol, &options[..], &[&url]].concat(),
            // HTTP/2 has no such headers.
            _ => [protocol, &options[..6], &["-H", "X-Forwarded-For: 10.1.1.1", "-d", "x", &url]].concat(),
        };
        let answer = curl(&options);
        assert_eq!(answer.status, 200, "{answer:?}");
        assert!(answer.head.contains("x-kept: 1") && !answer.head.contains("x-hop"), "{}", answer.head);
        let seen = answer.json();
        assert_eq!((&seen["method"], &seen["uri"]), (&"PATCH".into(), &"/base/orders/42?a=b%20c".into()));
        let header = |name: &str| {
            let all = seen["headers"].as_array().unwrap().iter().filter(|pair| pair[0] == name);
            all.map(|pair| pair[1].as_str().unwrap().to_owned()).collect::<Vec<_>>().join(" | ")
        };
        assert_eq!(header("host"), "shop.example");
        assert_eq!(header("lock-fence"), "5");
        assert_eq!(header("x-forwarded-for"), "10.1.1.1, 127.0.0.1");
        assert_eq!(
            (header("x-forwarded-host"), header("x-forwarded-proto")),
            ("shop.example".into(), "http".into())
        );
        assert_eq!(
            (header("x-private"), header("te"), header("connection")),
            ("".into(), "".into(), "".into())
        );
    }
    // It is a proxy for one service, not for the world.
    let none = Gate::start(&place, &service.url(), "--require-fence none --space none");
    assert_eq!(curl(&["-X", "CONNECT", "--request-target", "a:1", &none.url("/")]).status, 405);
}

#[test]
fn bodies_are_streamed_both_ways_and_not_kept() {
    let (place, service) = (Place::new("gate_stream"), Service::start());
    let gate = Gate::start(&place, &service.url(), "");
    let mut wire = Wire::to(gate.addr);
    wire.say("POST /echo HTTP/1.1\r\nHost: a\r\nLock-Fence: 5\r\nTransfer-Encoding: chunked\r\n\r\n");
    // Each part comes back before the next one is sent.
    for part in ["alpha", "gamma", "omega"] {
        wire.say(&format!("5\r\n{part}\r\n"));
        wire.hear(part);
    }
    wire.say("0\r\n\r\n");
    wire.hear("0\r\n\r\n");
    // Much more than any buffer, over the same connection.
    let big = place.dir.join("big");
    std::fs::write(&big, vec![b'x'; 30 << 20]).unwrap();
    let data = format!("@{}", big.display());
    let back = place.dir.join("back");
    let (url, back_path) = (gate.url("/echo"), back.display().to_string());
    let sent = ["-X", "PUT", "-H", "Lock-Fence: 5", "--data-binary", &data, "-o", &back_path, &url];
    assert!(begin(&sent).wait().unwrap().success());
    assert!(std::fs::read(&back).unwrap().ends_with(&[b'x'; 30 << 20]));
}

/// Its length is not known, and of a method that seldom has a body none was passed on then.
#[test]
fn the_body_of_a_get_is_passed_on_like_any_other() {
    let (place, service) = (Place::new("gate_get_body"), Service::start());
    let gate = Gate::start(&place, &service.url(), "");
    for method in ["GET", "POST"] {
        let mut wire = Wire::to(gate.addr);
        wire.say(&format!(
            "{method} /echo HTTP/1.1\r\nHost: a\r\nLock-Fence: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
        ));
        wire.say("5\r\nalpha\r\n0\r\n\r\n");
        wire.hear("alpha");
        for length in ["Content-Length: 5", "Content-Length:"] {
            let two = curl(&[
                "--http2-prior-knowledge",
                "-X",
                method,
                "-H",
                "Lock-Fence: 5",
                "-H",
                length,
                "-d",
                "gamma",
                &gate.url("/echo"),
            ]);
            assert_eq!((two.status, two.body.as_str()), (200, "gamma"), "{method} {length}");
        }
    }
    let none = curl(&[&gate.url("/")]).json();
    let headers = none["headers"].as_array().unwrap();
    assert!(
        !headers.iter().any(|pair| pair[0] == "transfer-encoding" || pair[0] == "content-length"),
        "{none}"
    );
}

#[test]
fn what_happens_is_counted() {
    let (place, service) = (Place::new("gate_metrics"), Service::start());
    let gate = Gate::start(&place, &service.url(), "");
    gate.put("/a", 5, "x");
    gate.put("/a", 4, "x");
    curl(&["-X", "POST", &gate.url("/a")]);
    curl(&[&gate.url("/a")]);
    for (outcome, count) in [("passed", 1), ("stale", 1), ("missing", 1), ("unfenced", 1), ("unknown", 0)] {
        assert_eq!(gate.metric(&format!("requests_total{{outcome=\"{outcome}\"}}")), count, "{outcome}");
    }
    assert_eq!(gate.metric("request_seconds_count"), 4);
    assert_eq!(gate.metric("requests_in_flight"), 0);
    let slow = begin(&["-X", "PUT", "-H", "Lock-Fence: 5", "-d", "s", &gate.url("/slow")]);
    service.until_begun(3);
    assert_eq!((gate.metric("requests_in_flight"), gate.metric("draining")), (1, 0));
    let admin = gate.admin;
    assert_eq!(curl(&[&format!("http://{admin}/healthz")]).status, 200);
    assert_eq!(curl(&[&format!("http://{admin}/other")]).status, 404);
    assert_eq!(
        curl(&[&gate.url("/metrics")]).json()["uri"],
        "/metrics",
        "the service's own paths are its own"
    );
    service.go();
    assert_eq!(finish(slow).status, 200);
}

#[test]
fn bad_calls_are_told() {
    let place = Place::new("gate_bad");
    let good = ["gate", "--upstream", "http://127.0.0.1:9", "--listen", "127.0.0.1:0"];
    for (more, says, ends) in [
        (&["--resource", "cookie"][..], "known are path", 64),
        (&["--require-fence", "some"], "possible values", 64),
        (&["--space", "a/b"], "cannot name a space", 64),
        (&["--timeout", "5"], "add a unit", 64),
        (&["--store", "memory:", "--correctness"], "not for correctness", 78),
        (&["--admin", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1", 69),
    ] {
        let output = place.lk(good).args(more).output().unwrap();
        assert_eq!(code(output.status), ends, "{more:?}: {}", errors(&output));
        assert!(errors(&output).contains(says), "{more:?}: {}", errors(&output));
    }
    let output = place.lk(["gate", "--upstream", "https://a", "--listen", "127.0.0.1:0"]).output().unwrap();
    assert!(code(output.status) == 64 && errors(&output).contains("only http://"), "{}", errors(&output));
}
