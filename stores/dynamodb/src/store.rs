use std::future::Future;
use std::sync::Arc;

use async_trait::async_trait;
use lockkeeper_core::{
    Acquired, Ask, Claim, Error, EventStream, Fence, Grant, LockName, LockPage, LockView, Locks, Page,
    Profile, Release, Renewal, Result, limits,
};
use lockkeeper_host::{Reactor, boot_id, random_128};

use crate::config::Options;
use crate::errand::Errands;
use crate::hold::Mine;
use crate::script::Script;
use crate::sight::Eyes;
use crate::wall::WallClock;
use crate::{link, open};

/// Locks and records in DynamoDB. Clones share everything.
#[derive(Clone)]
pub struct DynamoStore {
    pub(crate) shared: Arc<Shared>,
    // Goes last: with it goes the thread, and everything that runs there.
    reactor: Arc<Reactor>,
}

/// What all clones have in common.
pub(crate) struct Shared {
    pub options: Options,
    pub script: Script,
    pub wall: WallClock,
    pub eyes: Eyes,
    pub mine: Mine,
    pub errands: Errands,
    /// Which boot of which machine this is: its processes share a clock.
    pub boot: String,
    profile: Profile,
}

impl std::fmt::Debug for DynamoStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DynamoStore({}, {:?})", self.shared.options.region, self.shared.options.table)
    }
}

impl DynamoStore {
    /// Finds credentials, looks at the table, and refuses what cannot work.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if nobody answers, [`Error::Denied`] if the credentials are missing or refused,
    /// [`Error::Invalid`] if the table is missing or is not one for locks, [`Error::Limited`] if DynamoDB throttles.
    pub async fn open(options: Options) -> Result<Self> {
        options.check()?;
        let reactor = Reactor::start("lockkeeper-dynamodb")
            .map_err(|error| Error::Unavailable(format!("no thread for the connection: {error}")))?;
        let wall = WallClock::new(options.clock.clone());
        let (script, profile) = reactor
            .lend(async {
                let script = link::connect(&options, &wall).await;
                let profile = open::profile(&script, &options).await?;
                Ok::<_, Error>((script, profile))
            })
            .await?;
        let shared = Shared {
            options,
            script,
            wall,
            eyes: Eyes::default(),
            mine: Mine::default(),
            errands: Errands::default(),
            boot: boot(boot_id().ok().flatten()),
            profile,
        };
        Ok(DynamoStore { shared: Arc::new(shared), reactor: Arc::new(reactor) })
    }

    /// Does something with the sockets and timers of the store's own thread. Dropping this ends it.
    pub(crate) async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.reactor.lend(work).await
    }
}

/// A container may have a boot-time clock of its own. Where the boot cannot be told, no other process shares it: two
/// machines would else take each other's moments for their own.
fn boot(id: Option<String>) -> String {
    let id = id.unwrap_or_else(|| format!("{:032x}", u128::from_be_bytes(random_128())));
    let clock = std::fs::read_link("/proc/self/ns/time").unwrap_or_default();
    format!("{id} {}", clock.display())
}

#[async_trait]
impl Locks for DynamoStore {
    fn profile(&self) -> Profile {
        self.shared.profile.clone()
    }

    async fn acquire(&self, ask: &Ask) -> Result<Acquired> {
        ask.check()?;
        self.run(self.shared.acquire(ask)).await
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<Renewal>> {
        self.run(self.shared.renew(grants)).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.run(self.shared.release(claim)).await
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        self.run(self.shared.view(name)).await
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.run(self.shared.page(prefix, page)).await
    }

    async fn watch(&self, _prefix: &str) -> Result<EventStream> {
        Err(Error::Unsupported(
            "the dynamodb store has no events to watch: look again and again, or use another store".into(),
        ))
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.run(self.shared.revoke(name, reason)).await
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.run(self.shared.break_lock(name, reason)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_whose_boot_cannot_be_told_share_no_clock() {
        assert_ne!(boot(None), boot(None));
        assert_eq!(boot(Some("one".into())), boot(Some("one".into())));
    }
}
