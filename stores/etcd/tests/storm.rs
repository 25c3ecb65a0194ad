//! The laws that contend, on three members, while the leader is killed, hangs, or is cut off from everybody.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::Store;
use lockkeeper_etcd::{EtcdStore, Options};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_testkit::laws::Harness;
use lockkeeper_testkit::laws::storm::{Patient, Storm};
use lockkeeper_testkit::servers::{self, EtcdCluster, EtcdOptions};
use tokio::sync::OwnedMutexGuard;

/// What happens to the leader, and for how long: longer than the others need to notice, and to choose another.
trait Fault: Send + Sync + 'static {
    const SPAN: Duration = Duration::from_secs(3);
    fn place() -> &'static Place;
    fn strike(cluster: &mut EtcdCluster, leader: usize);
    fn heal(cluster: &mut EtcdCluster, leader: usize);
}

/// A cluster, for one law after the other: two faults at once would be another story.
#[derive(Default)]
struct Sea {
    cluster: Mutex<Option<EtcdCluster>>,
    healing: Mutex<Option<(mpsc::Sender<()>, JoinHandle<()>)>>,
}

static COUNT: AtomicUsize = AtomicUsize::new(0);

type Place = Mutex<Weak<tokio::sync::Mutex<Arc<Sea>>>>;

struct Stormy<F> {
    sea: OwnedMutexGuard<Arc<Sea>>,
    // The last law takes the cluster with it.
    _turns: Arc<tokio::sync::Mutex<Arc<Sea>>>,
    storm: Arc<Storm>,
    prefix: String,
    fault: std::marker::PhantomData<F>,
}

impl Sea {
    fn cluster(&self) -> std::sync::MutexGuard<'_, Option<EtcdCluster>> {
        self.cluster.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heal(&self) {
        let healing = self.healing.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((law_is_over, healing)) = healing {
            drop(law_is_over);
            healing.join().expect("what was broken is mended");
        }
    }
}

fn strike<F: Fault>(sea: &Arc<Sea>) {
    let leader = {
        let mut cluster = sea.cluster();
        let cluster = cluster.as_mut().expect("it runs");
        let leader = cluster.leader();
        F::strike(cluster, leader);
        leader
    };
    let later = sea.clone();
    let (law, law_is_over) = mpsc::channel::<()>();
    let heal = std::thread::spawn(move || {
        // Or sooner, if the law is over.
        _ = law_is_over.recv_timeout(F::SPAN);
        F::heal(later.cluster().as_mut().expect("it runs"), leader);
    });
    *sea.healing.lock().unwrap_or_else(PoisonError::into_inner) = Some((law, heal));
}

#[async_trait]
impl<F: Fault> Harness for Stormy<F> {
    async fn start() -> Option<Self> {
        let turns = {
            let mut place = F::place().lock().unwrap_or_else(PoisonError::into_inner);
            place.upgrade().unwrap_or_else(|| {
                let fresh = Arc::default();
                *place = Arc::downgrade(&fresh);
                fresh
            })
        };
        let sea = turns.clone().lock_owned().await;
        let own = Arc::clone(&sea);
        let fresh = move || {
            let mut cluster = own.cluster();
            if cluster.is_none() {
                *cluster = Some(servers::etcd_islands(3, EtcdOptions::default()).ok()?);
            }
            // Nothing begins before the last fault is over.
            cluster.as_ref().map(EtcdCluster::leader)
        };
        tokio::task::spawn_blocking(fresh).await.unwrap()?;
        let striking = Arc::clone(&sea);
        let storm = Storm::new(3, move || strike::<F>(&striking));
        let prefix = format!("law{}", COUNT.fetch_add(1, Ordering::Relaxed));
        Some(Stormy { sea, _turns: turns, storm, prefix, fault: std::marker::PhantomData })
    }

    async fn client(&self) -> Arc<dyn Store> {
        let hosts = self.sea.cluster().as_ref().expect("it runs").hosts();
        let url = format!("etcd://{hosts}/{}?timeout=1s", self.prefix);
        let store = EtcdStore::open(Options::from_url(&url).unwrap()).await.unwrap();
        Patient::new(Arc::new(store), self.storm.clone())
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(SystemClock)
    }

    fn for_correctness() -> bool {
        true
    }

    async fn pass(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }
}

impl<F> Drop for Stormy<F> {
    fn drop(&mut self) {
        self.sea.heal();
        assert!(std::thread::panicking() || self.storm.has_struck(), "the law was over before the storm");
    }
}

macro_rules! fault {
    ($name:ident, $strike:expr, $heal:expr) => {
        struct $name;

        impl Fault for $name {
            fn place() -> &'static Place {
                static PLACE: Place = Mutex::new(Weak::new());
                &PLACE
            }

            fn strike(cluster: &mut EtcdCluster, leader: usize) {
                let strike: fn(&mut EtcdCluster, usize) = $strike;
                strike(cluster, leader);
            }

            fn heal(cluster: &mut EtcdCluster, leader: usize) {
                let heal: fn(&mut EtcdCluster, usize) = $heal;
                heal(cluster, leader);
            }
        }
    };
}

fault!(Killed, |all, one| all.node_mut(one).kill9(), |all, one| all.node_mut(one).restart());
fault!(Hangs, |all, one| all.node_mut(one).pause(), |all, one| all.node_mut(one).resume());
fault!(CutOff, |all, one| all.island(one).cut(), |all, one| all.island(one).mend());

lockkeeper_testkit::conformance_in_storms!(Stormy<Killed>, Stormy<Hangs>, Stormy<CutOff>);
