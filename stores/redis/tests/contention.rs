//! Many waiters. The tests count commands of the server, not time.

use std::collections::HashMap;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper::Lockkeeper;
use lockkeeper_core::{AcquireOutcome, Mode, RenewOutcome, Store, Wait};
use lockkeeper_host::SystemClock;
use lockkeeper_redis::{Options, RedisStore};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, is_free, join_queue, name, request, take, with,
};
use lockkeeper_testkit::scenarios::crowd;
use lockkeeper_testkit::servers::{self, RedisOptions, Server, redis_call};

async fn open(url: &str) -> Arc<dyn Store> {
    Arc::new(RedisStore::open(Options::from_url(url).unwrap()).await.unwrap())
}

/// How often each command was called, also in scripts.
fn commands(server: &Server) -> HashMap<String, u64> {
    let stats = redis_call(server.addr(), &["INFO", "commandstats"]).unwrap();
    let lines = stats.lines().filter_map(|line| line.strip_prefix("cmdstat_")?.split_once(":calls="));
    lines.map(|(name, rest)| (name.to_owned(), rest.split(',').next().unwrap().parse().unwrap())).collect()
}

fn since(before: &HashMap<String, u64>, after: &HashMap<String, u64>) -> HashMap<String, u64> {
    after.iter().map(|(name, calls)| (name.clone(), calls - before.get(name).copied().unwrap_or(0))).collect()
}

/// One process of the crowd: it waits many times over, and gives back at once what it gets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the other processes of the test below"]
async fn member() {
    let (url, count) = (std::env::var("CROWD_URL").unwrap(), std::env::var("CROWD_COUNT").unwrap());
    let store = open(&url).await;
    crowd::all_granted(crowd::join(&store, count.parse().unwrap())).await;
}

fn start(url: &str, count: usize) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "member", "--nocapture"]);
    command.env("CROWD_URL", url).env("CROWD_COUNT", count.to_string()).spawn().unwrap()
}

/// The commands per hand-off when `waiters` waits in the queue in four processes: the scripts that were called, and
/// everything together.
async fn per_hand_off(waiters: usize) -> Option<(f64, f64)> {
    let server = servers::redis(RedisOptions::default()).ok()?;
    // Looking now and then is counted too, but it is by the clock: rare enough not to hide what is counted here.
    let url = format!("redis://{}?poll=10s&claim=60s", server.addr());
    let store = open(&url).await;
    let held = take(&store, &request("popular")).await;
    let crowd: Vec<Child> = (0..4).map(|_| start(&url, waiters / 4)).collect();
    eventually("all waits in the queue", || async {
        let view = store.inspect(&name("popular")).await.unwrap();
        view.is_some_and(|view| view.waiting == waiters)
    })
    .await;
    let before = commands(&server);
    give_back(&store, &held.key).await;
    for mut one in crowd {
        assert!(tokio::task::spawn_blocking(move || one.wait()).await.unwrap().unwrap().success());
    }
    let calls = since(&before, &commands(&server));
    is_free(&store, "popular").await;
    let scripts: u64 = ["evalsha", "eval"].iter().filter_map(|name| calls.get(*name)).sum();
    let all: u64 = calls.values().sum();
    Some((scripts as f64 / waiters as f64, all as f64 / waiters as f64))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_off_costs_the_same_however_many_wait() {
    let (Some(few), Some(many)) = (per_hand_off(200).await, per_hand_off(5000).await) else { return };
    println!("scripts and commands per hand-off: {few:.2?} with 200 waiters, {many:.2?} with 5000");
    // One to give back, one to say that it is there; some to spare for those who look now and then.
    assert!(few.0 < 2.5 && many.0 < 2.5, "{few:?} {many:?}");
    assert!(many.1 < few.1 * 1.1, "the crowd costs: {few:?} {many:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_guards_are_renewed_in_one_pipeline() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = open(&format!("redis://{}", server.addr())).await;
    let requests = (0..10_000).map(|i| request(&format!("guard/{i}")));
    let mut grants = Vec::new();
    for batch in requests.collect::<Vec<_>>().chunks(200) {
        let taken = batch.iter().map(|request| take(&store, request));
        grants.extend(futures_util::future::join_all(taken).await);
    }
    let (before, began) = (commands(&server), Instant::now());
    assert!(store.renew(&grants).await.unwrap().iter().all(|answer| *answer == RenewOutcome::Renewed));
    let calls = since(&before, &commands(&server));
    assert_eq!(
        (calls["evalsha"], calls.get("eval").copied().unwrap_or(0)),
        (100, 0),
        "a hundred in each: {calls:?}"
    );
    let left = redis_call(server.addr(), &["PTTL", "lock:guard/9999"]).unwrap().parse().unwrap();
    let renewed = Duration::from_millis(left) + began.elapsed();
    assert!(
        renewed >= grants[0].ttl - Duration::from_millis(2),
        "the last one was not renewed: {left} ms left"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_waiter_costs_its_claim_and_no_more() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let url = format!("redis://{}?poll=100ms&claim=1s", server.addr());
    let store = open(&url).await;
    let held = take(&store, &request("popular")).await;
    let mut dead = start(&url, 3);
    eventually("the first three waits in the queue", || async {
        store.inspect(&name("popular")).await.unwrap().is_some_and(|view| view.waiting == 3)
    })
    .await;
    let (store2, patient) = (store.clone(), with(request("popular"), |request| request.wait = Wait::Forever));
    let waiter = tokio::spawn(async move { store2.acquire(&patient).await });
    eventually("we stand behind them", || async {
        store.inspect(&name("popular")).await.unwrap().is_some_and(|view| view.waiting == 4)
    })
    .await;
    dead.kill().unwrap();
    dead.wait().unwrap();
    give_back(&store, &held.key).await;
    // The first of the dead is let in, and its claim runs out; by then the places of its process are gone too.
    let served = tokio::time::timeout(Duration::from_secs(20), waiter).await.expect("it is let in").unwrap();
    assert!(matches!(served, Ok(AcquireOutcome::Granted(_))));
}

/// Locks whose holders died, in batches, while another lock stays: whatever their mode, nothing of them is left once their
/// time is over, and no client has to come and sweep.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_that_end_without_a_release_leave_nothing_behind() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = open(&format!("redis://{}", server.addr())).await;
    let keys = || redis_call(server.addr(), &["DBSIZE"]).unwrap().parse::<usize>().unwrap();
    take(&store, &request("stays")).await;
    // All at once, and long enough for a busy machine to count them.
    let brief = |i: u32| {
        with(request(&format!("brief/{i}")), |request| {
            request.ttl = Duration::from_secs(3);
            match i % 4 {
                0 => request.mode = Mode::Shared,
                1 => request.min_hold = Duration::from_secs(4),
                2 => request.lock_delay = Duration::from_secs(1),
                _ => {}
            }
        })
    };
    let requests: Vec<_> = (0..400).map(brief).collect();
    let grants = futures_util::future::join_all(requests.iter().map(|request| take(&store, request))).await;
    assert!(keys() > 300, "{}", keys());
    // Some are released within their minimum hold, and stay until its end.
    futures_util::future::join_all(grants.iter().skip(1).step_by(4).map(|one| give_back(&store, &one.key)))
        .await;
    eventually("only the counter and the lock that stays are left", || async { keys() == 2 }).await;
}

/// Readers behind a writer, as many as one lock may have, each with a guard that the library renews: all of them hold at
/// once, and go on holding beyond their ttl. The server's time for one of them does not grow with their number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_readers_behind_a_writer_hold_beyond_their_ttl() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    // The claim is the first lease of a waiter: as long as the ttl, for a busy machine.
    let few = readers_hold(&server, 1_000, Duration::from_secs(8), "claim=8s").await;
    let many = readers_hold(&server, 10_000, Duration::from_secs(24), "claim=24s").await;
    println!("server time for each reader: {few:?} with 1000, {many:?} with 10000");
    assert!(many < few * 6, "the cost of one reader grows with their number: {few:?} {many:?}");
}

/// With the claim of 5 s that is the default: of 2,500 readers that one release let in, all used to lose their guards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_readers_behind_a_writer_hold_with_the_default_claim() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    readers_hold(&server, 2_500, Duration::from_secs(8), "").await;
}

/// A process has waiters all the time, so its polls go on. The server's note of a waiter that was granted the lock goes when the
/// waiter is released, whether the server heard it confirm or not: else every poll would read all waiters that there ever were.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poll_reads_nothing_of_waiters_that_are_gone() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = open(&format!("redis://{}?poll=100ms", server.addr())).await;
    take(&store, &request("kept")).await;
    let waits = join_queue(&store, &request("kept"), 1).await;
    let noted = || {
        let keys = redis_call(server.addr(), &["KEYS", "lockkeeper:*:unconfirmed:*"]).unwrap();
        let count = |key: &str| redis_call(server.addr(), &["SCARD", key]).unwrap().parse::<usize>().unwrap();
        keys.lines().map(count).sum::<usize>()
    };
    let mut shown = 0;
    for mode in [Mode::Exclusive, Mode::Shared] {
        for _ in 0..5 {
            let held = take(&store, &request("popular")).await;
            let asked = with(request("popular"), |request| request.mode = mode);
            // Its caller gives up, and the server lets it in before it hears of that.
            let gives_up = join_queue(&store, &asked, 1).await;
            gives_up.abort();
            _ = gives_up.await;
            give_back(&store, &held.key).await;
            // The client removes the queue entry by itself if its caller gave up before the reply.
            shown += noted();
            give_back(&store, &asked.key).await;
        }
    }
    assert!(shown > 0, "nothing is shown: the server noted no hand-off");
    let tasks = (0..100).map(|i| {
        let store = store.clone();
        tokio::spawn(async move {
            for _ in 0..10 {
                let asked =
                    with(request(&format!("popular/{}", i % 10)), |request| request.wait = Wait::Forever);
                give_back(&store, &take(&store, &asked).await.key).await;
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    eventually("nothing of them is noted", || async { noted() == 0 }).await;
    assert!(!waits.is_finished(), "the process went on polling");
    waits.abort();
}

/// No reader loses its guard. A machine that stands still for seconds costs guards too, but not three times. Returns the server's
/// processor time for each reader.
async fn readers_hold(server: &Server, count: u32, ttl: Duration, options: &str) -> Duration {
    let mut lost = Vec::new();
    while lost.len() < 3 {
        let (now_lost, cost) = readers(server, count, ttl, options).await;
        if now_lost == 0 {
            return cost;
        }
        lost.push(now_lost);
    }
    panic!("of {count} readers some lost their guards each time: {lost:?}");
}

/// Returns how many of `count` readers lost their guards, and the server's processor time for each, from their first request to their last
/// release.
async fn readers(server: &Server, count: u32, ttl: Duration, options: &str) -> (usize, Duration) {
    // One crowd at a time, and a server that a busy machine delays is not silent.
    static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    let _turn = TURN.lock().await;
    let url = format!("redis://{}?poll=1s&timeout=30s&{options}", server.addr());
    let writer = open(&url).await;
    let held = take(&writer, &request("popular")).await;
    let keeper = Lockkeeper::with_store(open(&url).await, Arc::new(SystemClock));
    let before = processor_time(server);
    let readers: Vec<_> =
        (0..count).map(|_| tokio::spawn(keeper.lock("popular").shared().ttl(ttl).acquire())).collect();
    eventually("all readers are in the queue", || async {
        writer.inspect(&name("popular")).await.unwrap().is_some_and(|view| view.waiting == readers.len())
    })
    .await;
    give_back(&writer, &held.key).await;
    let guards = futures_util::future::join_all(readers).await;
    let guards: Vec<_> = guards.into_iter().filter_map(|guard| guard.unwrap().ok()).collect();
    tokio::time::sleep(ttl * 3 / 2).await;
    let held = guards.iter().filter(|guard| guard.is_held()).count();
    let lost = count as usize - held;
    println!("{lost} of {count} readers lost their guards");
    let view = writer.inspect(&name("popular")).await.unwrap().unwrap();
    assert!(view.held.len() >= held, "{held} guards, and {} holds", view.held.len());
    futures_util::future::join_all(guards.into_iter().map(|guard| guard.release())).await;
    is_free(&writer, "popular").await;
    (lost, (processor_time(server) - before) / count)
}

/// The processor time of the server, which other programs of a busy machine do not count into.
fn processor_time(server: &Server) -> Duration {
    let stats = redis_call(server.addr(), &["INFO", "cpu"]).unwrap();
    let used =
        stats.lines().filter(|line| line.starts_with("used_cpu_sys:") || line.starts_with("used_cpu_user:"));
    let seconds: f64 = used.map(|line| line.split(':').nth(1).unwrap().trim().parse::<f64>().unwrap()).sum();
    Duration::from_secs_f64(seconds)
}

/// A message is believed only if it can be no older than what we know: one from before, which was held up on its way, tells
/// of a lock that may be another client's by now.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_message_grants_nothing() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let url = format!("redis://{}", server.addr());
    let (store, waiting) = (open(&url).await, open(&url).await);
    let before = take(&store, &request("popular")).await;
    give_back(&store, &before.key).await;
    let held = take(&store, &request("popular")).await;
    let patient = with(request("popular"), |request| request.wait = Wait::Forever);
    let (waiting2, patient2) = (waiting.clone(), patient.clone());
    let waiter = tokio::spawn(async move { waiting2.acquire(&patient2).await });
    let listens = || {
        let channels = redis_call(server.addr(), &["PUBSUB", "CHANNELS", "lockkeeper:wake:*"]).unwrap();
        channels.lines().next().map(str::to_owned)
    };
    eventually("it listens", || async { listens().is_some() }).await;
    let channel = listens().unwrap();
    for fence in [before.fence, held.fence] {
        let message = format!("{}{fence} 5000", patient.key.attempt.to_hex());
        assert_eq!(redis_call(server.addr(), &["PUBLISH", &channel, &message]).unwrap(), "1");
        // The client sends its request to the server, over the connection of the message; the reply follows the message.
        waiting.inspect(&name("popular")).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!waiter.is_finished(), "two hold it: {:?}", waiter.await);
    }
    give_back(&store, &held.key).await;
    let served = tokio::time::timeout(Duration::from_secs(20), waiter).await.expect("it is let in").unwrap();
    let Ok(AcquireOutcome::Granted(served)) = served else { panic!("not served: {served:?}") };
    assert!(served.fence > held.fence && served.lease <= served.ttl);
    assert_eq!(waiting.renew(&[served]).await.unwrap(), [RenewOutcome::Renewed]);
}

/// The server keeps the lock for a waiter for the claim of the waiter's own client, whatever the claim of the client that released it: a
/// waiter must not rely on more, and needs no less.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_relies_on_its_own_claim() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let client = async |claim: u64| open(&format!("redis://{}?poll=1s&claim={claim}s", server.addr())).await;
    for (holder, own) in [(30, 100), (100, 30)] {
        let (holder, patient) = (client(holder).await, client(own).await);
        // By the short way of a release, and by the long one.
        for mode in [Mode::Exclusive, Mode::Shared] {
            let mut by_message = 0;
            for _ in 0..5 {
                let held = take(&holder, &request("popular")).await;
                let waiter =
                    join_queue(&patient, &with(request("popular"), |request| request.mode = mode), 1).await;
                give_back(&holder, &held.key).await;
                let served = granted(waiter).await;
                if served.lease < served.ttl {
                    assert_eq!(served.lease, Duration::from_secs(own), "{served:?}");
                    by_message += 1;
                }
                give_back(&patient, &served.key).await;
            }
            assert!(by_message > 0, "no client was let in by a message");
        }
    }
}
