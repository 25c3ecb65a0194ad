//! The laws, with the machine's clock: `cargo test -p lockkeeper-store-template --features laws`.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{Attempt, Store};
use lockkeeper_host::{Clock, SystemClock, random_128};
use lockkeeper_store_template::{Options, TemplateStore};
use lockkeeper_testkit::laws::Harness;

/// One prefix of the server's keys for each law: the laws run at the same time, and use the same names.
struct Template {
    url: String,
}

#[async_trait]
impl Harness for Template {
    /// Fill in: start a server once for all laws (`lockkeeper_testkit::servers`), on a free port.
    async fn start() -> Option<Self> {
        let prefix = Attempt::from_bytes(random_128()).to_hex();
        Some(Template { url: format!("template://127.0.0.1:7000/{prefix}") })
    }

    async fn client(&self) -> Arc<dyn Store> {
        let options = Options::from_url(&self.url).expect("a good URL");
        Arc::new(TemplateStore::open(options).expect("the store opens"))
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(SystemClock)
    }

    /// Fill in: true if the profile of this server keeps fences and grants over a crash.
    fn for_correctness() -> bool {
        false
    }

    /// A server has a clock of its own, so the law waits. With a store that takes all time from `Options::clock`, pass a
    /// `VirtualClock` to it and advance that.
    async fn pass(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }
}

lockkeeper_testkit::conformance!(Template);
// With records: lockkeeper_testkit::recipes!(Template), in a module of its own.
