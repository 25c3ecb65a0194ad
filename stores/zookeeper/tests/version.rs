//! Servers of some versions can lose writes that a majority has accepted. Servers that do not return their version
//! count as such.

mod common;

use common::{keeper, open, try_open};
use lockkeeper_core::{Error, Guarantee};
use lockkeeper_testkit::proxy::{Fault, Framing, Pick, Proxy};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_version_is_not_for_correctness() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let told = open(server.addr()).await;
    assert_eq!((told.profile().exclusion, told.profile().durable), (Guarantee::Kept, Guarantee::Kept));
    drop(keeper(&told).lock("x").for_correctness().acquire().await.unwrap());
    // The proxy blocks only this word.
    let proxy = Proxy::start(server.addr(), Framing::Bytes);
    let silence = proxy.inject(Fault::at_request(1).on(Pick::sent("srvr")).and_every_later_one().cut());
    let untold = try_open(&format!("zk://{}", proxy.addr())).await.unwrap();
    assert!(silence.fired());
    assert_eq!(
        (untold.profile().exclusion, untold.profile().durable),
        (Guarantee::Likely, Guarantee::Likely)
    );
    let refusal = keeper(&untold).lock("y").for_correctness().acquire().await.unwrap_err();
    assert!(matches!(&refusal, Error::Unsupported(why) if why.contains("srvr")), "{refusal}");
    // For efficiency the store can be used.
    drop(keeper(&untold).lock("y").acquire().await.unwrap());
}
