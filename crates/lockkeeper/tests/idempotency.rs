//! `Idempotency-Key` over real HTTP: servers that are processes of their own and may be killed, and curl as the client.
#![cfg(all(feature = "tower", feature = "sqlite", feature = "redis"))]

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::response::IntoResponse;
use axum::routing::any;
use axum::{Extension, Router};
use lockkeeper::idempotency::IdempotencyLayer;
use lockkeeper::{Fence, Lockkeeper};
use lockkeeper_testkit::servers::{self, RedisOptions, TempDir, require};
use lockkeeper_testkit::stop;
use rustix::process::{Pid, Signal, kill_process};

// The server.

/// Leaves a line for every time that something is done.
fn effect(dir: &Path, path: &str, fence: Option<Fence>) -> String {
    let line = format!("{path} {} {}\n", fence.map_or(0, Fence::get), std::process::id());
    let file = std::fs::File::options().create(true).append(true).open(dir.join("effects"));
    file.and_then(|mut file| file.write_all(line.as_bytes())).unwrap();
    format!("{}-{}", std::process::id(), fence.map_or(0, Fence::get))
}

/// What it does is in the path.
async fn handle(dir: PathBuf, fence: Option<Extension<Fence>>, request: Request) -> axum::response::Response {
    let (path, method) = (request.uri().path().to_owned(), request.method().clone());
    let body = axum::body::to_bytes(request.into_body(), 10 << 20).await.unwrap();
    let receipt = effect(&dir, &path, fence.map(|Extension(fence)| fence));
    match path.rsplit('/').next().unwrap() {
        "slow" => {
            while !dir.join("go").exists() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        "fail" => return (StatusCode::INTERNAL_SERVER_ERROR, [("x-receipt", receipt)], "no").into_response(),
        "later" => {
            return (StatusCode::SERVICE_UNAVAILABLE, [("x-receipt", receipt)], "not now").into_response();
        }
        "large" => return vec![b'x'; (1 << 20) + 1].into_response(),
        "large-later" => {
            return (StatusCode::SERVICE_UNAVAILABLE, vec![b'x'; (1 << 20) + 1]).into_response();
        }
        "breaks" | "breaks-later" => {
            let chunks = [Ok("paid"), Err(std::io::Error::other("on demand"))];
            let body = axum::body::Body::from_stream(futures_util::stream::iter(chunks));
            let status = if path.ends_with("later") { 503 } else { 200 };
            return (StatusCode::from_u16(status).unwrap(), body).into_response();
        }
        "panic" => panic!("on demand"),
        _ => {}
    }
    let body = [b"paid \0\xff\n".as_slice(), method.as_str().as_bytes(), &body].concat();
    (StatusCode::CREATED, [("x-receipt", receipt.as_str()), ("set-cookie", "a=1")], body).into_response()
}

async fn serve(store: &str, dir: PathBuf, ttl: Duration) {
    let keeper = Lockkeeper::open(store).await.unwrap();
    let layer = IdempotencyLayer::new(&keeper, |request| {
        match request.headers.get("x-customer").map(|name| name.as_bytes()) {
            // A service whose credentials are checked further inside than the keys.
            Some(b"none") => None,
            Some(b"empty") => Some(String::new()),
            name => Some(format!("{name:?}")),
        }
    });
    let layer = layer.ttl(ttl);
    let handler =
        any(move |fence: Option<Extension<Fence>>, request: Request| handle(dir.clone(), fence, request));
    let usual = Router::new().route("/{what}", handler.clone()).layer(layer.clone());
    let strict = Router::new()
        .route("/strict/{what}", handler.clone())
        .layer(layer.clone().required().body_limit(1000));
    let again = layer.forget(|status| status.is_server_error()).methods([Method::PUT]);
    let again = Router::new().route("/again/{what}", handler.clone()).layer(again);
    let app = usual.merge(strict).merge(again);
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    // A line of its own, whatever the test harness has printed before.
    println!("\nport {}", listener.local_addr().unwrap().port());
    axum::serve(listener, app).await.unwrap();
}

/// Not a test: what the tests below start as a process of its own.
#[test]
#[ignore = "the server of the other tests"]
fn server() {
    let Ok(store) = std::env::var("IDEMPOTENCY_STORE") else { return };
    let dir = PathBuf::from(std::env::var("IDEMPOTENCY_DIR").unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let ttl = std::env::var("IDEMPOTENCY_TTL_SECS").unwrap().parse().unwrap();
    runtime.block_on(serve(&store, dir, Duration::from_secs(ttl)));
}

/// The lease of servers whose end by time-out is waited for.
const LEASE_SECS: u32 = 5;

/// A server that runs, and is killed at the end.
struct Running {
    child: Child,
    port: u16,
}

impl Running {
    /// With a lease that a slow machine does not miss: a lost one ends the work, which is then done twice.
    fn start(store: &str, dir: &TempDir) -> Running {
        Running::with_ttl(store, dir, 60)
    }

    fn with_ttl(store: &str, dir: &TempDir, secs: u32) -> Running {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["server", "--exact", "--ignored", "--nocapture"])
            .env("IDEMPOTENCY_STORE", store)
            .env("IDEMPOTENCY_DIR", dir.path())
            .env("IDEMPOTENCY_TTL_SECS", secs.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let port = lines.map_while(Result::ok).find_map(|line| line.strip_prefix("port ")?.parse().ok());
        Running { child, port: port.expect("it says where it listens") }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), signal).unwrap();
    }

    fn kill9(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// A request that is on its way.
    fn send(&self, path: &str, body: &[u8], options: &[&str]) -> Child {
        let mut curl = Command::new("curl")
            .args(["-sS", "-i", "-m", "60", "-X", "POST", "-H", "Expect:", "--data-binary", "@-"])
            .args(options)
            .arg(format!("http://127.0.0.1:{}{path}", self.port))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A server that has heard enough may hang up.
        let _ = curl.stdin.take().unwrap().write_all(body);
        curl
    }

    /// A request with a key, and its answer.
    fn post(&self, path: &str, key: &str, body: &str) -> Answer {
        answer(self.send(path, body.as_bytes(), &["-H", &format!("Idempotency-Key: {key}")]))
    }

    fn request(&self, path: &str, body: &str, options: &[&str]) -> Answer {
        answer(self.send(path, body.as_bytes(), options))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill9();
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Answer {
    status: u16,
    head: Vec<String>,
    body: Vec<u8>,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.head.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    fn replayed(&self) -> bool {
        self.header("idempotent-replayed") == Some("true")
    }

    /// The last word of the type of a problem.
    fn problem(&self) -> String {
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        let body: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        assert_eq!(body["status"], self.status);
        body["type"].as_str().unwrap().rsplit(':').next().unwrap().to_owned()
    }

    /// Status, body and the headers that count.
    fn gist(&self) -> (u16, &[u8], Vec<&str>) {
        let passing = ["HTTP/", "date: ", "idempotent-replayed: "];
        let counts = |line: &&str| !passing.iter().any(|name| line.starts_with(name));
        (self.status, &self.body, self.head.iter().map(String::as_str).filter(counts).collect())
    }
}

fn answer(curl: Child) -> Answer {
    let said = curl.wait_with_output().unwrap();
    assert!(!said.stdout.is_empty(), "no answer: {}", String::from_utf8_lossy(&said.stderr));
    let end = said.stdout.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    let head: Vec<String> = String::from_utf8_lossy(&said.stdout[..end]).lines().map(str::to_owned).collect();
    let status = head[0].split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head, body: said.stdout[end + 4..].to_vec() }
}

/// The lines of what was done.
fn effects(dir: &TempDir) -> Vec<String> {
    std::fs::read_to_string(dir.join("effects")).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn wait_for_effects(dir: &TempDir, count: usize) {
    while effects(dir).len() < count {
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn let_go(dir: &TempDir) {
    std::fs::write(dir.join("go"), "").unwrap();
}

/// One server on a file, or nothing if the tests are to run without curl.
fn one() -> Option<(TempDir, Running)> {
    require("curl", "curl", "curl").ok()?;
    let dir = TempDir::new("idempotency");
    let server = Running::start(&format!("sqlite:{}", dir.join("locks.db").display()), &dir);
    Some((dir, server))
}

// The tests.

#[test]
fn a_request_that_is_sent_again_gets_the_same_answer_and_is_done_once() {
    let Some((dir, server)) = one() else { return };
    let first = server.post("/charge", "k1", "10");
    assert_eq!((first.status, first.replayed()), (201, false));
    assert_eq!(first.body, b"paid \0\xff\nPOST10");
    // Bare or in quotes, it is the same key.
    for key in ["k1", "\"k1\"", "\"k1\";a=b"] {
        let again = server.post("/charge", key, "10");
        assert!(again.replayed(), "{again:?}");
        assert_eq!(again.gist(), first.gist());
    }
    assert!(first.header("x-receipt").is_some() && first.header("set-cookie") == Some("a=1"));
    assert_eq!(effects(&dir).len(), 1);
    // Another key, another customer, another method: each is a thing of its own.
    assert_eq!(server.post("/charge", "k2", "10").status, 201);
    let other = ["-H", "Idempotency-Key: k1", "-H", "X-Customer: other"];
    assert!(!server.request("/charge", "99", &other).replayed());
    assert!(server.request("/charge", "99", &other).replayed());
    assert_eq!(effects(&dir).len(), 3);
    // Keys do not count for these, and what has none is done each time.
    for _ in 0..2 {
        assert!(!server.request("/charge", "10", &["-X", "PUT", "-H", "Idempotency-Key: k1"]).replayed());
        assert!(!server.request("/charge", "10", &[]).replayed());
    }
    assert_eq!(effects(&dir).len(), 7);
    let fences: HashSet<String> =
        effects(&dir).iter().map(|line| line.split(' ').nth(1).unwrap().to_owned()).collect();
    assert_eq!(fences.len(), 4, "each run has a fence of its own, and what has no key has none: {fences:?}");
}

#[test]
fn another_request_under_the_key_is_refused_while_it_runs_and_after() {
    let Some((dir, server)) = one() else { return };
    let key = ["-H", "Idempotency-Key: k"];
    let first = server.send("/slow", b"10", &key);
    wait_for_effects(&dir, 1);
    let refused = |path: &str, body: &str, method: &str| {
        let answer = server.request(path, body, &[&key[..], &["-X", method]].concat());
        assert_eq!((answer.status, answer.problem().as_str()), (422, "key-reused"), "{method} {path} {body}");
    };
    let all_refused = || {
        refused("/slow", "11", "POST");
        refused("/slow?a=1", "10", "POST");
        refused("/charge", "10", "POST");
        refused("/slow", "10", "PATCH");
    };
    all_refused();
    let_go(&dir);
    assert_eq!(answer(first).status, 201);
    all_refused();
    assert_eq!(effects(&dir).len(), 1);
}

#[test]
fn a_running_request_answers_409_and_outlives_its_client() {
    let Some((dir, server)) = one() else { return };
    let mut first = server.send("/slow", b"10", &["-H", "Idempotency-Key: k"]);
    wait_for_effects(&dir, 1);
    let running = server.post("/slow", "k", "10");
    assert_eq!((running.status, running.problem().as_str()), (409, "running"));
    assert_eq!(running.header("retry-after"), Some("1"));
    first.kill().unwrap();
    first.wait().unwrap();
    let_go(&dir);
    let done = loop {
        let answer = server.post("/slow", "k", "10");
        if answer.status != 409 {
            break answer;
        }
    };
    assert!(done.status == 201 && done.replayed(), "{done:?}");
    assert_eq!(effects(&dir).len(), 1, "what had begun went on");
}

#[test]
fn bad_requests_are_refused_and_leave_no_record() {
    let Some((dir, server)) = one() else { return };
    let missing = server.request("/strict/charge", "10", &[]);
    assert_eq!((missing.status, missing.problem().as_str()), (400, "key-missing"));
    let long = "x".repeat(256);
    for key in ["a b", "\"a", "\"a\" b", long.as_str()] {
        let malformed = server.post("/charge", key, "10");
        assert_eq!((malformed.status, malformed.problem().as_str()), (400, "key-malformed"), "{key}");
    }
    let twice = server.request("/charge", "10", &["-H", "Idempotency-Key: a", "-H", "Idempotency-Key: b"]);
    assert_eq!((twice.status, twice.problem().as_str()), (400, "key-malformed"));
    let empty = server.request("/charge", "10", &["-H", "Idempotency-Key;"]);
    assert_eq!((empty.status, empty.problem().as_str()), (400, "key-malformed"));
    // Told by its length, and found out on the way.
    for how in
        [&["-H", "Idempotency-Key: k"][..], &["-H", "Idempotency-Key: k", "-H", "Transfer-Encoding: chunked"]]
    {
        let large = server.request("/strict/charge", &"x".repeat(1001), how);
        assert_eq!((large.status, large.problem().as_str()), (413, "body-too-large"));
    }
    assert!(effects(&dir).is_empty());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let left = runtime.block_on(async {
        let keeper = Lockkeeper::open(&format!("sqlite:{}", dir.join("locks.db").display())).await.unwrap();
        keeper.registers("", &lockkeeper::Page::FIRST).await.unwrap().0
    });
    assert!(left.is_empty(), "{left:?}");
    // The largest one is fine.
    assert_eq!(server.post("/strict/charge", "k", &"x".repeat(1000)).status, 201);
}

#[test]
fn failures_are_kept_or_forgotten_by_choice() {
    let Some((dir, server)) = one() else { return };
    // A 500 says nothing about how far it came: it is kept.
    let failed = server.post("/fail", "k", "");
    assert_eq!((failed.status, failed.body.as_slice()), (500, &b"no"[..]));
    let again = server.post("/fail", "k", "");
    assert!(again.replayed());
    assert_eq!((again.gist(), effects(&dir).len()), (failed.gist(), 1));
    // A 503 says that nothing was done.
    for count in [2, 3] {
        let later = server.post("/later", "l", "");
        assert_eq!((later.status, later.replayed(), effects(&dir).len()), (503, false, count));
    }
    // By choice everything above 500 is done again.
    for count in [4, 5] {
        let failed = server.request("/again/fail", "", &["-X", "PUT", "-H", "Idempotency-Key: again"]);
        assert_eq!((failed.status, failed.replayed(), effects(&dir).len()), (500, false, count));
    }
    // What was done and cannot be told is not done again, even then.
    for replayed in [false, true] {
        let large = server.request("/again/large", "", &["-X", "PUT", "-H", "Idempotency-Key: large"]);
        assert_eq!((large.status, large.problem().as_str()), (500, "answer-too-large"));
        assert_eq!((large.replayed(), effects(&dir).len()), (replayed, 6));
    }
    // A panic is no answer: the connection ends, and the next one runs.
    for count in [7, 8] {
        let request =
            || server.send("/panic", b"", &["-H", "Idempotency-Key: p"]).wait_with_output().unwrap().stdout;
        // What was dropped is given back in the background; until then it counts as running.
        let mut said = request();
        while !said.is_empty() {
            assert!(said.starts_with(b"HTTP/1.1 409"), "{}", String::from_utf8_lossy(&said));
            said = request();
        }
        assert_eq!(effects(&dir).len(), count);
    }
}

/// Asks until nothing is under way any more.
fn when_it_is_over(server: &Running, path: &str) -> Answer {
    loop {
        let answer = server.post(path, "k", "10");
        if answer.status != 409 {
            return answer;
        }
        assert_eq!(answer.problem(), "running");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Kills a server in the middle of a request; the other one takes over, and has a newer fence.
fn killed_in_the_middle(store: &str, dir: &TempDir, ttl_secs: u32) {
    let start = || Running::with_ttl(store, dir, ttl_secs);
    let (mut a, b) = (start(), start());
    let cut = a.send("/slow", b"10", &["-H", "Idempotency-Key: k"]);
    wait_for_effects(dir, 1);
    a.kill9();
    assert!(cut.wait_with_output().unwrap().stdout.is_empty(), "the first caller gets no answer");
    let_go(dir);
    let done = when_it_is_over(&b, "/slow");
    assert_eq!((done.status, done.replayed()), (201, false), "{done:?}");
    let fences: Vec<u64> =
        effects(dir).iter().map(|line| line.split(' ').nth(1).unwrap().parse().unwrap()).collect();
    assert!(fences.len() == 2 && fences[0] < fences[1], "{fences:?}");
    // The one that was killed comes back, and knows what became of it.
    let a = start();
    let again = a.post("/slow", "k", "10");
    assert!(again.replayed());
    assert_eq!((again.gist(), effects(dir).len()), (done.gist(), 2));
}

#[test]
fn a_server_that_is_killed_in_the_middle_is_taken_over_on_a_file() {
    if require("curl", "curl", "curl").is_err() {
        return;
    }
    let dir = TempDir::new("idempotency");
    killed_in_the_middle(&format!("sqlite:{}", dir.join("locks.db").display()), &dir, 60);
}

#[test]
fn a_server_that_is_killed_in_the_middle_is_taken_over_after_its_lease_on_redis() {
    let (Ok(_), Ok(redis)) = (require("curl", "curl", "curl"), servers::redis(RedisOptions::default()))
    else {
        return;
    };
    let dir = TempDir::new("idempotency");
    killed_in_the_middle(&format!("redis://{}", redis.addr()), &dir, LEASE_SECS);
}

#[test]
fn a_server_that_was_stopped_past_its_lease_answers_what_its_successor_did() {
    // Not on SQLite: a process that is stopped in the middle of a transaction blocks all others there.
    let (Ok(_), Ok(redis)) = (require("curl", "curl", "curl"), servers::redis(RedisOptions::default()))
    else {
        return;
    };
    let (dir, store) = (TempDir::new("idempotency"), format!("redis://{}", redis.addr()));
    let start = || Running::with_ttl(&store, &dir, LEASE_SECS);
    let (a, b) = (start(), start());
    let late = a.send("/slow", b"10", &["-H", "Idempotency-Key: k"]);
    wait_for_effects(&dir, 1);
    stop::stop(a.child.id());
    let_go(&dir);
    let done = when_it_is_over(&b, "/slow");
    assert_eq!((done.status, done.replayed()), (201, false));
    a.signal(Signal::CONT);
    let late = answer(late);
    assert!(late.replayed(), "{late:?}");
    assert_eq!(late.gist(), done.gist(), "its own answer does not count any more");
    assert_eq!(effects(&dir).len(), 2);
}

#[test]
fn without_the_store_nothing_is_done() {
    let (Ok(_), Ok(mut redis)) = (require("curl", "curl", "curl"), servers::redis(RedisOptions::default()))
    else {
        return;
    };
    let dir = TempDir::new("idempotency");
    let server = Running::start(&format!("redis://{}", redis.addr()), &dir);
    assert_eq!(server.post("/charge", "k", "10").status, 201);
    redis.kill9();
    let refused = server.post("/charge", "l", "10");
    assert_eq!((refused.status, refused.problem().as_str()), (503, "unavailable"));
    assert_eq!(effects(&dir).len(), 1);
    // What needs no key goes on.
    assert_eq!(server.request("/charge", "10", &[]).status, 201);
    redis.restart();
    let back = loop {
        let answer = server.post("/charge", "l", "10");
        if answer.status != 503 {
            break answer;
        }
    };
    assert_eq!((back.status, effects(&dir).len()), (201, 3));
}

/// One key, three charges: an answer that broke off was forgotten, because we said 504 for it ourselves.
#[test]
fn a_response_that_broke_off_is_stored_by_the_status_of_the_service() {
    let Some((dir, server)) = one() else { return };
    for (path, status, kind) in [("/breaks", 500, "answer-broken-off"), ("/large", 500, "answer-too-large")] {
        for _ in 0..3 {
            let told = server.post(path, path, "10");
            assert_eq!((told.status, told.problem()), (status, kind.to_owned()));
        }
        assert_eq!(
            effects(&dir).iter().filter(|line| line.starts_with(path)).count(),
            1,
            "it was done again"
        );
    }
    // The service says that nothing came of it: the next request under the key runs.
    for path in ["/breaks-later", "/large-later"] {
        for runs in 1..=2 {
            assert_eq!(server.post(path, path, "10").status, 503);
            let all = effects(&dir);
            let done = all.iter().filter(|line| line.starts_with(path)).count();
            assert_eq!(done, runs, "a 503 was kept: {all:?}");
        }
    }
}

/// A layer on the wrong side of the one that checks credentials would mix up the answers of all customers.
#[test]
fn a_request_without_a_tenant_is_refused_and_not_done() {
    let Some((dir, server)) = one() else { return };
    for customer in ["x-customer: none", "x-customer: none", "x-customer: empty"] {
        let told = server.request("/pay", "10", &["-H", "idempotency-key: k", "-H", customer]);
        assert_eq!((told.status, told.problem().as_str()), (500, "no-scope"));
    }
    assert_eq!(effects(&dir).len(), 0);
}
