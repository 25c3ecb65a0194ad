//! A gate that runs, a service behind it, and requests.

use std::convert::Infallible;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::common::*;

// The service.

/// A service that cannot be changed: it takes every write.
pub struct Service {
    pub addr: SocketAddr,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// What was written, in order.
    written: Mutex<Vec<String>>,
    /// How many requests have begun.
    begun: Mutex<usize>,
    go: Notify,
}

impl Service {
    pub fn start() -> Service {
        let (tell, told) = channel();
        let state = Arc::<State>::default();
        let its = state.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                loop {
                    let (stream, _) = listener.accept().await.unwrap();
                    let its = its.clone();
                    let answer = service_fn(move |request| answer(its.clone(), request));
                    let server = hyper::server::conn::http1::Builder::new();
                    tokio::spawn(async move { server.serve_connection(TokioIo::new(stream), answer).await });
                }
            });
        });
        Service { addr: told.recv().unwrap(), state }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn written(&self) -> Vec<String> {
        self.state.written.lock().unwrap().clone()
    }

    /// Waits until this many requests have begun.
    pub fn until_begun(&self, count: usize) {
        until(|| *self.state.begun.lock().unwrap() >= count);
    }

    pub fn begun(&self) -> usize {
        *self.state.begun.lock().unwrap()
    }

    /// Lets one slow request go on.
    pub fn go(&self) {
        self.state.go.notify_one();
    }
}

/// What it does is in the path.
async fn answer(
    state: Arc<State>,
    request: Request<Incoming>,
) -> Result<Response<BoxBody<Bytes, hyper::Error>>, Infallible> {
    *state.begun.lock().unwrap() += 1;
    let path = request.uri().path().to_owned();
    if path.ends_with("/echo") {
        return Ok(Response::new(request.into_body().boxed()));
    }
    if path.ends_with("/stream") {
        return Ok(Response::new(streamed(state, request)));
    }
    let headers: Vec<(String, String)> = request
        .headers()
        .iter()
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
        .collect();
    let (method, uri) = (request.method().to_string(), request.uri().to_string());
    let Ok(body) = request.into_body().collect().await else { std::future::pending().await };
    if path.ends_with("/slow") {
        state.go.notified().await;
    }
    if path.ends_with("/never") {
        std::future::pending::<()>().await;
    }
    let value = String::from_utf8_lossy(&body.to_bytes()).into_owned();
    if method != "GET" {
        state.written.lock().unwrap().push(value);
    }
    let said = match path.ends_with("/big") {
        // More than all buffers on the way.
        true => "x".repeat(64 << 20),
        false => json!({ "method": method, "uri": uri, "headers": headers }).to_string(),
    };
    let answer = Response::builder().header("connection", "x-hop").header("x-hop", "1").header("x-kept", "1");
    Ok(answer.body(Full::from(said).map_err(|never| match never {}).boxed()).unwrap())
}

/// A response that begins at once. The service works on until the test ends it, with or without a reader.
fn streamed(state: Arc<State>, request: Request<Incoming>) -> BoxBody<Bytes, hyper::Error> {
    let (say, mut said) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        let _ = say.send(Ok(Frame::data(Bytes::from_static(b"begun"))));
        let Ok(body) = request.into_body().collect().await else { return };
        state.go.notified().await;
        state.written.lock().unwrap().push(String::from_utf8_lossy(&body.to_bytes()).into_owned());
        let _ = say.send(Ok(Frame::data(Bytes::from_static(b"done"))));
    });
    BodyExt::boxed(StreamBody::new(futures_util::stream::poll_fn(move |cx| said.poll_recv(cx))))
}

/// A service that speaks something else on every connection that asks for it, whatever is asked for, and says back what it hears;
/// to others it says what they asked.
pub fn switching(protocol: &'static str) -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            std::thread::spawn(move || {
                let mut wire = Wire(stream.unwrap());
                let head = wire.hear("\r\n\r\n");
                if !head.to_lowercase().contains("upgrade:") {
                    let length = head.len() + "heard".len();
                    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{head}heard");
                    return wire.say(&answer);
                }
                wire.say(&format!(
                    "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: {protocol}\r\n\r\n"
                ));
                let mut out = wire.0.try_clone().unwrap();
                let _ = std::io::copy(&mut wire.0, &mut out);
            });
        }
    });
    addr
}

/// A service that reads its requests slowly, 8 KiB every 50 ms.
pub struct SlowService {
    pub addr: SocketAddr,
    /// How many bytes of bodies it has read.
    pub read: Arc<AtomicUsize>,
    /// The fences of the requests that it got as a whole.
    pub whole: Arc<Mutex<Vec<String>>>,
}

impl SlowService {
    pub fn start() -> SlowService {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        // Little of a body is on its way unread.
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 16 << 10).unwrap();
        let service =
            SlowService { addr: listener.local_addr().unwrap(), read: Arc::default(), whole: Arc::default() };
        let (read, whole) = (service.read.clone(), service.whole.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (read, whole) = (read.clone(), whole.clone());
                std::thread::spawn(move || while read_slowly(&stream, &read, &whole).is_some() {});
            }
        });
        service
    }
}

/// Reads one request, and answers it. `None`: it did not come as a whole.
fn read_slowly(mut stream: &TcpStream, read: &AtomicUsize, whole: &Mutex<Vec<String>>) -> Option<()> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).to_lowercase();
    let value = |name: &str| {
        let line = head.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("no {name} in {head}")).trim().to_owned()
    };
    let mut left: usize = value("content-length:").parse().unwrap();
    let mut some = [0; 8 << 10];
    while left > 0 {
        let most = left.min(some.len());
        let n = stream.read(&mut some[..most]).ok().filter(|n| *n > 0)?;
        read.fetch_add(n, Ordering::Relaxed);
        left -= n;
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    whole.lock().unwrap().push(value("x-fence:"));
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").ok()
}

// The gate.

pub struct Gate {
    pub child: Child,
    pub addr: SocketAddr,
    pub admin: SocketAddr,
    errors: Receiver<String>,
}

impl Gate {
    /// One that serves fences.
    pub fn start(place: &Place, upstream: &str, options: &str) -> Gate {
        let gate = Gate::start_next(place, upstream, options);
        until(|| gate.is_healthy());
        gate
    }

    /// One that may have to stand by: it takes connections, and need not serve fences yet.
    pub fn start_next(place: &Place, upstream: &str, options: &str) -> Gate {
        let mut command = place.lk(["gate", "--json", "--listen", "127.0.0.1:0", "--upstream", upstream]);
        command.args(["--admin", "127.0.0.1:0"]);
        command.args(options.split(' ').filter(|word| !word.is_empty()));
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let ready = lines.by_ref().map_while(Result::ok).find(|line| line.contains("\"ready\""));
        let ready: Value = serde_json::from_str(&ready.expect("it says that it is ready")).unwrap();
        let addr = |key: &str| ready[key].as_str().unwrap().parse().unwrap();
        let (tell, errors) = channel();
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| _ = tell.send(line)));
        Gate { child, addr: addr("listen"), admin: addr("admin"), errors }
    }

    pub fn is_healthy(&self) -> bool {
        curl(&[&format!("http://{}/healthz", self.admin)]).status == 200
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), signal).unwrap();
    }

    /// Waits for its end: the exit code, and what it said.
    pub fn end(mut self) -> (i32, Vec<String>) {
        let status = self.child.wait().unwrap();
        (code(status), self.errors.iter().collect())
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    pub fn put(&self, path: &str, fence: u64, value: &str) -> Answer {
        curl(&["-X", "PUT", "-H", &format!("Lock-Fence: {fence}"), "-d", value, &self.url(path)])
    }

    pub fn metric(&self, name: &str) -> u64 {
        let all = curl(&[&format!("http://{}/metrics", self.admin)]).body;
        let line = all.lines().find_map(|line| line.strip_prefix(&format!("lockkeeper_gate_{name} ")));
        line.unwrap_or_else(|| panic!("no {name} in {all}")).parse().unwrap()
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// Requests.

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The last word of the type of a problem.
    pub fn problem(&self) -> String {
        self.json()["type"].as_str().unwrap().rsplit(':').next().unwrap().to_owned()
    }
}

/// A request that is on its way.
pub fn begin(options: &[&str]) -> Child {
    let mut curl = Command::new("curl");
    curl.args(["-sS", "-i", "-m", "60", "-H", "Expect:"]).args(options);
    curl.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

pub fn finish(curl: Child) -> Answer {
    let said = curl.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        panic!("no answer: {}", String::from_utf8_lossy(&said.stderr))
    };
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_lowercase(), body: body.to_owned() }
}

pub fn curl(options: &[&str]) -> Answer {
    finish(begin(options))
}

/// Waits until it is so.
pub fn until(mut so: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !so() {
        assert!(began.elapsed() < LONG, "it never came true");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// A connection that is spoken to by hand.
pub struct Wire(pub TcpStream);

impl Wire {
    pub fn to(addr: SocketAddr) -> Wire {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Wire(stream)
    }

    pub fn say(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).unwrap();
    }

    /// Reads until this was said, and returns all of it.
    pub fn hear(&mut self, wanted: &str) -> String {
        let mut heard = Vec::new();
        let mut some = [0; 4096];
        while !String::from_utf8_lossy(&heard).contains(wanted) {
            match self.0.read(&mut some) {
                Ok(0) => break,
                Ok(n) => heard.extend_from_slice(&some[..n]),
                Err(error) => panic!("{error} after {:?}", String::from_utf8_lossy(&heard)),
            }
        }
        let heard = String::from_utf8_lossy(&heard).into_owned();
        assert!(heard.contains(wanted), "{heard:?}");
        heard
    }
}
