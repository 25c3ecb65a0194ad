//! `lockkeeper gate` against a bare reverse proxy of the same framework, in one run and in turns: only ratios count.
//!
//!     cargo build --release -p lockkeeper-cli -p bench-gate && cargo run --release -p bench-gate [ROUNDS]

mod load;
mod proxy;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use lockkeeper_testkit::ratio::{median, rounds};
use lockkeeper_testkit::servers::TempDir;

const ROUND: Duration = Duration::from_millis(1000);

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    match words.first().map(String::as_str) {
        Some("service") => runtime.block_on(proxy::service()),
        // For a look with a profiler: ADDRESS CONNECTIONS.
        Some("load") => {
            let (addr, connections) =
                (words[1].parse().expect("ADDRESS"), words[2].parse().expect("CONNECTIONS"));
            let (latency, requests) = runtime.block_on(load::median_latency(addr, connections, ROUND * 5));
            println!("{:.0} µs, {requests} requests", micros(latency));
        }
        Some("bare") => runtime.block_on(proxy::bare(&words[1])),
        _ => runtime.block_on(compare(rounds(9))),
    }
}

/// A program that says where it listens.
struct Running {
    child: Child,
    addr: SocketAddr,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    /// The processor time that it has used.
    fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("it runs");
        let fields: Vec<&str> = stat.rsplit(") ").next().expect("fields").split(' ').collect();
        // Fields 14 and 15 of proc(5), counted from the third, in hundredths of a second.
        let ticks = |n: usize| fields[n].parse::<u64>().expect("a number");
        Duration::from_millis((ticks(11) + ticks(12)) * 10)
    }

    fn start(program: &str, words: &[&str]) -> Running {
        let dir = std::env::current_exe().expect("a program").parent().expect("a folder").to_owned();
        let mut command = Command::new(dir.join(program));
        let mut child = command.args(words).stderr(Stdio::piped()).spawn().expect("build lockkeeper first");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
        let addr = lines.find_map(|line| line.rsplit_once("listens on ")?.1.trim().parse().ok());
        std::thread::spawn(move || lines.for_each(drop));
        Running { child, addr: addr.expect("it says where it listens") }
    }
}

async fn compare(rounds: usize) {
    let dir = TempDir::new("bench-gate");
    let service = Running::start("bench-gate", &["service"]);
    let upstream = format!("http://{}", service.addr);
    let gate = |store: &str| {
        Running::start(
            "lockkeeper",
            &["gate", "--upstream", &upstream, "--listen", "127.0.0.1:0", "--store", store],
        )
    };
    let proxies = [
        ("bare proxy", Running::start("bench-gate", &["bare", &upstream])),
        ("gate, marks in memory", gate("memory:")),
        ("gate, marks in sqlite", gate(&format!("sqlite:{}", dir.join("marks.db").display()))),
    ];
    for connections in [1, 64] {
        let (direct, _) = load::median_latency(service.addr, connections, ROUND).await;
        println!("{connections} connections, {rounds} rounds; the service itself {:.0} µs", micros(direct));
        let mut all: Vec<Seen> = proxies.iter().map(|_| Seen::default()).collect();
        for _ in 0..rounds {
            for ((_, proxy), seen) in proxies.iter().zip(&mut all) {
                seen.round(proxy, connections).await;
            }
        }
        for ((name, _), seen) in proxies.iter().zip(&all) {
            // Each round beside its neighbour: what else the machine does hits both.
            let ratios = seen
                .latencies
                .iter()
                .zip(&all[0].latencies)
                .map(|(gate, bare)| gate.as_secs_f64() / bare.as_secs_f64());
            println!(
                "  {name}: {:.0} µs, ratio {:.2}; {:.0} µs of processor time for each",
                micros(median(seen.latencies.clone())),
                median(ratios.collect()),
                micros(seen.cpu) / seen.requests as f64,
            );
        }
    }
    println!("the goal: a ratio of at most 1.25");
}

/// The measurements of one proxy.
#[derive(Default)]
struct Seen {
    latencies: Vec<Duration>,
    requests: usize,
    cpu: Duration,
}

impl Seen {
    async fn round(&mut self, proxy: &Running, connections: usize) {
        let before = proxy.cpu();
        let (latency, requests) = load::median_latency(proxy.addr, connections, ROUND).await;
        self.cpu += proxy.cpu() - before;
        self.requests += requests;
        self.latencies.push(latency);
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
