//! A server that takes requests and answers none, while callers come and go.

use std::net::SocketAddr;
use std::time::Instant;

use super::*;
use crate::proxy::{Direction, Framing, Proxy};

/// How often callers give up: far sooner than any store gives up a connection.
const IMPATIENT: Duration = Duration::from_millis(50);
/// How long a call without a time limit of its own may take.
const NOTICED: Duration = Duration::from_secs(15);

/// A caller that gives up has not been answered: if it counted as answered, the client would not notice the silence while callers keep coming,
/// and a call without a time limit of its own would hang for as long. `open` opens a store whose `timeout` is a second at most.
pub async fn a_silent_server_is_noticed_while_callers_come_and_go(
    server: SocketAddr,
    framing: Framing,
    open: impl AsyncFn(SocketAddr) -> Arc<dyn Store>,
) {
    let open = async |addrs: Vec<SocketAddr>| open(addrs[0]).await;
    silent_servers_are_noticed_while_callers_come_and_go(&[server], framing, open).await;
}

/// The same for a store that talks to several servers at once: all of them fall silent. `open` gets an address for each.
pub async fn silent_servers_are_noticed_while_callers_come_and_go(
    servers: &[SocketAddr],
    framing: Framing,
    open: impl AsyncFn(Vec<SocketAddr>) -> Arc<dyn Store>,
) {
    let proxies: Vec<Proxy> = servers.iter().map(|server| Proxy::start(*server, framing)).collect();
    let store = open(proxies.iter().map(Proxy::addr).collect()).await;
    for direction in [Direction::Requests, Direction::Replies] {
        let free = format!("free/{direction:?}");
        let held = take(&store, &request(&format!("held/{direction:?}"))).await;
        let opened = || proxies.iter().map(|proxy| proxy.count().connections).collect::<Vec<_>>();
        let before = opened();
        proxies.iter().for_each(|proxy| proxy.hold(direction));
        let (impatient, name) = (store.clone(), held.key.names.first().clone());
        let impatient = tokio::spawn(async move {
            loop {
                _ = tokio::time::timeout(IMPATIENT, impatient.inspect(&name)).await;
            }
        });
        let begun = Instant::now();
        let answer = tokio::time::timeout(NOTICED, store.acquire(&request(&free))).await;
        let answer = answer.unwrap_or_else(|_| panic!("{direction:?} are held: the client did not notice"));
        println!("{direction:?} are held: noticed after {:?}", begun.elapsed());
        assert!(answer.is_err(), "{direction:?} are held: {answer:?}");
        // A store with a time limit for each call may answer sooner than it gives up a connection.
        eventually("the client opens another connection to each server", || async {
            opened().iter().zip(&before).all(|(now, before)| now > before)
        })
        .await;
        proxies.iter().for_each(Proxy::heal);
        impatient.abort();
        eventually("the store works again", || async { store.release(&held.key).await.is_ok() }).await;
        is_free(&store, held.key.names.first().as_str()).await;
    }
}
