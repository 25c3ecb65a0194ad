//! A wall clock that is set while a lock is held.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use lockkeeper_core::{BootInstant, ReleaseOutcome, Store, WallTime};
use lockkeeper_etcd::{EtcdStore, Options};
use lockkeeper_host::{Clock, SystemClock, Timer};
use lockkeeper_testkit::laws::{LONG, eventually, give_back, refused, request, take, with};
use lockkeeper_testkit::proxy::{Framing, Proxy};
use lockkeeper_testkit::servers::{self, EtcdOptions};

const HOUR: i64 = 3_600_000_000;

/// A machine with a wrong wall clock and a correct boot-time clock.
#[derive(Clone, Debug, Default)]
struct Off(Arc<AtomicI64>);

impl Clock for Off {
    fn now(&self) -> BootInstant {
        SystemClock.now()
    }

    fn wall(&self) -> WallTime {
        WallTime::from_micros(
            SystemClock.wall().as_micros().saturating_add_signed(self.0.load(Ordering::Relaxed)),
        )
    }

    fn start(&self) -> std::io::Result<()> {
        SystemClock.start()
    }

    fn call_at(&self, at: BootInstant, then: Box<dyn FnOnce() + Send>) -> Timer {
        SystemClock.call_at(at, then)
    }
}

/// A wall clock that was set forward used to end a minimum hold too early, also when the release had to be sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_set_forward_ends_no_minimum_hold() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let other = common::open(server.addr()).await;
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let off = Off::default();
    let mut options = Options::from_url(&format!("etcd://{}?timeout=3s", proxy.addr())).unwrap();
    options.clock = Arc::new(off.clone());
    let store: Arc<dyn Store> = Arc::new(EtcdStore::open(options).await.unwrap());
    let cron = |text: &str| with(request(text), |request| request.min_hold = LONG);
    let held = [take(&store, &cron("replied")).await, take(&store, &cron("no-reply")).await];
    off.0.store(HOUR, Ordering::Relaxed);
    assert_eq!(give_back(&store, &held[0].key).await, ReleaseOutcome::Released);
    assert!(refused(&other, &request("replied")).await.held[0].lingering);
    proxy.cut_all();
    assert!(store.release(&held[1].key).await.is_err());
    proxy.heal();
    eventually("it is released", || async { refused(&other, &request("no-reply")).await.held[0].lingering })
        .await;
    let left =
        other.inspect(&held[1].key.names.first().clone()).await.unwrap().unwrap().held[0].expires_in_ms;
    assert!(Duration::from_millis(left) > LONG / 2, "{left} ms are left");
}
