//! W: how long the next waiter waits after a lock became free, compared with what the store declares in `Profile::wake`.

use std::net::SocketAddr;
use std::time::Instant;

use lockkeeper_core::{Acquired, Moment, Result};
use tokio::task::JoinHandle;

use super::*;
use crate::proxy::{Direction, Framing, Pick, Proxy};

/// What a busy machine may add to the declared time.
const MACHINE: Duration = Duration::from_secs(2);
/// The ttl of a client that dies.
const MORTAL: Duration = Duration::from_secs(2);
/// How many processes share the dead waiters.
const PROCESSES: usize = 4;

/// A lock becomes free by a release, by the end of a lease, or because the waiter in front leaves.
pub async fn the_next_waiter_is_let_in_within_the_declared_time<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let held = take(&a, &ask("released")).await;
    let waiter = stand_in_line(&b, &ask("released"), 1).await;
    let freed = h.clock().now();
    give_back(&a, &held.claim).await;
    within(&h, &a, "a release", freed, waiter).await;

    let held = take(&a, &with(ask("expired"), |ask| ask.ttl = SHORT)).await;
    let waiter = stand_in_line(&b, &ask("expired"), 1).await;
    h.pass(SHORT).await;
    within(&h, &a, "the end of a lease", held.sent_at + SHORT, waiter).await;

    let held = take(&a, &ask("left")).await;
    let leaves = ask("left");
    let left = stand_in_line(&a, &leaves, 1).await;
    let waiter = stand_in_line(&b, &ask("left"), 2).await;
    give_back(&a, &leaves.claim).await;
    let freed = h.clock().now();
    give_back(&a, &held.claim).await;
    within(&h, &a, "a release, with a waiter that had left", freed, waiter).await;
    left.abort();
}

async fn within<H: Harness>(
    h: &H,
    store: &Arc<dyn Store>,
    after: &str,
    freed: Moment,
    waiter: JoinHandle<Result<Acquired>>,
) {
    let grant = granted(waiter).await;
    let (took, wake) = (h.clock().now().since(freed), store.profile().wake);
    assert!(
        took <= wake + MACHINE,
        "the next waiter was let in {took:?} after {after}: {wake:?} are declared"
    );
    give_back(store, &grant.claim).await;
}

/// Clients fall silent, as if their host had lost its power: their connections stay open, and nothing moves on them. The next waiter gets
/// the lock within the declared time after a dead holder's ttl, after a release behind any number of dead waiters, and after a message
/// that was lost. `open` opens a store at an address, be it the server's or a proxy's.
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
    take(&holder, &with(ask("holder"), |ask| ask.ttl = MORTAL)).await;
    let waiter = stand_in_line(&live, &ask("holder"), 1).await;
    silence(&proxies);
    let dead = Instant::now();
    granted(waiter).await;
    check("after a dead holder, from its death", dead, MORTAL + wake);

    let (proxies, deaf) = mortal().await;
    let held = take(&live, &ask("message")).await;
    let waiter = stand_in_line(&deaf, &ask("message"), 1).await;
    proxies.iter().for_each(|proxy| proxy.hold(Direction::Replies));
    let freed = Instant::now();
    give_back(&live, &held.claim).await;
    for proxy in &proxies {
        proxy.cut(Pick::Any);
        proxy.heal();
    }
    granted(waiter).await;
    check("after a message that was lost", freed, wake);

    for count in [1, 5, 20] {
        let text = format!("waiters/{count}");
        let held = take(&live, &ask(&text)).await;
        let mut clients = Vec::new();
        for _ in 0..count.min(PROCESSES) {
            clients.push(mortal().await);
        }
        let mut dead = Vec::new();
        for place in 1..=count {
            let (_, store) = &clients[place % clients.len()];
            dead.push(stand_in_line(store, &with(ask(&text), |ask| ask.ttl = MORTAL), place).await);
        }
        let last = stand_in_line(&live, &ask(&text), count + 1).await;
        clients.iter().for_each(|(proxies, _)| silence(proxies));
        let freed = Instant::now();
        give_back(&live, &held.claim).await;
        let grant = granted(last).await;
        check(&format!("behind {count} dead waiters"), freed, wake);
        give_back(&live, &grant.claim).await;
        dead.iter().for_each(JoinHandle::abort);
    }
}

fn silence(proxies: &[Proxy]) {
    for proxy in proxies {
        proxy.hold(Direction::Requests);
        proxy.hold(Direction::Replies);
    }
}
