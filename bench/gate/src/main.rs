//! `lockkeeper gate` against a bare reverse proxy of the same framework, in one run and in turns: only ratios count.
//!
//!     cargo build --release -p lockkeeper-cli -p bench-gate && cargo run --release -p bench-gate [ROUNDS]

mod load;
mod proxy;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use lockkeeper_testkit::servers::TempDir;

const ROUND: Duration = Duration::from_millis(1000);

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    match words.first().map(String::as_str) {
        Some("service") => runtime.block_on(proxy::service()),
        Some("bare") => runtime.block_on(proxy::bare(&words[1])),
        rounds => {
            let rounds = rounds.map_or(9, |text| text.parse().expect("ROUNDS is a number"));
            runtime.block_on(compare(rounds));
        }
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
    let bare = Running::start("bench-gate", &["bare", &upstream]);
    let gates = [
        ("memory", gate("memory:")),
        ("sqlite", gate(&format!("sqlite:{}", dir.join("marks.db").display()))),
    ];
    for connections in [1, 64] {
        let direct = load::median_latency(service.addr, connections, ROUND).await;
        println!("{connections} connections, {rounds} rounds; the service itself {:.0} µs", micros(direct));
        let mut bares = Vec::new();
        let mut others = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            bares.push(load::median_latency(bare.addr, connections, ROUND).await);
            for ((_, gate), seen) in gates.iter().zip(&mut others) {
                seen.push(load::median_latency(gate.addr, connections, ROUND).await);
            }
        }
        println!("  bare proxy {:.0} µs", micros(median(bares.clone())));
        for ((store, _), seen) in gates.iter().zip(others) {
            // Each round beside its neighbour: what else the machine does hits both.
            let ratios = seen.iter().zip(&bares).map(|(gate, bare)| gate.as_secs_f64() / bare.as_secs_f64());
            let ratio = median(ratios.collect());
            println!(
                "  gate, marks in {store}: {:.0} µs, ratio {ratio:.2} (goal: at most 1.25)",
                micros(median(seen))
            );
        }
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn median<T: Copy + PartialOrd>(mut list: Vec<T>) -> T {
    list.sort_by(|a, b| a.partial_cmp(b).expect("numbers"));
    list[list.len() / 2]
}
