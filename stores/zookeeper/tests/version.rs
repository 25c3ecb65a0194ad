//! Members of some versions can forget what a majority has taken. A store on servers that do not tell which version they are is
//! taken for one of those.

mod common;

use common::{keeper, open, try_open};
use lockkeeper_core::{Error, Promise};
use lockkeeper_testkit::proxy::{Fault, Framing, Pick, Proxy};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_does_not_tell_its_version_is_not_for_correctness() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let told = open(server.addr()).await;
    assert_eq!((told.profile().exclusion, told.profile().durable), (Promise::Kept, Promise::Kept));
    drop(keeper(&told).lock("x").for_correctness().acquire().await.unwrap());
    // Everything but the one word passes.
    let proxy = Proxy::start(server.addr(), Framing::Bytes);
    let silence = proxy.inject(Fault::at_request(1).on(Pick::sent("srvr")).and_every_later_one().cut());
    let untold = try_open(&format!("zk://{}", proxy.addr())).await.unwrap();
    assert!(silence.fired());
    assert_eq!((untold.profile().exclusion, untold.profile().durable), (Promise::Likely, Promise::Likely));
    let refusal = keeper(&untold).lock("y").for_correctness().acquire().await.unwrap_err();
    assert!(matches!(&refusal, Error::Unsupported(why) if why.contains("srvr")), "{refusal}");
    // For efficiency it is as good as any.
    drop(keeper(&untold).lock("y").acquire().await.unwrap());
}
