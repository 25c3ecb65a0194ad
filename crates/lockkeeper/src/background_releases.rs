//! The releases that the driver sends in the background, and retries; and who waits for them.

use std::collections::{BTreeSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lockkeeper_core::{BootInstant, RequestKey, Store};
use lockkeeper_host::{Clock, sleep_until};
use tokio::sync::oneshot;

/// A release that the driver sends in the background.
pub(crate) struct BackgroundRelease {
    pub key: RequestKey,
    pub ttl: Duration,
    /// Whether the request may still be queued.
    pub queued: bool,
}

/// The number of a release that has ended, and the release if the driver is to go on with it.
type NumberedEnd = (u64, Option<BackgroundRelease>);

/// The releases, refunds and takes that are in flight, and the callers that wait for those of before their call.
#[derive(Default)]
pub(crate) struct BackgroundReleases {
    futures: FuturesUnordered<Pin<Box<dyn Future<Output = NumberedEnd> + Send>>>,
    next_number: u64,
    /// The numbers of those in flight.
    in_flight: BTreeSet<u64>,
    /// The number that is the first after each call, in order: a busy keeper never has nothing in flight.
    flushing: VecDeque<(u64, oneshot::Sender<()>)>,
}

impl BackgroundReleases {
    pub fn is_empty(&self) -> bool {
        self.futures.is_empty()
    }

    pub fn push(&mut self, release: impl Future<Output = Option<BackgroundRelease>> + Send + 'static) {
        let number = self.next_number;
        self.next_number += 1;
        self.in_flight.insert(number);
        self.futures.push(Box::pin(async move { (number, release.await) }));
    }

    /// The next that has ended: a release that failed, if the driver is to go on with it. `None`: nothing is in flight. May be dropped at
    /// any await point.
    pub async fn next(&mut self) -> Option<Option<BackgroundRelease>> {
        let (number, failed) = self.futures.next().await?;
        self.in_flight.remove(&number);
        self.answer_flushes();
        Some(failed)
    }

    pub fn flush(&mut self, reply: oneshot::Sender<()>) {
        self.flushing.push_back((self.next_number, reply));
        self.answer_flushes();
    }

    fn answer_flushes(&mut self) {
        let oldest = self.in_flight.first().copied().unwrap_or(self.next_number);
        while let Some((_, reply)) = self.flushing.pop_front_if(|(end, _)| *end <= oldest) {
            let _ = reply.send(());
        }
    }
}

/// The longest pause between two attempts to release.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Releases, and retries for a ttl. If that fails it returns a request that may be queued; the lease of a
/// grant has ended by then.
pub(crate) async fn release_for_ttl(
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    release: BackgroundRelease,
) -> Option<BackgroundRelease> {
    let give_up = clock.now() + release.ttl;
    let released = release_until(&*store, &*clock, &release, give_up).await;
    if released {
        return None;
    }
    let (names, queued) = (&release.key.names, release.queued);
    tracing::warn!(%names, queued, "the release failed for a ttl; a grant has expired, and the release of a queued request is retried");
    release.queued.then_some(release)
}

/// Releases, and retries without a limit.
pub(crate) async fn release_until_done(
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    release: BackgroundRelease,
) {
    release_until(&*store, &*clock, &release, BootInstant::NEVER).await;
}

async fn release_until(
    store: &dyn Store,
    clock: &dyn Clock,
    release: &BackgroundRelease,
    give_up: BootInstant,
) -> bool {
    let mut pause = Duration::from_millis(10);
    loop {
        let answer = tokio::select! {
            answer = store.release(&release.key) => answer,
            () = sleep_until(clock, give_up) => return false,
        };
        match answer {
            Ok(_) => return true,
            Err(error) => tracing::debug!(%error, names = %release.key.names, "release failed; retrying"),
        }
        if clock.now() >= give_up {
            return false;
        }
        sleep_until(clock, (clock.now() + pause).min(give_up)).await;
        pause = (pause * 2).min(release.ttl / 10).min(PAUSE_MAX);
    }
}
