//! Clusters whose leader is struck in the middle of a law.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{Error, IgnorePoison, Result, Store};
use lockkeeper_host::{Clock, SystemClock};
use tokio::sync::OwnedMutexGuard;

use super::leader_fault::{RetryingStore, Storm};
use super::{Harness, soon};
use crate::servers::Cluster;

/// How long a fault lasts, unless the law is over sooner: longer than the others need to notice, and to choose another.
const SPAN: Duration = Duration::from_secs(6);
/// In the middle of a law: so many calls have begun.
const AT: usize = 3;

/// A kind of cluster, and what happens to its leader. One for each fault, because each has a cluster of its own.
#[async_trait]
pub trait FaultScenario: Send + Sync + 'static {
    /// The fault.
    const FAULT: MemberFault;

    /// Where the cluster is kept from law to law.
    fn place() -> &'static ScenarioSlot;

    /// Starts one, on islands.
    fn start() -> Option<Cluster>;

    /// Opens a store there, under a prefix of its own.
    async fn open(hosts: String, prefix: String) -> Result<Arc<dyn Store>>;
}

/// The faults of a leader.
#[derive(Clone, Copy, Debug)]
pub enum MemberFault {
    /// It is killed, and comes back with its disk.
    Killed,
    /// It hangs: it takes connections, and says nothing.
    Hangs,
    /// Its connections to its peers and to its clients stay open and carry nothing.
    CutOff,
}

impl MemberFault {
    fn strike(self, cluster: &mut Cluster, leader: usize) {
        match self {
            MemberFault::Killed => cluster.node_mut(leader).kill9(),
            MemberFault::Hangs => cluster.node_mut(leader).pause(),
            MemberFault::CutOff => cluster.island(leader).cut(),
        }
    }

    fn heal(self, cluster: &mut Cluster, leader: usize) {
        match self {
            MemberFault::Killed => cluster.node_mut(leader).restart(),
            MemberFault::Hangs => cluster.node_mut(leader).resume(),
            MemberFault::CutOff => cluster.island(leader).mend(),
        }
    }
}

/// Where a cluster is kept for one law after the other: two faults at once would be another story. The last one takes it
/// along.
pub type ScenarioSlot = Mutex<Weak<ScenarioTurns>>;
type ScenarioTurns = tokio::sync::Mutex<Arc<FaultCluster>>;

/// A cluster, and what is to be mended.
#[derive(Default)]
pub struct FaultCluster {
    cluster: Mutex<Option<Cluster>>,
    healing: Mutex<Option<(mpsc::Sender<()>, JoinHandle<()>)>>,
}

impl FaultCluster {
    fn cluster(&self) -> MutexGuard<'_, Option<Cluster>> {
        self.cluster.lock().ignore_poison()
    }

    fn healing(&self) -> MutexGuard<'_, Option<(mpsc::Sender<()>, JoinHandle<()>)>> {
        self.healing.lock().ignore_poison()
    }

    /// Starts what does not run, and waits for all members: nothing begins before the last fault is over.
    fn calm<W: FaultScenario>(&self) -> Option<()> {
        let mut cluster = self.cluster();
        if cluster.is_none() {
            *cluster = Some(W::start()?);
        }
        cluster.as_ref().map(Cluster::settle)
    }

    fn strike(self: &Arc<Self>, fault: MemberFault) {
        let leader = {
            let mut cluster = self.cluster();
            let cluster = cluster.as_mut().expect("it runs");
            let leader = cluster.leader();
            fault.strike(cluster, leader);
            leader
        };
        let (sea, (law, law_is_over)) = (self.clone(), mpsc::channel::<()>());
        let heal = std::thread::spawn(move || {
            _ = law_is_over.recv_timeout(SPAN);
            fault.heal(sea.cluster().as_mut().expect("it runs"), leader);
        });
        *self.healing() = Some((law, heal));
    }

    fn heal(&self) {
        let healing = self.healing().take();
        if let Some((law_is_over, healing)) = healing {
            drop(law_is_over);
            healing.join().expect("what was broken is mended");
        }
    }
}

/// The harness for one law in one kind of weather.
pub struct UnderFaults<W> {
    sea: OwnedMutexGuard<Arc<FaultCluster>>,
    _turns: Arc<ScenarioTurns>,
    storm: Arc<Storm>,
    prefix: String,
    weather: PhantomData<W>,
}

#[async_trait]
impl<W: FaultScenario> Harness for UnderFaults<W> {
    const CALM: bool = false;

    async fn start() -> Option<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let turns = {
            let mut place = W::place().lock().ignore_poison();
            place.upgrade().unwrap_or_else(|| {
                let fresh = Arc::default();
                *place = Arc::downgrade(&fresh);
                fresh
            })
        };
        let sea = turns.clone().lock_owned().await;
        let (calm, striking) = (Arc::clone(&sea), Arc::clone(&sea));
        tokio::task::spawn_blocking(move || calm.calm::<W>()).await.expect("the cluster runs")?;
        let storm = Storm::new(AT, move || striking.strike(W::FAULT));
        let prefix = format!("law{}", COUNT.fetch_add(1, Ordering::Relaxed));
        Some(UnderFaults { sea, _turns: turns, storm, prefix, weather: PhantomData })
    }

    async fn client(&self) -> Arc<dyn Store> {
        let hosts = self.sea.cluster().as_ref().expect("it runs").hosts();
        // The last fault may have been a moment ago.
        let opened = async {
            loop {
                match W::open(hosts.clone(), self.prefix.clone()).await {
                    Err(Error::Unknown(_) | Error::Unavailable(_)) => {}
                    opened => return opened.expect("a store"),
                }
            }
        };
        RetryingStore::new(soon("a store opens", opened).await, self.storm.clone())
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

impl<W> Drop for UnderFaults<W> {
    fn drop(&mut self) {
        self.sea.heal();
        assert!(std::thread::panicking() || self.storm.has_struck(), "the law was over before the storm");
    }
}

/// Every law that contends, while the leader is killed, hangs and is cut off. `$start` starts a cluster on islands, `$open`
/// opens a store by its hosts and a prefix.
#[macro_export]
macro_rules! conformance_in_every_storm {
    ($start:expr, $open:expr) => {
        $crate::weather!(Killed, $start, $open);
        $crate::weather!(Hangs, $start, $open);
        $crate::weather!(CutOff, $start, $open);
        $crate::conformance_under_faults!(
            $crate::laws::fault_scenario::UnderFaults<Killed>,
            $crate::laws::fault_scenario::UnderFaults<Hangs>,
            $crate::laws::fault_scenario::UnderFaults<CutOff>
        );
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! weather {
    ($name:ident, $start:expr, $open:expr) => {
        struct $name;

        #[async_trait::async_trait]
        impl $crate::laws::fault_scenario::FaultScenario for $name {
            const FAULT: $crate::laws::fault_scenario::MemberFault =
                $crate::laws::fault_scenario::MemberFault::$name;

            fn place() -> &'static $crate::laws::fault_scenario::ScenarioSlot {
                static PLACE: $crate::laws::fault_scenario::ScenarioSlot =
                    std::sync::Mutex::new(std::sync::Weak::new());
                &PLACE
            }

            fn start() -> Option<$crate::servers::Cluster> {
                $start()
            }

            async fn open(
                hosts: String,
                prefix: String,
            ) -> lockkeeper_core::Result<std::sync::Arc<dyn lockkeeper_core::Store>> {
                $open(hosts, prefix).await
            }
        }
    };
}
