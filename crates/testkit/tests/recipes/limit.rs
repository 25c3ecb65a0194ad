//! Rate limits that eight processes share, on real servers.

use std::time::Duration;

use lockkeeper::limit::{PER_HOUR, PER_SECOND};
use lockkeeper::{Clock, Error, Lockkeeper, SystemClock};
use lockkeeper_testkit::laws::soon;
use lockkeeper_testkit::proxy::{Fault, Framing, Pick, Proxy};
use lockkeeper_testkit::servers::{
    self, EtcdOptions, PostgresOptions, RedisOptions, TempDir, ZooKeeperOptions,
};

use super::crowd::{Crowd, times};

const MEMBERS: usize = 8;

/// Starts the processes, waits until all are ready, does `before`, lets them go, and returns the numbers that each prints.
async fn together(
    what: &'static str,
    store: &str,
    args: &[String],
    before: impl AsyncFnOnce(),
) -> Vec<Vec<u64>> {
    let dir = TempDir::new("limit");
    let ready: Vec<_> = (0..MEMBERS).map(|i| dir.join(&format!("ready{i}"))).collect();
    let of = |file: &std::path::PathBuf| {
        let own = [
            format!("store={store}"),
            format!("ready={}", file.display()),
            format!("go={}", dir.join("go").display()),
        ];
        [&own[..], args].concat()
    };
    let crowd = Crowd::new(what, ready.iter().map(of).collect());
    soon("all processes are ready", async {
        while !ready.iter().all(|file| file.exists()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    before().await;
    std::fs::write(dir.join("go"), "").unwrap();
    let ends = tokio::task::spawn_blocking(|| crowd.finish()).await.unwrap();
    let numbers = ends.into_iter().map(|(status, said)| {
        assert!(status.success(), "{said}");
        said.split_whitespace().map(|number| number.parse().unwrap()).collect()
    });
    numbers.collect()
}

/// Eight processes take all that they can get. The store gives at most rate x time + burst, counted from the first request to the last reply, and at
/// least 0.98 of it, counted from the first reply to the last request that was refused.
async fn eight_take_what_there_is(store: &str, rate: u64) {
    // Five seconds of tokens, which one take has at the start: the bucket overflows only if all processes stand still for that long.
    let burst = rate * 5;
    let args = [format!("rate={rate}"), format!("burst={burst}"), format!("for_ms={}", times(10_000, 3_000))];
    let keeper = Lockkeeper::open(store).await.unwrap();
    let (mut first_sent, mut first_reply) = (0, 0);
    let empty = async || {
        first_sent = SystemClock.now().as_nanos();
        assert!(keeper.limit("hot").rate(rate, PER_SECOND).burst(burst).take(burst).await.unwrap().allowed());
        first_reply = SystemClock.now().as_nanos();
    };
    let each = together("limit", store, &args, empty).await;
    let taken: u64 = burst + each.iter().map(|numbers| numbers[0]).sum::<u64>();
    let all = |at: usize| each.iter().map(move |numbers| numbers[at]);
    let (last_refused, last_reply) = (all(1).max().unwrap(), all(2).max().unwrap());
    let tokens = |from: u64, to: u64| burst as f64 + rate as f64 * (to.saturating_sub(from)) as f64 / 1e9;
    let (most, least) = (tokens(first_sent, last_reply), tokens(first_reply, last_refused));
    println!("{store}: {taken} taken, {least:.1} to {most:.1} tokens, {:.3} of it", taken as f64 / least);
    assert!(taken as f64 <= most + 1.0, "{taken} of {most}");
    assert!(taken as f64 >= 0.98 * least - 1.0, "{taken} of {least}");
    assert!(all(0).filter(|taken| *taken > 0).count() > 1, "one process took all: the test shows nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_processes_keep_to_a_limit_in_a_file() {
    let dir = TempDir::new("limit-store");
    eight_take_what_there_is(&format!("sqlite:{}", dir.join("locks.db").display()), 20).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_processes_keep_to_a_limit_in_redis() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    eight_take_what_there_is(&format!("redis://{}?timeout=20s", server.addr()), 50).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_processes_keep_to_a_limit_in_postgres() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("postgres://postgres@{}/postgres?timeout=20s", server.addr());
    eight_take_what_there_is(&url, 50).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_processes_keep_to_a_limit_in_etcd() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    eight_take_what_there_is(&format!("etcd://{}?timeout=20s", server.addr()), 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_processes_keep_to_a_limit_in_zookeeper() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    eight_take_what_there_is(&format!("zk://{}?timeout=20s", server.addr()), 4).await;
}

/// Eight processes hold a batch each while the bucket fills up again, and then take all that they can get: the bound of prefetched tokens
/// holds, and they reach it but for the one token for which each fetched its batch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_processes_that_prefetch_reach_their_bound_and_no_more() {
    let dir = TempDir::new("prefetch-store");
    let store = format!("sqlite:{}", dir.join("locks.db").display());
    let (rate, burst, batch) = (40, 120, 10);
    let keeper = Lockkeeper::open(&store).await.unwrap();
    let limit = keeper.limit("hot").rate(rate, PER_SECOND).burst(burst);
    let args = [format!("rate={rate}"), format!("burst={burst}"), format!("batch={batch}")];
    let full = async || {
        soon("the bucket is full again", async {
            while limit.peek().await.unwrap().remaining < burst {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
        .await;
    };
    let each = together("prefetch", &store, &args, full).await;
    let used: u64 = each.iter().map(|numbers| numbers[0]).sum();
    let start = each.iter().map(|numbers| numbers[1]).min().unwrap();
    let end = each.iter().map(|numbers| numbers[2]).max().unwrap();
    let limit = burst as f64 + rate as f64 * (end - start) as f64 / 1e9;
    let members = MEMBERS as u64;
    println!("{used} used, the limit is {limit:.1}, and the bound {:.1}", limit + (members * batch) as f64);
    assert!(used as f64 <= limit + (members * batch) as f64, "members x batch above the limit was exceeded");
    assert!(used >= burst + members * (batch - 1), "the bound was not reached");
}

/// One request and one reply for each decision, whether it is allowed or not, and of several limits together.
async fn one_round_trip_each(server: std::net::SocketAddr, framing: Framing, url: impl Fn(String) -> String) {
    let proxy = Proxy::start(server, framing);
    let keeper = Lockkeeper::open(&url(proxy.addr().to_string())).await.unwrap();
    let limit = keeper.limit("mail").rate(1, PER_HOUR).burst(60);
    let both = keeper.limits([limit.clone(), keeper.limit("all").rate(1, PER_HOUR).burst(100)]);
    for _ in 0..4 {
        let _ = limit.take(1).await.unwrap();
        let _ = both.take(1).await.unwrap();
    }
    // The store's own polls go through the proxy as well, so a round of takes is counted until none has come between.
    soon("a round without other requests", async {
        loop {
            let before = proxy.count().requests;
            for _ in 0..10 {
                let _ = limit.take(1).await.unwrap();
                let _ = both.take(1).await.unwrap();
                let _ = limit.peek().await.unwrap();
            }
            let sent = proxy.count().requests - before;
            assert!(sent >= 30, "fewer requests than decisions: {sent}");
            if sent == 30 {
                return;
            }
        }
    })
    .await;
    assert!(!limit.take(50).await.unwrap().allowed());
    // The take whose reply is lost may have been done, and is neither an answer nor sent again.
    let left = limit.peek().await.unwrap().remaining;
    limit.reset().await.unwrap();
    let fault = proxy.inject(Fault::at_request(1).on(Pick::Any).cut_before_reply());
    let answer = limit.take(7).await;
    assert!(fault.fired() && matches!(answer, Err(Error::Unknown(_))), "{left} left; {answer:?}");
    proxy.heal();
    let past = Lockkeeper::open(&url(server.to_string())).await.unwrap();
    let remaining = past.limit("mail").rate(1, PER_HOUR).burst(60).peek().await.unwrap().remaining;
    assert!(remaining == 53 || remaining == 60, "a take whose reply was lost was sent again: {remaining}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decision_is_one_round_trip_to_redis() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    one_round_trip_each(server.addr(), Framing::Resp, |addr| format!("redis://{addr}?timeout=20s")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decision_is_one_round_trip_to_postgres() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = |addr| format!("postgres://postgres@{addr}/postgres?timeout=20s");
    one_round_trip_each(server.addr(), Framing::Postgres, url).await;
}
