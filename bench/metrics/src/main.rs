//! A lock request and its release on the memory store with a metrics recorder against the same without one, in one run: only the ratio counts.
//!
//!     cargo run --release -p bench-metrics [ROUNDS]
//!     valgrind --tool=callgrind target/release/bench-metrics cycles recorded|plain N

use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper::Lockkeeper;
use lockkeeper_host::VirtualClock;
use lockkeeper_memory::MemoryStore;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusRecorder};

/// How long one measurement lasts.
const ROUND: Duration = Duration::from_millis(200);
/// The cycles between two looks at the clock.
const BATCH: u64 = 200;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let recorder = PrometheusBuilder::new().build_recorder();
    if let [mode, which, count] = &words[..]
        && mode == "cycles"
    {
        // On a virtual clock: valgrind cannot run the clock of the kernel's vDSO.
        let clock = Arc::new(VirtualClock::default());
        let keeper = Lockkeeper::with_store(Arc::new(MemoryStore::new(clock.clone())), clock);
        let client = Client::new(keeper, (which == "recorded").then_some(&recorder));
        return runtime.block_on(run(&client, count.parse().expect("N is a number")));
    }
    let rounds: usize = words.first().map_or(41, |text| text.parse().expect("ROUNDS is a number"));
    let mut ratios = Vec::new();
    let (mut plain, mut recorded) = (0.0, 0.0);
    runtime.block_on(async {
        let open = async || Lockkeeper::open("memory:").await.expect("a store");
        let clients = [Client::new(open().await, None), Client::new(open().await, Some(&recorder))];
        for round in 0..rounds {
            // In turns, so that neither is always the first.
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            let mut rates = [0.0; 2];
            for which in order {
                rates[which] = rate(&clients[which]).await;
                recorder.handle().run_upkeep();
            }
            (plain, recorded) = (plain + rates[0], recorded + rates[1]);
            ratios.push(rates[0] / rates[1]);
        }
    });
    ratios.sort_by(f64::total_cmp);
    let (count, ratio) = (rounds as f64, ratios[rounds / 2]);
    println!(
        "acquire+release on memory:, {rounds} rounds: without a recorder {:.0}/s, with one {:.0}/s: time per cycle times {ratio:.3} (goal: at most 1.03)",
        plain / count,
        recorded / count
    );
}

/// A keeper whose requests are recorded, or not.
struct Client<'a> {
    keeper: Lockkeeper,
    recorder: Option<&'a PrometheusRecorder>,
}

impl<'a> Client<'a> {
    fn new(keeper: Lockkeeper, recorder: Option<&'a PrometheusRecorder>) -> Self {
        keeper.metrics_patterns(["orders/*"]).expect("a pattern");
        Client { keeper, recorder }
    }
}

/// Cycles per second.
async fn rate(client: &Client<'_>) -> f64 {
    run(client, BATCH).await;
    let (began, mut count) = (Instant::now(), 0);
    while began.elapsed() < ROUND {
        run(client, BATCH).await;
        count += BATCH;
    }
    count as f64 / began.elapsed().as_secs_f64()
}

async fn run(client: &Client<'_>, count: u64) {
    let _recorder = client.recorder.map(|recorder| metrics::set_default_local_recorder(recorder));
    for _ in 0..count {
        let guard = client.keeper.lock("orders/42").acquire().await.expect("a grant");
        guard.release().await.expect("an answer");
    }
}
