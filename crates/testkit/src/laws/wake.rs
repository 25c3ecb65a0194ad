//! W: how long the next waiter waits after a lock became free, compared with what the store declares in `Profile::wake`.

use std::net::SocketAddr;
use std::time::Instant;

use lockkeeper_core::{AcquireOutcome, BootInstant, Error, LockRequest, Result, Wait};
use tokio::task::JoinHandle;

use super::*;
use crate::proxy::{Direction, Framing, Pick, Proxy};

/// The time that a busy machine may add to the declared time.
const MACHINE: Duration = Duration::from_secs(2);
/// The ttl of a client that dies.
const MORTAL: Duration = Duration::from_secs(2);
/// How often a wait behind dead waiters is measured before it counts as longer than another.
const SAMPLES: usize = 5;
/// How many processes share the dead waiters.
const PROCESSES: usize = 4;

/// A lock becomes free by a release, by the end of a lease, or because the waiter in front leaves.
pub async fn the_next_waiter_is_let_in_within_the_declared_time<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &request("released")).await;
    let waiter = join_queue(&b, &request("released"), 1).await;
    let freed = h.clock().now();
    give_back(&a, &held.key).await;
    within(&h, &a, "a release", freed, waiter).await;

    let held = take(&a, &with(request("expired"), |request| request.ttl = SHORT)).await;
    let waiter = join_queue(&b, &request("expired"), 1).await;
    h.pass(SHORT).await;
    within(&h, &a, "the end of a lease", held.sent_at + SHORT, waiter).await;

    let held = take(&a, &request("left")).await;
    let leaves = request("left");
    let left = join_queue(&a, &leaves, 1).await;
    let waiter = join_queue(&b, &request("left"), 2).await;
    give_back(&a, &leaves.key).await;
    let freed = h.clock().now();
    give_back(&a, &held.key).await;
    within(&h, &a, "a release, with a waiter that had left", freed, waiter).await;
    left.abort();
}

async fn within<H: Harness>(
    h: &H,
    store: &Arc<dyn Store>,
    after: &str,
    freed: BootInstant,
    waiter: JoinHandle<Result<AcquireOutcome>>,
) {
    let grant = match soon(&format!("the next waiter is let in after {after}"), waiter).await.unwrap() {
        Ok(AcquireOutcome::Granted(grant)) => grant,
        other => panic!("the next waiter was to be let in: {other:?}"),
    };
    let (took, wake) = (h.clock().now().since(freed), store.profile().wake);
    assert!(
        took <= wake + MACHINE,
        "the next waiter was let in {took:?} after {after}: {wake:?} are declared"
    );
    give_back(store, &grant.key).await;
}

/// Clients fall silent, as if their host had lost its power: their connections stay open, and nothing moves on them. The next waiter gets
/// the lock within the declared time after a dead holder's ttl, after a release behind any number of dead waiters, and after a message
/// that was lost; and 20 dead waiters cost no more than one, but for a quarter of the declared time. `open` opens a store at an address, be it the server's or a proxy's.
pub async fn dead_clients_cost_no_more_than_declared(
    server: SocketAddr,
    framing: Framing,
    open: impl AsyncFn(SocketAddr) -> Arc<dyn Store>,
) {
    let open = async |addrs: Vec<SocketAddr>| open(addrs[0]).await;
    dead_clients_of_several_servers_cost_no_more_than_declared(&[server], framing, open).await;
}

/// The same for a store that talks to several servers at once: a client falls silent at all of them. `open` gets an address for each.
pub async fn dead_clients_of_several_servers_cost_no_more_than_declared(
    servers: &[SocketAddr],
    framing: Framing,
    open: impl AsyncFn(Vec<SocketAddr>) -> Arc<dyn Store>,
) {
    let live = open(servers.to_vec()).await;
    let mortal = async || {
        let proxies: Vec<Proxy> = servers.iter().map(|server| Proxy::start(*server, framing)).collect();
        let store = open(proxies.iter().map(Proxy::addr).collect()).await;
        (proxies, store)
    };
    dead_clients_behind_proxies_cost_no_more_than_declared(&live, mortal).await;
}

/// The same for a store that finds its servers itself. `mortal` opens a client, and returns the proxies that are between it and its servers.
pub async fn dead_clients_behind_proxies_cost_no_more_than_declared(
    live: &Arc<dyn Store>,
    mortal: impl AsyncFn() -> (Vec<Proxy>, Arc<dyn Store>),
) {
    let wake = live.profile().wake;
    let check = |what: &str, since: Instant, bound: Duration| {
        let took = since.elapsed();
        println!("{what}: {took:?}, of {bound:?}");
        assert!(
            took <= bound + MACHINE,
            "the next waiter was let in after {took:?}, {what}: {wake:?} are declared"
        );
    };

    let (proxies, holder) = mortal().await;
    take(&holder, &with(request("holder"), |request| request.ttl = MORTAL)).await;
    let waiter = join_queue(live, &request("holder"), 1).await;
    silence(&proxies);
    let dead = Instant::now();
    granted(waiter).await;
    check("after a dead holder, from its death", dead, MORTAL + wake);

    let (proxies, deaf) = mortal().await;
    let held = take(live, &request("message")).await;
    let waiter = tokio::spawn(acquire_again_if_unknown(deaf, request("message")));
    queue_reaches(live, &name("message"), 1).await;
    proxies.iter().for_each(|proxy| proxy.hold(Direction::Replies));
    let freed = Instant::now();
    give_back(live, &held.key).await;
    for proxy in &proxies {
        proxy.cut(Pick::Any);
        proxy.heal();
    }
    granted(waiter).await;
    check("after a message that was lost", freed, wake);

    let behind = async |count: usize, sample: usize| {
        let text = format!("waiters/{count}/{sample}");
        let held = take(live, &request(&text)).await;
        let mut clients = Vec::new();
        for _ in 0..count.min(PROCESSES) {
            clients.push(mortal().await);
        }
        let mut dead = Vec::new();
        for place in 1..=count {
            let (_, store) = &clients[place % clients.len()];
            dead.push(join_queue(store, &with(request(&text), |request| request.ttl = MORTAL), place).await);
        }
        let last = join_queue(live, &request(&text), count + 1).await;
        clients.iter().for_each(|(proxies, _)| silence(proxies));
        let freed = Instant::now();
        give_back(live, &held.key).await;
        let grant = granted(last).await;
        let took = freed.elapsed();
        check(&format!("behind {count} dead waiters"), freed, wake);
        give_back(live, &grant.key).await;
        dead.iter().for_each(JoinHandle::abort);
        took
    };
    // The cost of one dead waiter is the greatest that was seen, that of more is the least: a busy machine and the moment at which a
    // poll is due change single measurements, and growth is in all of them.
    let slack = wake / 4;
    let mut one = behind(1, 0).await;
    for count in [5, 20] {
        let mut many = behind(count, 0).await;
        for sample in 1..SAMPLES {
            if many <= one + slack {
                break;
            }
            one = one.max(behind(1, sample * count).await);
            many = many.min(behind(count, sample).await);
        }
        assert!(
            many <= one + slack,
            "the wait grows with the number of dead waiters: {many:?} behind {count}, {one:?} behind 1; {wake:?} are declared for any number"
        );
    }
}

/// A process with several waiters of a short ttl falls silent. The live waiter behind them gets the lock within `bound` after a release,
/// which follows their ttl.
pub async fn dead_waiters_of_a_short_ttl_cost_no_more_than(
    bound: Duration,
    server: SocketAddr,
    framing: Framing,
    open: impl AsyncFn(SocketAddr) -> Arc<dyn Store>,
) {
    let live = open(server).await;
    let proxy = Proxy::start(server, framing);
    let mortal = open(proxy.addr()).await;
    let held = take(&live, &request("short")).await;
    let mut dead = Vec::new();
    for place in 1..=4 {
        dead.push(join_queue(&mortal, &with(request("short"), |request| request.ttl = MORTAL), place).await);
    }
    let last = join_queue(&live, &request("short"), dead.len() + 1).await;
    silence(&[proxy]);
    let freed = Instant::now();
    give_back(&live, &held.key).await;
    granted(last).await;
    let took = freed.elapsed();
    println!("behind dead waiters with a ttl of {MORTAL:?}: {took:?}, of {bound:?}");
    assert!(took <= bound + MACHINE, "the next waiter was let in after {took:?} instead of {bound:?}");
    dead.iter().for_each(JoinHandle::abort);
}

/// Waits for the lock as the library does: the reply to the first request may be lost too, and then its outcome is unknown.
async fn acquire_again_if_unknown(store: Arc<dyn Store>, mut asked: LockRequest) -> Result<AcquireOutcome> {
    asked.wait = Wait::Forever;
    loop {
        match store.acquire(&asked).await {
            Err(Error::Unknown(_) | Error::Unavailable(_)) => {}
            answer => return answer,
        }
    }
}

fn silence(proxies: &[Proxy]) {
    for proxy in proxies {
        proxy.hold(Direction::Requests);
        proxy.hold(Direction::Replies);
    }
}
