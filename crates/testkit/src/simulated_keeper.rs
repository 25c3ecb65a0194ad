//! A keeper on a simulated clock, to test loss, pause and expiry in a user's own code.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lockkeeper::{Error, Lockkeeper, Result};
use lockkeeper_core::{
    AcquireOutcome, Fence, Grant, LockRequest, ReleaseOutcome, RenewOutcome, RequestKey, Store,
};
use lockkeeper_host::VirtualClock;
use lockkeeper_memory::MemoryStore;

/// A keeper on a clock that you turn: for tests of *your* code. Hours pass in milliseconds, and loss, pause, expiry and
/// an unreachable store come when you say so.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// use lockkeeper_testkit::SimulatedKeeper;
/// use std::time::Duration;
///
/// let rehearsal = SimulatedKeeper::new();
/// let guard = rehearsal.keeper().lock("nightly").ttl(Duration::from_secs(30)).acquire().await?;
///
/// rehearsal.pass(Duration::from_secs(3600)).await;      // an hour of renewals
/// assert!(guard.is_held());
///
/// rehearsal.pause(Duration::from_secs(31)).await;       // the process is stopped past its ttl
/// assert!(!guard.is_held());
/// let rival = rehearsal.rival().lock("nightly").try_acquire().await?.expect("free by now");
/// assert!(rival.fence() > guard.fence());               // so a fenced resource refuses the late one
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SimulatedKeeper {
    clock: VirtualClock,
    stage: Arc<Simulation>,
    keeper: Lockkeeper,
    rival: Lockkeeper,
}

impl Default for SimulatedKeeper {
    fn default() -> Self {
        SimulatedKeeper::new()
    }
}

impl SimulatedKeeper {
    /// An empty store, a clock that stands still, and two keepers: yours, and a rival's.
    pub fn new() -> Self {
        let clock = VirtualClock::default();
        let store = MemoryStore::new(Arc::new(clock.clone()));
        let stage = Arc::new(Simulation { store: Arc::new(store.clone()), cut: AtomicBool::new(false) });
        SimulatedKeeper {
            keeper: Lockkeeper::with_store(stage.clone(), Arc::new(clock.clone())),
            rival: Lockkeeper::with_store(Arc::new(store), Arc::new(clock.clone())),
            stage,
            clock,
        }
    }

    /// The keeper to give to the code under test.
    pub fn keeper(&self) -> Lockkeeper {
        self.keeper.clone()
    }

    /// The keeper of another process on the same store.
    pub fn rival(&self) -> Lockkeeper {
        self.rival.clone()
    }

    /// The clock, for code that wants to see it.
    pub fn clock(&self) -> VirtualClock {
        self.clock.clone()
    }

    /// Time goes on, and everything happens on the way that would: renewals, expiries, waiters that give up.
    pub async fn pass(&self, time: Duration) {
        let mut left = time;
        self.quiesce().await;
        while !left.is_zero() {
            left = self.clock.step(left);
            self.quiesce().await;
        }
    }

    /// The process is stopped, the store is not: time goes on in one leap, and nothing was renewed meanwhile.
    pub async fn pause(&self, time: Duration) {
        self.quiesce().await;
        self.clock.jump(time);
        self.quiesce().await;
    }

    /// Cuts your keeper off from the store; the rival is not.
    pub fn cut(&self) {
        self.stage.cut.store(true, Ordering::SeqCst);
    }

    /// Lets your keeper reach the store again.
    pub fn heal(&self) {
        self.stage.cut.store(false, Ordering::SeqCst);
    }

    /// An operator breaks the lock. Its holder learns of it at its next renewal: let some time pass.
    pub async fn lose(&self, name: &str) -> Result<Fence> {
        self.rival.break_lock(name, "rehearsal").await
    }

    async fn quiesce(&self) {
        self.keeper.quiesce().await;
        self.rival.quiesce().await;
        // And a turn for the code under test.
        tokio::task::yield_now().await;
    }
}

/// The memory store, which may be out of reach.
struct Simulation {
    store: Arc<dyn Store>,
    cut: AtomicBool,
}

impl std::fmt::Debug for Simulation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Simulation(cut: {:?})", self.cut)
    }
}

impl Simulation {
    fn reach(&self) -> Result<()> {
        if self.cut.load(Ordering::SeqCst) {
            Err(Error::Unavailable("cut off by the rehearsal".into()))
        } else {
            Ok(())
        }
    }
}

crate::forward!(Simulation, {
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.reach()?;
        self.store.acquire(request).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.reach()?;
        self.store.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.reach()?;
        self.store.release(key).await
    }
});
